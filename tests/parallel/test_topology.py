"""Rank arithmetic against tables made by other code, and against the definition of the axes."""

import itertools
import json
import pathlib

import pytest
from dspark.parallel.topology import AXES, Coords, Topology

CASES = json.loads((pathlib.Path(__file__).parents[1] / "data/parallel/groups.json").read_text())["cases"]
GOOD = [case for case in CASES if case["status"] == "ok"]
BAD = [case for case in CASES if case["status"] != "ok"]


def make(case):
    sizes = case["sizes"]
    return Topology.make(case.get("world", sizes["tp"] * sizes["pp"]), **sizes, gpus_per_node=8)


def small_layouts(most=16):
    """Every valid layout of up to ``most`` ranks."""
    found = []
    for tp, pp in itertools.product(range(1, most + 1), (1, 2, 3)):
        numbers = [d for d in range(1, tp + 1) if tp % d == 0]
        for dp, cp, ep, moe_dp in itertools.product(numbers, repeat=4):
            try:
                found.append(Topology(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, moe_dp=moe_dp))
            except ValueError:
                continue
    return [t for t in found if t.world <= most]


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case["name"])
def test_tables_of_the_oracle(case):
    t = make(case)
    assert {axis: [list(ranks) for ranks in t.groups[axis]] for axis in AXES} == case["groups"]
    assert [list(t.coords(rank)) for rank in range(t.world)] == case["coords"]["by_rank"]
    assert list(Coords._fields) == case["coords"]["order"]
    assert {axis: t.crosses_nodes(axis) for axis in AXES} == case["crosses_nodes"]
    assert {axis: t.alias(axis) for axis in AXES if t.alias(axis) != axis} == case["alias"]
    assert (t.sizes, t.world) == (case["sizes"], case["world"])
    assert {"attn_tp": t.attn_tp, "moe_tp": t.moe_tp} == case["widths"]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case["name"])
def test_refusals_of_the_oracle(case):
    with pytest.raises(ValueError):
        make(case)


def test_every_small_layout_follows_the_definition_of_its_axes():
    """A group is the ranks that agree in all other coordinates; found here by comparing coordinates, not by strides."""
    layouts = small_layouts()
    assert len(layouts) > 500
    views = {
        "pp": ("attn_dp", "attn_cp", "attn_tp"),
        "tp": ("pp",),
        "attn_tp": ("pp", "attn_dp", "attn_cp"),
        "attn_cp": ("pp", "attn_dp", "attn_tp"),
        "attn_dp": ("pp", "attn_cp", "attn_tp"),
        "attn_block": ("pp", "attn_dp"),
        "attn_rows": ("pp", "attn_tp"),
        "moe_ep": ("pp", "moe_dp", "moe_tp"),
        "moe_tp": ("pp", "moe_dp", "moe_ep"),
        "moe_dp": ("pp", "moe_ep", "moe_tp"),
    }
    for t in layouts:
        coords = [t.coords(rank) for rank in range(t.world)]
        assert len({c[:4] for c in coords}) == len({(c.pp, *c[4:]) for c in coords}) == t.world
        for rank, c in enumerate(coords):
            assert rank == c.pp * t.tp + (c.attn_dp * t.cp + c.attn_cp) * t.attn_tp + c.attn_tp
            assert rank == c.pp * t.tp + (c.moe_dp * t.ep + c.moe_ep) * t.moe_tp + c.moe_tp
        for axis, fixed in views.items():
            blocks = {}
            for rank, c in enumerate(coords):
                blocks.setdefault(tuple(getattr(c, name) for name in fixed), []).append(rank)
            expected = sorted(map(tuple, blocks.values()))
            if axis == "moe_dp" and t.cp > t.moe_dp:
                expected = sorted(t.groups["attn_cp"])
            assert sorted((t.groups | t.attention_groups)[axis]) == expected, (t, axis)


