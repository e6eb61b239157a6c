"""Ring, striped, zigzag and gathered attention against one dense softmax in float64, on 1 to 8 ranks.

The reference knows nothing of blocks: every query's scores over all keys of its sequence, in token order.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from dspark.comm.ring import TRANSFERS
from dspark.layers.attention.ring import Blocks, build_ring_plan, ring_attention
from dspark.layers.kernels import Kernels
from dspark.layers.kernels.block_attention import Attended, merge
from dspark.parallel.context import causal_pairs, contiguous, interleave, ring_wall, striped, zigzag
from dspark.parallel.groups import Group, Groups
from dspark.parallel.topology import Topology

CPU = torch.device("cpu")
SPLITS = {
    "contiguous": lambda lengths, ranks: contiguous(sum(lengths), ranks),
    "striped": lambda lengths, ranks: striped(sum(lengths), ranks),
    "interleave": lambda lengths, ranks: interleave(sum(lengths), ranks),
    "zigzag": zigzag,
}
# heads, key heads, key width, value width; None: values are the first columns of the keys
SHAPES = {"mha": (4, 4, 8, 8), "gqa": (6, 2, 8, 8), "mla": (4, 4, 12, 8), "mla_absorbed": (4, 1, 20, None)}
VALUE_DIM = 16
# (lengths of the step, lengths before it): nothing divides; fewer tokens than ranks; several sequences; empty ones
STEPS = [([37], [0]), ([3], [11]), ([13, 1, 0, 19], [0, 5, 0, 7])]


def dense(q, k, v, lengths, pasts, causal, scale):
    """``k`` and ``v``: for each sequence all its tokens, earlier ones first."""
    out, start = [], 0
    for length, past, keys, values in zip(lengths, pasts, k, v):
        rows = q[start : start + length].double()
        start += length
        keys, values = (x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (keys, values))
        scores = torch.einsum("thd,khd->htk", rows, keys) * scale
        if causal:
            scores += torch.full((length, past + length), -math.inf).triu(past + 1)
        out.append(torch.einsum("htk,khe->the", scores.softmax(-1), values))
    return torch.cat(out)


def inputs(shape, lengths, pasts, seed):
    made = torch.Generator().manual_seed(seed)
    heads, key_heads, width, value_width = SHAPES[shape]
    q = torch.randn(sum(lengths), heads, width, generator=made) * 2
    k = [torch.randn(past + length, key_heads, width, generator=made) for length, past in zip(lengths, pasts)]
    v = [
        x[..., :VALUE_DIM] if value_width is None else torch.randn(*x.shape[:2], value_width, generator=made) for x in k
    ]
    return q, k, v, value_width is None


class Counting:
    """A kernel that also counts the query-key pairs it was asked for, call by call."""

    def __init__(self, attend):
        self._attend, self.pairs = attend, 0

    def __call__(self, q, k, v, visible):
        self.pairs += q.shape[0] * k.shape[0] if visible is None else int(visible.sum())
        return self._attend(q, k, v, visible)


def on_rank(group, split, shape, lengths, pasts, causal, transfer, seed, dtype=torch.float32):
    """This rank's rows, those of the reference, the pairs computed, and bytes that ``keep`` saw."""
    q, k, v, absorbed = inputs(shape, lengths, pasts, seed)
    scale = q.shape[2] ** -0.5
    own = torch.from_numpy(split.owned[group.rank])
    want = dense(q, k, v, lengths, pasts, causal, scale)[own]
    plan = build_ring_plan(split.owned, group.rank, lengths, CPU, causal, pasts)
    new_k, new_v = (torch.cat([x[past:] for x, past in zip(part, pasts)]) for part in (k, v))
    past = [(x[:n],) if absorbed else (x[:n], y[:n]) for x, y, n in zip(k, v, pasts)]
    attend = Counting(Kernels("torch").bind("attend_block", scale=scale))
    seen = {}
    got = ring_attention(
        q[own].to(dtype),
        new_k[own].to(dtype),
        None if absorbed else new_v[own].to(dtype),
        plan,
        group,
        Blocks(attend, merge),
        value_dim=VALUE_DIM,
        past=past,
        transfer=TRANSFERS[transfer],
        keep=lambda source, shards: seen.__setitem__(source, [x.clone() for x in shards]),
    )
    assert sorted(seen) == list(range(group.size))
    for source, shards in seen.items():
        assert torch.equal(shards[0], new_k[torch.from_numpy(split.owned[source])].to(dtype))
    assert attend.pairs == sum(plan.pairs) + sum(p.pairs for p in plan.past if p is not None)
    return got, want, plan


def _sweep(rank, world):
    """The largest error, and over how many runs; both transfers give the same bits."""
    group = Groups.build(Topology.make(world, cp=world), rank).attn_cp if world > 1 else Group.alone()
    errors = []
    cuts = [cut for name, cut in SPLITS.items() if name != "interleave"]  # striped, but for padding that has no rows
    for (lengths, pasts), shape, cut, causal in itertools.product(STEPS, SHAPES, cuts, (True, False)):
        outs = []
        for transfer in TRANSFERS if shape == "gqa" else ("ring",):
            got, want, _ = on_rank(group, cut(lengths, world), shape, lengths, pasts, causal, transfer, len(errors))
            assert got.dtype == torch.float32 and got.shape == want.shape
            outs.append(got)
        assert torch.equal(outs[0], outs[-1])
        errors.append(float((got - want).abs().max()) if len(got) else 0.0)
    return errors


