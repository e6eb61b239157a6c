"""Collectives on 1, 2, 4 and 8 gloo ranks against plain maths over all ranks' inputs.

Every rank can rebuild every other rank's input from its seed, so the expected result needs no communication.
"""

import importlib.util
import sys

import pytest
import torch
import torch.distributed as dist
from dspark.comm import collectives
from dspark.parallel.groups import Group, Groups
from dspark.parallel.topology import Topology

WORLDS = [1, 2, 4, 8]
BYTE_TYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.uint16, torch.uint32, torch.complex64]
PLAIN_TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]
UNEVEN = [3, 0, 5, 1, 0, 0, 2, 7]


def data(rank, *shape, dtype=torch.float32):
    """Rank's input: small whole numbers, so that sums are exact in every format."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 8, shape, generator=generator).to(dtype)


def same(actual, expected):
    """Bitwise equality, also for formats without arithmetic."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (actual.shape, expected.shape)
    actual, expected = (t.contiguous().unsqueeze(-1).view(torch.uint8) for t in (actual, expected))
    assert torch.equal(actual, expected)


def both(name, x, group, *args):
    """The plain and the asynchronous form on copies of ``x``: they must agree; returns the result."""
    plain = getattr(collectives, name)(x.clone(), group, *args)
    pending = getattr(collectives, f"start_{name}")(x.clone(), group, *args)
    result = pending.wait()
    assert pending.wait() is result
    same(plain, result)
    return plain


def _moves(rank, world):
    group = Groups.build(Topology.make(world), rank).world
    sizes = UNEVEN[:world]
    # matrix[i][j]: rows that i sends to j, with zeros, and nothing at all from the last rank
    matrix = [[(i + 2 * j) % 4 if i + 1 < world or world == 1 else 0 for j in range(world)] for i in range(world)]
    for dtype in PLAIN_TYPES + BYTE_TYPES + [torch.bool]:
        inputs = [data(r, 2, 3, 4, dtype=dtype) for r in range(world)]
        for dim in (0, 1, 2, -1):
            same(both("all_gather", inputs[rank], group, dim), torch.cat(inputs, dim))
        same(both("all_gather", inputs[rank][0, 0, :1], group), torch.cat([x[0, 0, :1] for x in inputs]))
        inputs = [data(r, sizes[r], 3, dtype=dtype) for r in range(world)]
        same(both("all_gather_v", inputs[rank], group, sizes), torch.cat(inputs))
        inputs = [data(r, 2 * world, 3, dtype=dtype) for r in range(world)]
        same(collectives.all_to_all(inputs[rank], group), torch.cat([x[2 * rank : 2 * rank + 2] for x in inputs]))
        inputs = [data(r, sum(matrix[r]), 5, dtype=dtype).split(matrix[r]) for r in range(world)]
        receive = [matrix[r][rank] for r in range(world)]
        moved = both("all_to_all_v", torch.cat(inputs[rank]), group, matrix[rank], receive)
        same(moved, torch.cat([pieces[rank] for pieces in inputs]))
        for src in {0, world - 1}:
            x = data(rank, 4, 3, dtype=dtype)
            assert collectives.broadcast(x, group, src) is x
            same(x, data(src, 4, 3, dtype=dtype))
        x = data(rank, 3, 4, dtype=dtype)
        assert collectives.broadcast(x.t(), group, 0).data_ptr() == x.data_ptr()
        same(x, data(0, 3, 4, dtype=dtype))
    return True


def _reductions(rank, world):
    group = Groups.build(Topology.make(world), rank).world
    sizes = UNEVEN[:world]
    ops = {"sum": lambda t: t.sum(0), "max": lambda t: t.amax(0), "min": lambda t: t.amin(0)}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32):
        for reduce, reference in list(ops.items())[: 3 if dtype == torch.float32 else 1 + (world < 8)]:

            def expected(*shape, dtype=dtype, reference=reference):
                return reference(torch.stack([data(r, *shape, dtype=dtype) for r in range(world)])).to(dtype)

            large = [(257, 1025)] if dtype in (torch.float32, torch.bfloat16) else []  # two hops, uneven shares
            for shape in ((), (5,), (3, 2), (0, 3), *large):
                same(both("all_reduce", data(rank, *shape, dtype=dtype), group, reduce), expected(*shape))
            x = data(rank, 4, 6, dtype=dtype)
            assert collectives.all_reduce(x, group, reduce) is x
            same(x, expected(4, 6))
            x = data(rank, 4, 6, dtype=dtype)
            collectives.all_reduce(x.t(), group, reduce)
            same(x, expected(4, 6))
            whole = expected(2 * world, 3)
            mine = both("reduce_scatter", data(rank, 2 * world, 3, dtype=dtype), group, reduce)
            same(mine, whole[2 * rank : 2 * rank + 2])
            pieces = expected(sum(sizes), 3).split(sizes)
            same(both("reduce_scatter_v", data(rank, sum(sizes), 3, dtype=dtype), group, sizes, reduce), pieces[rank])
    return True


