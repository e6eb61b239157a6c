"""Every dispatcher: rows to identity experts and back are the weighted sum, whatever the routing; misuse is refused.

References are exact: an identity expert gives its row back, so a row comes home as itself times the sum of its weights.
"""

import numpy as np
import pytest
import torch
from dspark.comm.dispatch import DispatchOptions, DispatchSizes, Exchange, StepRows, dispatcher_class, make_dispatcher
from dspark.comm.dispatch.base import Order
from dspark.comm.dispatch.rows import piece_sizes, rows_by_rank
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology

EXPERTS, TOP_K, WIDE, CPU = 16, 4, 128, torch.device("cpu")
NAMES = ("standard", "normal", "low_latency", "auto")
SIZES = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": WIDE}


def routing(kind, num_rows, seed):
    """Experts and weights of ``num_rows`` rows; no expert twice in a row."""
    dice = np.random.default_rng([seed, num_rows])
    if kind == "skewed":
        laws = dice.dirichlet(np.full(EXPERTS, 0.2)) + 1e-9
        rows = [dice.choice(EXPERTS, TOP_K, replace=False, p=laws / laws.sum()) for _ in range(num_rows)]
    else:
        rows = [dice.permutation(EXPERTS)[:TOP_K] for _ in range(num_rows)]
    experts = np.array(rows, np.int64).reshape(num_rows, TOP_K)
    if kind == "to one":
        experts[:, 0], experts[:, 1:] = EXPERTS - 1, -1
    elif kind == "padded":
        experts[dice.random(experts.shape) < 0.4] = -1
    elif kind == "nowhere":
        experts[:] = -1
    return torch.from_numpy(experts), torch.from_numpy(dice.random(experts.shape, np.float32) + 0.1)


def identity(received, rows, group):
    """What experts that give back their rows, shared by ``group``, return for ``rows`` of those received."""
    weights = torch.where(received.experts[rows] >= 0, received.weights[rows], 0).sum(1, keepdim=True)
    return received.x[rows] * weights / group.size


def exchange_rows(dispatcher, groups, x, experts, weights):
    dispatcher.begin_dispatch(x, experts, weights)
    received = dispatcher.finish_dispatch()
    for rows in received.pieces:
        dispatcher.begin_combine(identity(received, rows, groups.moe_tp))
    return dispatcher.finish_combine(), received


CASES = [  # routing, and rows of the owner with most
    ("random", 5),
    ("random", 150),
    ("skewed", 40),
    ("to one", 30),
    ("padded", 33),
    ("nowhere", 7),
    ("random", 0),
]