@pytest.mark.parametrize("world", range(1, 9))
def test_equals_dense_attention(world, run_ranks):
    found = run_ranks(_sweep, world) if world > 1 else [_sweep(0, 1)]
    errors = np.array(found)  # a NaN anywhere is not below the limit
    assert errors.shape == (world, len(STEPS) * len(SHAPES) * 3 * 2) and (errors < 1e-5).all()


def _bfloat16(rank, world):
    group = Groups.build(Topology.make(world, cp=world), rank).attn_cp
    got, want, _ = on_rank(group, striped(37, world), "gqa", [37], [0], True, "ring", 0, torch.bfloat16)
    return str(got.dtype), float((got.double() - want).abs().max())


def test_the_result_has_the_dtype_of_the_queries(run_ranks):
    for dtype, error in run_ranks(_bfloat16, 2):
        assert dtype == "torch.bfloat16" and error < 0.05


def _work(rank, world, tokens):
    group = Groups.build(Topology.make(world, cp=world), rank).attn_cp
    return {
        name: on_rank(group, cut([tokens], world), "mha", [tokens], [0], True, "ring", 0)[2].pairs
        for name, cut in SPLITS.items()
    }


@pytest.mark.parametrize(
    "tokens,world,balance,walls",
    [
        (
            16,
            4,
            {"contiguous": 1.706, "striped": 1.176, "zigzag": 1.0},
            {"contiguous": 58, "striped": 40, "zigzag": 34},
        ),
        (
            64,
            8,
            {"contiguous": 1.86, "striped": 1.108, "zigzag": 1.0},
            {"contiguous": 484, "striped": 288, "zigzag": 260},
        ),
        (19, 4, {"contiguous": 1.79, "striped": 1.158, "zigzag": 1.116}, {}),
    ],
)
def test_computed_pairs_are_those_of_the_published_tables(tokens, world, balance, walls, run_ranks):
    """Pairs that the kernels were asked for (:class:`Counting` compares them with the plan), by rank and source."""
    found = run_ranks(_work, world, tokens)
    for name, cut in SPLITS.items():
        split = cut([tokens], world)
        pairs = np.array([rank[name] for rank in found])
        assert (pairs == causal_pairs(split)).all()
        work = pairs.sum(1)
        if name in balance:
            assert work.max() / work.mean() == pytest.approx(balance[name], abs=0.005)
        ranks = np.arange(world)
        wall = sum(pairs[ranks, (ranks - step) % world].max() for step in range(world))
        assert wall == ring_wall(split) and wall == walls.get(name, wall)


def _bytes(rank, world):
    group = Groups.build(Topology.make(world, cp=world), rank).attn_cp
    lengths, counted = [8 * world], {}
    for shape in SHAPES:
        for transfer in TRANSFERS:
            group.traffic.reset()
            on_rank(group, zigzag(lengths, world), shape, lengths, [0], True, transfer, 0)
            op = "ring" if transfer == "ring" else "all_gather_v"
            assert list(group.traffic.ops) == [op]
            counted[f"{shape} {transfer}"] = group.traffic[op].sent_bytes
    return counted


def test_bytes_sent_are_all_other_shards(run_ranks):
    for world in (2, 3, 8):
        for counted in run_ranks(_bytes, world):
            for shape, (_, key_heads, width, value_width) in SHAPES.items():
                shard = 8 * key_heads * (width + (value_width or 0)) * 4
                assert counted[f"{shape} ring"] == counted[f"{shape} all_gather"] == (world - 1) * shard


def test_blocks_that_nobody_sees_merge_to_nothing():
    seen = Attended(torch.randn(3, 2, 4), torch.randn(3, 2))
    empty = Attended(torch.zeros(3, 2, 4), torch.full((3, 2), -math.inf))
    for merged in (merge(seen, empty), merge(empty, seen)):
        assert torch.allclose(merged.out, seen.out) and torch.equal(merged.lse, seen.lse)
    nothing = merge(empty, empty)
    assert (nothing.out == 0).all() and (nothing.lse == -math.inf).all()
    # huge scores on one side do not overflow
    high = merge(seen, Attended(torch.ones(3, 2, 4), torch.full((3, 2), 1e4)))
    assert torch.allclose(high.out, torch.ones(3, 2, 4)) and (high.lse == 1e4).all()


def test_rows_of_the_kernel_that_see_no_key():
    attend = Kernels("torch").bind("attend_block", scale=0.5)
    q, k, v = torch.randn(300, 4, 8), torch.randn(150, 2, 8), torch.randn(150, 2, 6)
    visible = (torch.arange(300) - 149).clamp(min=0)
    got = attend(q, k, v, visible)
    assert (got.out[:150] == 0).all() and (got.lse[:150] == -math.inf).all() and not got.out.isnan().any()
    want = dense(q[150:], [k], [v], [150], [0], True, 0.5)
    assert torch.allclose(got.out[150:].double(), want, atol=1e-5)
    scores = torch.einsum("hd,khd->kh", q[151].double(), k[:2].double().repeat_interleave(2, 1)) * 0.5
    assert torch.allclose(got.lse[151].double(), scores.logsumexp(0), atol=1e-5)


def test_a_split_of_other_tokens_is_refused():
    with pytest.raises(ValueError, match="12 tokens.*have 11"):
        build_ring_plan(striped(12, 4).owned, 0, [5, 6], CPU)
