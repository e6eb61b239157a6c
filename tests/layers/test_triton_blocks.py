"""Triton's dense attention over blocks, their merge, and group-limited routing, against their plain twins: in the
interpreter, or on a GPU. The plain twins are held to dense float64 formulas elsewhere."""

import math

import pytest
import torch
from dspark.layers.attention.ring import Blocks
from dspark.layers.kernels.block_attention import Attended

# Absolute and relative, of values of order one. bfloat16: a few units in its last place.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def random(*shape, seed, size=1.0, dtype=torch.float32):
    return (size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def near(actual, expected, bound):
    for after, before in zip(actual, expected):
        assert after.dtype == before.dtype
        torch.testing.assert_close(after.cpu(), before, rtol=bound, atol=bound)


# rows, keys, heads, key heads, key width, value width; None: values are the first columns of the keys
SHAPES = {
    "no rows": (0, 5, 2, 1, 8, 8),
    "no keys": (3, 0, 2, 2, 8, 8),
    "mha": (9, 70, 2, 2, 7, 5),
    "gqa": (23, 40, 6, 2, 16, 16),
    "latent": (5, 37, 4, 1, 140, None),
    "wide values": (3, 33, 3, 1, 24, 260),
}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attend_block(triton_twins, moved, shape, causal, dtype):
    """Rows that see nothing, some and all keys; keys and values whose rows are apart."""
    num_rows, num_keys, heads, key_heads, width, value_width = shape
    q = random(num_rows, heads, width, seed=1, dtype=dtype)
    k = random(num_keys, 2 * key_heads, width + 1, seed=2, dtype=dtype)[:, :key_heads, 1:]
    v = k[..., :128] if value_width is None else random(num_keys, key_heads, value_width, seed=3, dtype=dtype)
    visible = torch.arange(num_rows) * max(num_keys // 2, 1) % (num_keys + 1) if causal else None
    plain, compiled = (kernels.bind("attend_block", scale=width**-0.5) for kernels in triton_twins)
    expected = Attended(torch.zeros(num_rows, heads, v.shape[2]), torch.full((num_rows, heads), -math.inf))
    if num_keys:
        expected = plain(q, k, v, visible)
    near(compiled(*moved([q, k, v, visible])), expected, BOUNDS[dtype])


@pytest.mark.parametrize("size", [0.0, 1e-3, 300.0])
def test_attend_block_of_extreme_scores(triton_twins, moved, size):
    q, k, v = random(4, 2, 8, seed=1, size=size), random(40, 1, 8, seed=2), random(40, 1, 8, seed=3)
    plain, compiled = (kernels.bind("attend_block", scale=1.0) for kernels in triton_twins)
    near(compiled(*moved([q, k, v, None])), plain(q, k, v, None), max(2e-5, 1e-6 * size))


@pytest.mark.parametrize("num_rows,heads,width", [(0, 2, 3), (3, 2, 5), (2, 1, 64)])
def test_merge(triton_twins, moved, num_rows, heads, width):
    """Of equal, very different and missing blocks."""
    sides = [random(num_rows, heads, seed=seed, size=3.0) for seed in (3, 4)]
    if num_rows == 3:
        sides[0][0], sides[1][1, 0], sides[0][2], sides[1][2, 1] = -math.inf, -math.inf, 40.0, 40.0
        sides[0][1, 0] = -math.inf
    outs = [random(num_rows, heads, width, seed=seed) * (lse > -math.inf)[..., None] for seed, lse in enumerate(sides)]
    blocks = [Attended(out, lse) for out, lse in zip(outs, sides)]
    plain, compiled = (kernels.bind("merge") for kernels in triton_twins)
    near(compiled(*moved(blocks)), plain(*blocks), 1e-5)


def test_blocks_merge_to_the_whole(triton_twins, moved):
    """Attention over three blocks of keys, one of them unseen by some rows, is that over all."""
    q, k, v = random(6, 4, 8, seed=1), random(50, 2, 8, seed=2), random(50, 2, 6, seed=3)
    visible = torch.tensor([0, 3, 17, 18, 40, 50])
    expected = triton_twins[0].bind("attend_block", scale=0.4)(q, k, v, visible)
    blocks, total = Blocks.bind(triton_twins[1], 0.4), None
    for begin, end in ((0, 17), (17, 41), (41, 50)):
        part = blocks.attend(*moved([q, k[begin:end], v[begin:end], (visible - begin).clamp(0, end - begin)]))
        total = part if total is None else blocks.merge(total, part)
    near(total, expected, 2e-5)


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
@pytest.mark.parametrize(
    "num_rows,num_experts,groups,kept,top_k", [(0, 4, 2, 1, 2), (3, 6, 6, 2, 2), (4, 24, 8, 3, 6), (2, 9, 3, 2, 4)]
)
def test_route_grouped(triton_twins, moved, num_rows, num_experts, groups, kept, top_k, scoring):
    logits, bias = random(num_rows, num_experts, seed=1, size=4.0), random(num_experts, seed=2, size=0.3)
    law = {"bias": bias, "top_k": top_k, "scoring": scoring, "renormalise": True, "scale": 2.5}
    law |= {"num_groups": groups, "topk_groups": kept}
    plain, compiled = (kernels.bind("route_grouped", **moved(law)) for kernels in triton_twins)
    expected, found = plain(moved(logits)), compiled(moved(logits))
    assert torch.equal(found.experts, expected.experts)
    near(found[1:], [expected.weights.cpu()], 1e-5)


def test_route_grouped_of_ties(triton_twins, moved):
    """Of equal groups and of equal experts the lower wins; where the groups hold too few, the lowest others follow."""
    logits = torch.zeros(4, 12)
    logits[1, [4, 5, 8, 9]], logits[2, 11], logits[3] = 1.0, 3.0, -1e4
    for top_k, kept in ((3, 2), (5, 1)):
        law = {"bias": torch.zeros(12), "top_k": top_k, "scoring": "sigmoid", "renormalise": True, "scale": 1.0}
        law |= {"num_groups": 3, "topk_groups": kept}
        plain, compiled = (kernels.bind("route_grouped", **moved(law)) for kernels in triton_twins)
        assert torch.equal(plain(moved(logits)).experts, compiled(moved(logits)).experts)