def run_dispatchers(rank, world, layout, nodes, names):
    groups = Groups.build(Topology.make(world, **layout, nodes=nodes), rank)
    owner, num_owners = groups.attn_rows.rank, groups.attn_rows.size
    failures = []
    for name in names:
        options = DispatchOptions(name, max_tokens_per_rank=640)
        dispatcher = make_dispatcher(options, groups, **SIZES, dtype=torch.float32, device=CPU)
        for each in (dispatcher, dispatcher.twin()):
            for in_pieces in (False, True):
                for kind, most in CASES:
                    # The first owner has none, the last one most.
                    shape = range(1, 2) if num_owners == 1 else range(num_owners)
                    counts = tuple(most * i // max(num_owners - 1, 1) for i in shape)
                    has_prefill = most > 30
                    exchange = Exchange(groups, each, StepRows(counts, has_prefill, in_pieces))
                    x = torch.randn(counts[owner], WIDE, generator=torch.Generator().manual_seed(owner))
                    experts, weights = routing(kind, counts[owner], owner)
                    sums = torch.where(experts >= 0, weights, 0).sum(1, keepdim=True)
                    got, received = exchange_rows(each, groups, *(exchange.own(v) for v in (x, experts, weights)))
                    same = torch.allclose(got, exchange.own(x * sums), rtol=1e-5, atol=1e-5)
                    num_local = EXPERTS // groups.moe_ep.size
                    if not (same and ((received.experts >= -1) & (received.experts < num_local)).all()):
                        failures.append((name, kind, most, in_pieces))
    return failures


LAYOUTS = [
    (2, {"dp": 2}, None),
    (4, {"dp": 4}, (0, 0, 1, 1)),
    (4, {"dp": 2, "ep": 4}, (0, 1, 0, 1)),
    (4, {"dp": 4, "ep": 2}, (0, 0, 1, 1)),
    (4, {"cp": 2, "moe_dp": 2, "ep": 2}, None),
    (4, {"ep": 4}, (0, 1, 1, 1)),
    (8, {"dp": 4, "ep": 4}, (0, 0, 0, 0, 1, 1, 1, 1)),
]


@pytest.mark.parametrize("world,layout,nodes", LAYOUTS, ids=str)
def test_identity_experts_give_the_weighted_sum(run_ranks, world, layout, nodes):
    assert run_ranks(run_dispatchers, world, layout, nodes, NAMES) == [[]] * world


PICKS = [[4, 5, 6], [0, 1, 2], [0, 4, 7], [2, 3, -1]]  # all on rank 0; two experts a rank, two ranks a node


def run_example(rank, world):
    """Of the worked example: received rows, aligned counts, and what rank 0 and the one it passes rows to send."""
    groups = Groups.build(Topology.make(world, dp=4, ep=4, nodes=(0, 0, 1, 1)), rank)
    num_rows = len(PICKS) if rank == 0 else 0
    experts = torch.tensor(PICKS)[:num_rows]
    x, weights = torch.full((num_rows, WIDE), 1.0), torch.ones(num_rows, 3)
    found = {}
    for name in ("normal", "low_latency"):
        sizes = DispatchSizes(8, 3, WIDE, 4, torch.float32, CPU, alignment=4)
        dispatcher = dispatcher_class(name)(groups, sizes)
        for again in range(2):
            dispatcher.open(StepRows((4, 0, 0, 0), has_prefill=True))
            groups.reset_traffic()
            if again and name == "normal":  # the same routing: no sizes travel, nor routing
                dispatcher.begin_dispatch(2 * x, experts, weights, dispatcher.handle)
            else:
                dispatcher.begin_dispatch((1 + again) * x, experts, weights)
            received = dispatcher.finish_dispatch()
            traffic = [counter.ops for counter in groups.traffic().values()]
            calls = sum(ops["all_to_all"].calls for ops in traffic if "all_to_all" in ops)
            dispatcher.begin_combine(identity(received, slice(None), groups.moe_tp))
            sums = dispatcher.finish_combine()
            found[name, again] = (len(received.x), received.counts, calls, sums.mean(1).tolist())
            if name == "normal":
                found[name, again] += (dispatcher.handle.copies.sent, dispatcher.handle.fans.sent)
    return found


def test_counts_of_the_worked_example(run_ranks):
    results = run_ranks(run_example, 4)
    per_expert = [2, 1, 2, 1, 2, 1, 1, 1]
    for rank, found in enumerate(results):
        own = per_expert[2 * rank : 2 * rank + 2]
        for again in range(2):
            assert found["normal", again][:2] == (2, [4, 4]) == (2, [-(-count // 4) * 4 for count in own])
            assert found["low_latency", again][:2] == (sum(own), [4, 4])
        assert (found["normal", 0][2], found["normal", 1][2]) == (2, 0)
    for name in ("normal", "low_latency"):
        assert results[0][name, 0][3] == [3, 3, 3, 2] and results[0][name, 1][3] == [6, 6, 6, 4]
    assert results[0]["normal", 0][4:] == ([3, 2], [2, 2])  # two copies cross, and stay with rank 2, the same place
    assert results[2]["normal", 0][5] == [2, 2] and results[1]["normal", 0][5] == results[3]["normal", 0][5] == [0, 0]
    messages = [found["low_latency", 0][0] for found in results]
    assert sum(messages) == 11 and sum(messages[2:]) == 5


def lone(name, most=8, **more):
    groups = Groups.single()
    sizes = DispatchSizes(EXPERTS, TOP_K, WIDE, most, torch.float32, CPU, **more)
    dispatcher = dispatcher_class(name)(groups, sizes)
    return dispatcher, Exchange(groups, dispatcher, StepRows((5,), has_prefill=False))


@pytest.mark.parametrize("name", NAMES)
def test_calls_out_of_order_raise(name):
    dispatcher, _ = lone(name)
    x, (experts, weights) = torch.ones(5, WIDE), routing("random", 5, 0)
    with pytest.raises(RuntimeError, match="finish_dispatch after open"):
        dispatcher.finish_dispatch()
    with pytest.raises(RuntimeError, match="begin_combine after open"):
        dispatcher.begin_combine(x)
    dispatcher.begin_dispatch(x, experts, weights)
    with pytest.raises(RuntimeError, match="begin_dispatch after begin_dispatch"):
        dispatcher.begin_dispatch(x, experts, weights)
    with pytest.raises(RuntimeError, match="open after begin_dispatch"):
        dispatcher.open(StepRows((5,), has_prefill=True))
    received = dispatcher.finish_dispatch()
    with pytest.raises(RuntimeError, match="finish_combine after finish_dispatch"):
        dispatcher.finish_combine()
    dispatcher.begin_combine(identity(received, slice(None), Groups.single().moe_tp))
    with pytest.raises(RuntimeError, match="begin_combine after begin_combine"):
        dispatcher.begin_combine(x)
    torch.testing.assert_close(dispatcher.finish_combine(), x * weights.sum(1, keepdim=True))


def test_every_piece_is_combined_before_the_end():
    order = Order()
    for call in ("open", "begin_dispatch"):
        order.enter(call)
    order.enter("finish_dispatch", 3)
    order.enter("begin_combine")
    with pytest.raises(RuntimeError, match="finish_combine after begin_combine"):
        order.enter("finish_combine")


def test_two_results_are_live_at_most():
    first, _ = lone("low_latency")
    others = [first.twin(), first.twin()]
    x, (experts, weights) = torch.ones(5, WIDE), routing("random", 5, 0)
    for each in others:
        each.open(StepRows((5,), has_prefill=False))
    first.begin_dispatch(x, experts, weights)
    others[0].begin_dispatch(2 * x, experts, weights)
    with pytest.raises(RuntimeError, match="two dispatches are under way"):
        others[1].begin_dispatch(x, experts, weights)
    for scale, each in ((1, first), (2, others[0])):
        received = each.finish_dispatch()
        each.begin_combine(identity(received, slice(None), Groups.single().moe_tp))
        torch.testing.assert_close(each.finish_combine(), scale * x * weights.sum(1, keepdim=True))


def test_more_rows_than_buffers_are_for_are_refused_before_anything_is_sent():
    for name, has_prefill in (("low_latency", True), ("low_latency", False), ("auto", False)):
        dispatcher, _ = lone(name, most=5)
        with pytest.raises(ValueError, match="would send 6 rows at once, but buffers are for 5"):
            dispatcher.open(StepRows((6,), has_prefill))
    for name, has_prefill in (("auto", True), ("normal", False), ("standard", False)):
        lone(name, most=5)[0].open(StepRows((6,), has_prefill))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_fp8_rows_are_off_by_half_a_unit_of_three_bits(scale):
    dispatcher, _ = lone("low_latency", fp8=True)
    x, (experts, weights) = (
        scale * torch.randn(5, WIDE, generator=torch.Generator().manual_seed(1)),
        routing("random", 5, 0),
    )
    dispatcher.begin_dispatch(x, experts, weights)
    received = dispatcher.finish_dispatch()
    row = received.x[0]
    source = min(range(5), key=lambda i: float((row - x[i]).abs().max()))
    error = (row - x[source]).abs()
    smallest = x[source].abs().max() / 448 * 2**-9 / 2  # of the numbers below normal range
    assert (error <= x[source].abs() * 2**-4 * 1.001 + smallest * 1.001).all() and error.max() > 0
    with pytest.raises(ValueError, match="divisible by 128, not 100"):
        dispatcher_class("low_latency")(
            Groups.single(), DispatchSizes(EXPERTS, TOP_K, 100, 8, torch.float32, CPU, fp8=True)
        )


def test_pieces_are_whole_blocks():
    assert piece_sizes(0, 3) == [0, 0, 0] and piece_sizes(64, 2) == [0, 64] and piece_sizes(65, 2) == [64, 1]
    assert piece_sizes(300, 2) == [128, 172] and piece_sizes(1000, 4) == [256, 256, 256, 232]


def test_slices_of_attention_rows():
    assert rows_by_rank([5, 0, 2], 2) == [3, 2, 0, 0, 1, 1] and rows_by_rank([7], 4) == [2, 2, 2, 1]