@pytest.mark.parametrize("world", WORLDS)
def test_moves(run_ranks, world):
    assert run_ranks(_moves, world) == [True] * world


@pytest.mark.parametrize("world", WORLDS)
def test_reductions(run_ranks, world):
    assert run_ranks(_reductions, world) == [True] * world


def _native_forms(rank, world):
    collectives._native = lambda x: True
    _moves(rank, world)
    return _reductions(rank, world)


def test_the_forms_for_cuda_agree_too(run_ranks):
    """They use the backend's own all-reduce, all-gather and reduce-scatter, which gloo has as well."""
    assert run_ranks(_native_forms, 2) == [True] * 2


def _zero_rows(rank, world):
    group = Groups.build(Topology.make(world), rank).world
    none = torch.empty(0, 3)
    zeros = [0] * world
    shapes = [
        collectives.all_reduce(none.clone(), group),
        collectives.all_gather(none, group),
        collectives.all_gather(torch.empty(3, 0), group, 1),
        collectives.all_gather_v(none, group, zeros),
        collectives.reduce_scatter(none, group),
        collectives.reduce_scatter_v(none, group, zeros),
        collectives.all_to_all(none, group),
        collectives.all_to_all_v(none, group, zeros, zeros),
        collectives.broadcast(none.clone(), group),
        collectives.all_gather(none.to(torch.float8_e4m3fn), group),
        collectives.all_to_all(torch.empty(0, 2, 3, dtype=torch.int16), group),
    ]
    collectives.barrier(group)
    return [tuple(x.shape) for x in shapes]


@pytest.mark.parametrize("world", [1, 4])
def test_nobody_has_rows(run_ranks, world):
    expected = [(0, 3)] * 2 + [(3, 0)] + [(0, 3)] * 7 + [(0, 2, 3)]
    assert run_ranks(_zero_rows, world) == [expected] * world


def _many_in_flight(rank, world):
    group = Groups.build(Topology.make(world), rank).world
    started = []
    for step in range(6):
        x = torch.full((1000 * (step + 1), 2), float(rank + step))
        started.append(collectives.start_all_reduce(x, group))
        started.append(collectives.start_all_gather(x[:1], group))
        started.append(collectives.start_all_gather_v(x[:2], group, [2] * world))
    results = [pending.wait() for pending in reversed(started)][::-1]
    for step in range(6):
        total, gathered, sent = results[3 * step : 3 * step + 3]
        assert (total == sum(range(world)) + world * step).all()
        assert sent[2 * (step % world), 0] == step % world + step and gathered.shape == (world, 2)
    return True


def test_many_in_flight_and_waited_for_in_another_order(run_ranks):
    assert all(run_ranks(_many_in_flight, 4))


