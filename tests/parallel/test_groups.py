"""Live groups: 64 ranks with torch's fake backend, and up to 8 real gloo ranks for many layouts."""

import contextlib
import json
import pathlib

import pytest
import torch
import torch.distributed as dist
from dspark.parallel.groups import Group, Groups, TrafficCounter
from dspark.parallel.topology import AXES, Topology

CASES = json.loads((pathlib.Path(__file__).parents[1] / "data/parallel/groups.json").read_text())["cases"]
SMALL = [case for case in CASES if case["status"] == "ok" and 1 < case["world"] <= 8]


@contextlib.contextmanager
def fake_job(rank, world):
    fake_pg = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=rank, world_size=world, store=fake_pg.FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


LAYOUTS_OF_64 = [
    {"tp": 64, "dp": 4, "cp": 4, "ep": 64},
    {"tp": 16, "pp": 4, "dp": 2, "cp": 4, "ep": 4},
    {"tp": 64, "cp": 2, "moe_dp": 2, "ep": 32},
    {"tp": 8, "pp": 8, "dp": 8, "ep": 8},
    {"tp": 64, "ep": 8},
]


@pytest.mark.parametrize("sizes", LAYOUTS_OF_64, ids=str)
def test_all_ranks_of_64_create_the_same_groups_in_the_same_order(sizes, monkeypatch):
    topology = Topology.make(64, **sizes, gpus_per_node=8)
    created = {}
    new_group, calls = dist.new_group, []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **kw: calls.append(tuple(ranks)) or new_group(ranks, **kw))
    for rank in range(0, 64, 7):
        calls.clear()
        with fake_job(rank, 64):
            groups = Groups.build(topology, rank)
            for axis, lists in (topology.groups | topology.attention_groups | topology.expert_groups).items():
                group = getattr(groups, axis)
                assert group.ranks in lists and group.ranks[group.rank] == rank
                assert group.size == len(lists[0]) and (group.pg is None) == (group.size == 1)
                assert axis not in AXES or getattr(groups, topology.alias(axis)) is group
                if group.pg is not None:
                    assert dist.get_process_group_ranks(group.pg) == list(group.ranks)
                here = topology.node(rank)
                assert [group.ranks[i] for i in group.remote_peers] == [r for r in group.ranks if r // 8 != here]
                assert group.crosses_nodes == (len(topology.nodes_of(group.ranks)) > 1)
        created[rank] = list(calls)
    every = topology.groups | topology.attention_groups | topology.expert_groups
    needed = {ranks for lists in every.values() for ranks in lists if 1 < len(ranks) < 64}
    assert set(created[0]) == needed and len(created[0]) == len(needed)
    assert all(order == created[0] for order in created.values())


def test_shared_objects_and_shared_process_groups():
    with fake_job(5, 16):
        groups = Groups.build(Topology.make(16, dp=2, cp=4, ep=16, gpus_per_node=8), 5)
        assert groups.moe_ep is groups.tp and groups.moe_dp is groups.attn_cp and groups.attn_cp is not groups.tp
        assert groups.world is not groups.tp and groups.world.pg is groups.tp.pg
        assert groups.moe_tp.pg is None and groups.pp.pg is None
        names = [group.name for group in groups]
        assert names[:9] == ["world", "tp", "pp", "attn_tp", "attn_cp", "attn_dp", "moe_tp", "attn_block", "attn_rows"]
        assert names[9:] == ["ep_inside", "ep_across"] and groups.moe_block is groups.tp
        assert groups.ep_inside.ranks == tuple(range(8)) and groups.ep_across.ranks == (5, 13)
        assert groups.attn_block.ranks == tuple(range(8)) and groups.attn_rows.ranks == tuple(range(1, 16, 2))
        alone = groups.alone("draft")
        assert (alone.ranks, alone.size, alone.pg, alone.crosses_nodes) == ((5,), 1, None, False)
    with fake_job(0, 8):
        groups = Groups.build(Topology.make(8, cp=2, ep=4, moe_dp=2), 0)
        assert groups.moe_dp is not groups.attn_cp and groups.moe_dp.pg is groups.attn_cp.pg


def _sum_of_ranks(rank, world, layouts):
    """For every layout and axis: the sum of the world ranks, taken over the live group of this rank."""
    sums = []
    for sizes in layouts:
        groups = Groups.build(Topology.make(world, **sizes), rank)
        row = []
        for axis in ("world", *AXES):
            group = getattr(groups, axis)
            value = torch.tensor([rank])
            if group.pg is not None:
                dist.all_reduce(value, group=group.pg)
            row.append(value.item())
        sums.append(row)
    return sums


@pytest.mark.parametrize("world", [2, 4, 6, 8])
def test_real_groups_reach_exactly_their_ranks(run_ranks, world):
    layouts = {
        2: [{}, {"pp": 2}, {"dp": 2, "ep": 2}],
        4: [case["sizes"] for case in SMALL if case["world"] == 4]
        + [{"pp": 2, "cp": 2}, {"ep": 2}, {"cp": 4, "moe_dp": 4}],
        6: [{"dp": 3, "ep": 2}, {"pp": 3, "cp": 2}, {"pp": 2, "dp": 3, "ep": 3}],
        8: [case["sizes"] for case in SMALL if case["world"] == 8] + [{"pp": 2, "dp": 2, "cp": 2, "ep": 2}],
    }[world]
    results = run_ranks(_sum_of_ranks, world, layouts)
    for rank, rows in enumerate(results):
        for sizes, row in zip(layouts, rows):
            topology = Topology.make(world, **sizes)
            expected = [sum(topology.group_of(axis, rank)) for axis in AXES]
            assert row == [sum(range(world)), *expected], (sizes, rank)


def test_one_rank_needs_no_job():
    groups = Groups.single()
    assert all(group.size == 1 and group.pg is None and not group.crosses_nodes for group in groups)
    assert groups.attn_tp is groups.moe_ep is groups.tp and groups.topology.world == 1
    assert Groups.single(3).alone().ranks == (3,)
    assert Groups.build(Topology(), 0).world.size == 1


def test_a_layout_that_is_not_the_running_job_is_refused():
    with pytest.raises(ValueError, match="4 ranks needs a running process group"):
        Groups.build(Topology.make(4), 0)
    with fake_job(1, 8):
        with pytest.raises(ValueError, match="has 4 ranks .* rank 1, but the running job has 8 ranks"):
            Groups.build(Topology.make(4), 1)
        with pytest.raises(ValueError, match="this is rank 2, but .* rank 1"):
            Groups.build(Topology.make(8), 2)


def test_traffic_counter():
    counter = TrafficCounter()
    counter.add("all_gather", 10, 30, 20)
    counter.add("all_gather", 1, 3, 2)
    counter.add("barrier", 0, 0, 0)
    total = counter.total()
    assert (total.calls, total.bytes, total.sent_bytes, total.cross_node_bytes) == (3, 11, 33, 22)
    assert counter["all_gather"].calls == 2 and counter["broadcast"].calls == 0
    counter.reset()
    assert counter.total().calls == 0 and counter["all_gather"].bytes == 0


def test_a_group_knows_its_place():
    with pytest.raises(AssertionError):
        Group("tp", (0, 1), 0)
    assert "rank 0 of 1, world ranks [7]" in repr(Group.alone("self", 7))
