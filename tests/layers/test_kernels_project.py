"""The fused projection of attention's inputs, plain and compiled, against float64 formulas."""

import pytest
import torch
from dspark.layers.attention.plan import build_plan
from dspark.layers.kernels.projection import ProjectionSizes


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense_norm(x, eps, weight=1.0):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("num_rows", [0, 1, 5, 66])
@pytest.mark.parametrize(
    "sizes", [ProjectionSizes(5, 6, 0, 3, 0, 4), ProjectionSizes(16, 8, 24, 2, 3, 10)], ids=["sliding", "indexed"]
)
def test_project(twins, tables, turned, sizes, num_rows):
    hidden, eps, rope = 12, 1e-5, tables(4, 64)
    latent, d, raw, heads, index_heads, d_index = sizes
    weights = {
        "weight_in": random(hidden, latent + d + raw + index_heads, seed=1),
        "weight_q": random(latent, heads * d + index_heads * d_index, seed=2),
        "latent_norm": random(latent, seed=3),
        "key_norm": random(d, seed=4),
    }
    x, positions = random(num_rows, hidden, seed=num_rows), torch.arange(num_rows) * 7 % 64
    rows = torch.zeros(5, num_rows, dtype=torch.int64)
    rows[0] = positions
    plan = build_plan(rows.numpy(), torch.zeros((1, 1), dtype=torch.int32), ())
    cos, sin = rope.cos[positions], rope.sin[positions]
    y = x.double() @ weights["weight_in"].double()
    wide = dense_norm(y[:, :latent], eps, weights["latent_norm"].double()) @ weights["weight_q"].double()
    q = dense_norm(wide[:, : heads * d].unflatten(1, (heads, d)), eps)
    expected = (
        turned(q, cos[:, None], sin[:, None]),
        turned(dense_norm(y[:, latent : latent + d], eps, weights["key_norm"].double()), cos, sin),
        y[:, latent + d : latent + d + raw],
        turned(wide[:, heads * d :].unflatten(1, (index_heads, d_index)), cos[:, None], sin[:, None]),
        y[:, latent + d + raw :],
    )
    for kernels in twins:
        found = kernels.bind("project", **weights, sizes=sizes, rope=rope, eps=eps)(x, plan)
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual.double(), wanted, rtol=1e-4, atol=1e-4)
