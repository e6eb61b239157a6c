"""Experts move while requests run: the tokens stay the same, and what arrives is what the checkpoint holds.

The reference is one rank that moves nothing.
"""

import functools
import threading

import pytest
import torch
from dspark.eplb.moves import keep_slots, transfers
from dspark.parallel.topology import Topology
from dspark.runtime.balance import balancer as module
from dspark.runtime.checkpoint import CheckpointReader, bundled_model

OPTIONS = {
    "draft": "dspark",
    "num_redundant_experts": 8,
    "num_redundant_draft_experts": 8,
    "eplb_interval": 4,
    "eplb_layers_per_step": 2,
    "overlap_min_rows": 1,
}
LAYOUTS = [
    ("standard", "none", Topology(tp=4, dp=2, ep=2)),
    ("normal", "tbo", Topology(tp=4, dp=2, ep=4, nodes=(0, 0, 1, 1))),
    ("low_latency", "sbo", Topology(tp=4, ep=4)),
    ("standard", "none", Topology(tp=4, pp=2, ep=4)),
]


@pytest.fixture
def reference(placed):
    """The ids without a draft, on one rank."""
    return _reference(placed)


@functools.cache
def _reference(placed):
    return placed.run(placed.make_engine(None, 0, draft="none"))


def checked_weights(engine):
    """How many slots were compared, bit by bit, with what the checkpoint holds for their experts."""
    reader, groups, compared = CheckpointReader(bundled_model(), engine.model.config), engine.groups, 0
    names = [f"layers.{layer}" for layer in engine.model.layers]
    layers = list(zip(names, engine.model.expert_layers))
    layers += [(f"mtp.{stage}", layer) for stage, layer in enumerate(engine.drafter.expert_layers)]
    for name, layer in layers:
        gate_up, down = layer.weights
        width = down.shape[1]
        span = {"start": groups.moe_tp.rank * width, "stop": (groups.moe_tp.rank + 1) * width}
        first = groups.moe_ep.rank * len(down)
        for slot in range(len(down)):
            prefix = f"{name}.ffn.experts.{layer.slots.slots[first + slot]}"
            halves = [reader.take(f"{prefix}.{half}.weight", **span) for half in ("w1", "w3")]
            assert torch.equal(gate_up[slot], torch.cat(halves).t()), (name, slot)
            assert torch.equal(down[slot], reader.take(f"{prefix}.w2.weight", dim=1, **span).t()), (name, slot)
            compared += 1
    return compared


def balancers(engine):
    return [one.balancer for one in engine.keeper.sets if one.balancer is not None]


def finish(engine):
    """Steps without rows until nothing is under way."""
    while any(one.is_busy for one in balancers(engine)):
        for one in balancers(engine):
            one.after_step()


def planned_bytes(one, moved):
    """Wrap the planner so that ``moved`` collects the bytes of each plan, within and across nodes."""
    planner, expert = one.planner, sum(weight[0].nbytes for weight in one._layers[0].weights)

    def plan(load, live):
        target = planner(load, live)
        moved.extend((expert, move.crosses_node) for move in transfers(live, keep_slots(live, target)))
        return target

    one.planner = plan


def rebalanced(rank, world, placed, dispatcher, overlap, topology):
    engine = placed.make_engine(topology, rank, dispatcher=dispatcher, overlap=overlap, **OPTIONS)
    moved, before = [], [one.live.slots for one in balancers(engine)]
    for one in balancers(engine):
        planned_bytes(one, moved)
    ids = placed.run(engine)
    finish(engine)
    assert any((one.live.slots != slots).any() for one, slots in zip(balancers(engine), before))
    sent = [one._experts.traffic["send"] for one in balancers(engine)]
    # The first rank of a stage plans; each of its moe_ep groups moves the same experts, each rank its width of them.
    copies = topology.tp // topology.ep
    planned = copies * sum(size for size, _ in moved), copies * sum(size for size, crosses in moved if crosses)
    actual = sum(one.sent_bytes for one in sent), sum(one.cross_node_bytes for one in sent)
    return ids, checked_weights(engine), planned, actual


@pytest.mark.parametrize(("dispatcher", "overlap", "topology"), LAYOUTS, ids=str)
def test_tokens_bytes_and_weights(run_ranks, placed, reference, dispatcher, overlap, topology):
    found = run_ranks(rebalanced, topology.world, placed, dispatcher, overlap, topology, timeout=180)
    assert all(ids == reference for ids, *_ in found)
    assert all(compared > 0 for _, compared, *_ in found)
    planned, actual = ([sum(column) for column in zip(*(one[at] for one in found))] for at in (2, 3))
    assert planned == actual and actual[0] > 0
    assert (actual[1] > 0) == (topology.num_nodes > 1)


def failing(rank, world, placed, kind):
    engine = placed.make_engine(Topology(tp=world, ep=world), rank, **OPTIONS)
    before = [one.live.slots for one in balancers(engine)]
    may_go_on, fetch = threading.Event(), module.fetch

    def plan(load, live):
        raise RuntimeError("no plan today")

    def no_fetch(*args):
        if rank == 1:
            raise RuntimeError("the link is down")
        return fetch(*args)

    def late_fetch(*args):
        if rank == 1:
            may_go_on.wait()
        return fetch(*args)

    if kind == "planner":
        for one in balancers(engine):
            one.planner = plan
    else:
        module.fetch = no_fetch if kind == "transfer" else late_fetch
    warnings = []
    module.log.warning = lambda text, *values: warnings.append(text % values)
    module.PATIENCE = 3
    ids = placed.run(engine)
    if kind == "late":
        assert all((one.live.slots == slots).all() for one, slots in zip(balancers(engine), before))
        may_go_on.set()
        finish(engine)
        assert any((one.live.slots != slots).any() for one, slots in zip(balancers(engine), before))
    else:
        finish(engine)
        assert all((one.live.slots == slots).all() for one, slots in zip(balancers(engine), before))
    return ids, checked_weights(engine), warnings


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("planner", "no plan today"),
        ("transfer", "failed on ranks [1]; the map stays as it is"),
        ("late", "still waiting for ranks [0, 1]; the old map works on"),
    ],
)
def test_what_fails_or_is_late_leaves_the_old_map_working(run_ranks, placed, reference, kind, words):
    found = run_ranks(failing, 2, placed, kind, timeout=120)
    assert all(ids == reference and compared > 0 for ids, compared, _ in found)
    assert any(words in warning for warning in found[0][2]), found[0][2]