@pytest.mark.parametrize(
    "sizes, numbers",
    [
        ({"world": 8, "ep": 3}, ("tp = 8", "ep = 3", "1, 2, 4, 8")),
        ({"world": 8, "dp": 3}, ("tp = 8", "dp = 3")),
        ({"world": 8, "cp": 3}, ("tp = 8", "cp = 3")),
        ({"world": 8, "dp": 4, "cp": 4}, ("tp = 8", "dp * cp = 16")),
        ({"world": 8, "moe_dp": 3}, ("tp = 8", "moe_dp = 3")),
        ({"world": 8, "ep": 8, "moe_dp": 2, "cp": 2}, ("8 * 2", "tp = 8", "at most 4")),
        ({"world": 8, "ep": 2, "moe_dp": 2, "cp": 2}, ("ep = 2", "tp / moe_dp = 4")),
        ({"world": 8, "ep": 4, "moe_dp": 2}, ("moe_dp = 2", "cp = 1")),
        ({"world": 8, "pp": 2, "ep": 2, "moe_dp": 2, "cp": 2}, ("moe_dp = 2", "pp = 2")),
        ({"world": 6, "tp": 4, "pp": 2}, ("4 * 2 = 8", "6 ranks")),
        ({"world": 9, "pp": 2}, ("world = 9", "pp = 2")),
        ({"world": 8, "tp": 0}, ("0, but there are 8 ranks",)),
        ({"world": 0}, ("world = 0",)),
        ({"world": 8, "dp": -1}, ("dp = -1",)),
        ({"world": 12, "gpus_per_node": 8}, ("12 ranks", "gpus_per_node = 8")),
        ({"world": 8, "gpus_per_node": 0}, ("gpus_per_node = 0",)),
        ({"world": 4, "nodes": [0, 0, 1]}, ("3 entries", "4 ranks")),
        ({"world": 1 << 40}, (str(1 << 40), "65536")),
    ],
    ids=str,
)
def test_impossible_layouts_name_both_numbers(sizes, numbers):
    with pytest.raises(ValueError) as error:
        Topology.make(**sizes)
    for number in numbers:
        assert number in str(error.value)


def test_an_all_to_all_dispatcher_spreads_the_experts_over_tp():
    assert Topology.make(8, all_to_all=True).ep == 8
    assert Topology.make(8, ep=1, all_to_all=True).ep == 8
    assert Topology.make(8, pp=2, all_to_all=True).ep == 4
    assert Topology.make(8, cp=2, moe_dp=2, all_to_all=True).ep == 4
    assert Topology.make(8, ep=4, all_to_all=True).sizes["ep"] == 4
    assert Topology.make(8).ep == 1
    with pytest.raises(ValueError, match="ep = 3"):
        Topology.make(8, ep=3, all_to_all=True)


def test_nodes_follow_the_map_and_not_the_rank_order():
    """Launchers may deal ranks out in turn: then neighbours are on different nodes and distant ranks on the same."""
    t = Topology.make(8, tp=4, pp=2, dp=2, nodes=[0, 1] * 4)
    assert t.crosses_nodes("attn_tp") and t.crosses_nodes("tp")
    assert not t.crosses_nodes("attn_dp") and not t.crosses_nodes("pp")
    assert t.nodes_of((0, 2, 4)) == (0,) and t.nodes_of((1, 2)) == (0, 1) and t.num_nodes == 2
    uneven = Topology.make(6, pp=2, nodes=[0, 0, 0, 0, 1, 1])
    assert uneven.crosses_nodes("tp") and uneven.nodes_of(uneven.group_of("tp", 0)) == (0,)
    assert not Topology.make(6).crosses_nodes("tp")


def test_a_cluster_of_four_thousand_ranks():
    t = Topology.make(4096, pp=4, dp=32, cp=4, all_to_all=True, gpus_per_node=8)
    assert (t.tp, t.attn_tp, t.ep) == (1024, 8, 1024)
    for axis in AXES:
        lists = t.groups[axis]
        assert sorted(rank for ranks in lists for rank in ranks) == list(range(4096))
        assert {len(ranks) for ranks in lists} == {t.size_of(axis)}
    assert not t.crosses_nodes("attn_tp") and t.crosses_nodes("attn_cp")
    assert t.group_of("pp", 1027) == (3, 1027, 2051, 3075)


def test_ranks_and_coordinates_outside_the_layout_are_refused():
    t = Topology.make(4, dp=2)
    for call in (lambda: t.coords(4), lambda: t.node(-1), lambda: t.group_of("tp", 9)):
        with pytest.raises(ValueError):
            call()