def _rounded_pairs(rank, world):
    group = Groups.build(Topology.make(world), rank).world
    inputs = [torch.randn(5000, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pair = [x.to(dtype) for x in inputs]
        same(collectives.all_reduce(pair[rank].clone(), group), (pair[0].double() + pair[1].double()).to(dtype))
        same(
            collectives.reduce_scatter(torch.cat([pair[rank]] * 2), group),
            (pair[0].double() + pair[1].double()).to(dtype),
        )
    return True


def test_the_sum_of_two_is_the_correctly_rounded_one(run_ranks):
    assert all(run_ranks(_rounded_pairs, 2))


def _short_floats(rank, world):
    group = Groups.build(Topology.make(world), rank).world
    inputs = [torch.randn(999, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(world)]
    expected = sum(x.float() for x in inputs).bfloat16()
    assert not torch.equal(expected, sum(inputs[1:], inputs[0]))
    same(collectives.all_reduce(inputs[rank].clone(), group), expected)
    same(collectives.reduce_scatter_v(inputs[rank], group, [999, 0, 0, 0])[:999], expected[: 999 * (rank == 0)])
    return True


def test_16_bit_sums_are_added_up_in_fp32(run_ranks):
    assert all(run_ranks(_short_floats, 4))


def _order_of_sums(rank, world):
    """The same numbers alone, in a small and in a large tensor (one hop and two hops), in fp32 with real rounding."""
    group = Groups.build(Topology.make(world), rank).world
    x = torch.randn(7, generator=torch.Generator().manual_seed(rank))
    results = []
    for before, after in ((0, 0), (1, 3), (13, 200), (5, 400_000)):
        padded = torch.cat([torch.ones(before), x, torch.ones(after)])
        results.append(collectives.all_reduce(padded, group)[before : before + 7].tolist())
        rows = torch.cat([x, torch.ones(after + world - (after + 7) % world)]).unsqueeze(1)
        full = collectives.all_gather(collectives.reduce_scatter(rows, group), group)
        results.append(full[:7, 0].tolist())
    return results


def test_sums_do_not_depend_on_the_rest_of_the_batch(run_ranks):
    world = 4
    every = [result for results in run_ranks(_order_of_sums, world) for result in results]
    inputs = [torch.randn(7, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
    expected = ((inputs[0] + inputs[1]) + inputs[2]) + inputs[3]
    assert not torch.equal(expected, (inputs[3] + inputs[2]) + (inputs[1] + inputs[0]))
    for result in every:
        assert result == expected.tolist()


def _traffic(rank, world):
    groups = Groups.build(Topology.make(world, dp=2, gpus_per_node=2), rank)
    group = groups.world
    x = torch.zeros(8, 3)  # 96 bytes
    collectives.all_reduce(x, group)
    collectives.all_gather(x, group)
    collectives.all_gather_v(x[:rank], group, [0, 1, 2, 3])
    collectives.reduce_scatter(x, group)
    collectives.reduce_scatter_v(x, group, [5, 0, 2, 1])
    collectives.all_to_all(x, group)
    collectives.all_to_all_v(x.half(), group, [[5, 0, 2, 1], [0, 8, 0, 0], [2, 2, 2, 2], [0, 4, 0, 4]][rank],
                             [[5, 0, 2, 0], [0, 8, 2, 4], [2, 0, 2, 0], [1, 0, 2, 4]][rank])  # fmt: skip
    collectives.broadcast(x.to(torch.float8_e4m3fn), group, 1)
    collectives.barrier(group)
    collectives.all_reduce(torch.zeros(1 << 18), group)
    collectives.all_reduce(x, groups.attn_tp)
    table = {name: (t.calls, t.bytes, t.sent_bytes, t.cross_node_bytes) for name, t in group.traffic.ops.items()}
    inner = groups.attn_tp.traffic["all_reduce"]
    assert (inner.calls, inner.bytes, inner.sent_bytes, inner.cross_node_bytes) == (1, 96, 96, 0)
    groups.reset_traffic()
    assert not any(counter.ops for counter in groups.traffic().values())
    return table


def test_traffic_is_counted_to_the_byte(run_ranks):
    """Four ranks, two a node. By hand; rows of 3 floats are 12 bytes."""
    tables = run_ranks(_traffic, 4)
    big = 4 << 18
    for rank, table in enumerate(tables):
        mine = [5, 0, 2, 1]
        far = [mine[peer] for peer in ((2, 3) if rank < 2 else (0, 1))]
        # one hop: the whole tensor to three ranks, two of them far; then 1 MiB in two hops: 3/4 there and 3/4 back
        assert table["all_reduce"] == (2, 96 + big, 3 * 96 + 2 * 3 * big // 4, 2 * 96 + 2 * 2 * big // 4)
        assert table["all_gather"] == (1, 96, 3 * 96, 2 * 96)
        assert table["all_gather_v"] == (1, 12 * rank, 3 * 12 * rank, 2 * 12 * rank)
        assert table["reduce_scatter"] == (1, 96, 72, 48)
        assert table["reduce_scatter_v"] == (1, 96, 12 * (8 - mine[rank]), 12 * sum(far))
        assert table["all_to_all"] == (1, 96, 72, 48)
        assert table["broadcast"] == ((1, 24, 72, 48) if rank == 1 else (1, 24, 0, 0))
        assert table["barrier"] == (1, 0, 0, 0)
    # rows of 3 halves are 6 bytes; matrix of rows: 5 0 2 1 / 0 8 0 0 / 2 2 2 2 / 0 4 0 4
    assert [table["all_to_all_v"][1:] for table in tables] == [(48, 18, 18), (48, 0, 0), (48, 36, 24), (48, 24, 24)]


def _strided_traffic(rank, world):
    groups = Groups.build(Topology.make(world, pp=2, nodes=[0, 1, 0, 1]), rank)
    collectives.all_gather(torch.zeros(3), groups.tp)
    collectives.all_gather(torch.zeros(3), groups.pp)
    return [(g.crosses_nodes, g.traffic.total().cross_node_bytes) for g in (groups.tp, groups.pp)]


def test_crossing_follows_the_nodes_and_not_the_rank_order(run_ranks):
    assert run_ranks(_strided_traffic, 4) == [[(True, 12), (False, 0)]] * 4


def test_one_rank_is_a_no_op():
    group = Group.alone("tp")
    x = torch.arange(6.0).view(3, 2)
    for result in (
        collectives.all_reduce(x, group),
        collectives.all_gather(x, group, 1),
        collectives.all_gather_v(x, group, [3]),
        collectives.reduce_scatter(x, group),
        collectives.reduce_scatter_v(x, group, [3]),
        collectives.all_to_all(x, group),
        collectives.all_to_all_v(x, group, [3], [3]),
        collectives.broadcast(x, group),
        collectives.start_all_reduce(x, group).wait(),
    ):
        assert result is x
    collectives.barrier(group)
    assert group.traffic.total().calls == 0


ERRORS = {
    "reduce_scatter on group tp of 4: 6 rows do not divide by 4": lambda c, x, g: c.reduce_scatter(x, g),
    "all_to_all on group tp of 4: 6 rows do not divide by 4": lambda c, x, g: c.all_to_all(x, g),
    "sizes has 3 entries for 4 ranks": lambda c, x, g: c.all_gather_v(x, g, [6, 0, 0]),
    "promise 5 rows of rank 0, which has 6": lambda c, x, g: c.all_gather_v(x, g, [5, 1, 1, 1]),
    "add up to 7, but the tensor has 6 rows": lambda c, x, g: c.reduce_scatter_v(x, g, [1, 2, 2, 2]),
    "negative": lambda c, x, g: c.reduce_scatter_v(x, g, [-1, 3, 2, 2]),
    "send_sizes [1, 1, 1, 1] add up to 4, but the tensor has 6": lambda c, x, g: c.all_to_all_v(x, g, [1] * 4, [1] * 4),
    "rank 0 sends itself 3 rows but expects 2": lambda c, x, g: c.all_to_all_v(x, g, [3, 1, 1, 1], [2, 0, 0, 0]),
    "recv_sizes has 2 entries for 4": lambda c, x, g: c.all_to_all_v(x, g, [3, 1, 1, 1], [3, 0]),
    "broadcast on group tp of 4: source 4": lambda c, x, g: c.broadcast(x, g, 4),
    "dim 2 is outside a tensor of 2": lambda c, x, g: c.all_gather(x, g, 2),
    "cannot compute sum in torch.float8_e4m3fn": lambda c, x, g: c.all_reduce(x.to(torch.float8_e4m3fn), g),
    "cannot compute max in torch.int16": lambda c, x, g: c.reduce_scatter(x.to(torch.int16), g, "max"),
    "unknown reduction 'mean'; there are sum, max, min": lambda c, x, g: c.all_reduce(x, g, "mean"),
    "without dimensions": lambda c, x, g: c.all_gather(x[0, 0], g),
}


@pytest.mark.parametrize("text", ERRORS)
def test_mistakes_are_named_before_anything_is_sent(text):
    """The group's process group is no process group: touching it would raise something else."""
    group = Group("tp", (0, 1, 2, 3), 0, object())
    with pytest.raises(ValueError) as error:
        ERRORS[text](collectives, torch.zeros(6, 2), group)
    assert text in str(error.value) and "on group tp of 4" in str(error.value)
    assert group.traffic.total().calls == 0


@pytest.mark.parametrize(
    "new, old", [("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor")]
)
def test_older_torch_has_only_the_old_names(monkeypatch, new, old):
    """A second copy of the module, loaded where torch lacks the new name, uses the old one."""
    monkeypatch.delattr(dist, new, raising=False)
    spec = importlib.util.spec_from_file_location("dspark.comm.collectives_copy", collectives.__file__)
    copy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, copy)
    spec.loader.exec_module(copy)
    assert getattr(copy, f"_{new}") is getattr(dist, old)
