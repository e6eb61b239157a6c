"""Triton's kernels that treat every row by itself, against their plain twins: in the interpreter, or on a GPU."""

import math

import pytest
import torch
from dspark.layers.attention.plan import build_plan
from dspark.layers.kernels import Kernels
from dspark.layers.kernels.moe import Routing
from dspark.layers.kernels.projection import ProjectionSizes

# Absolute and relative, of values of order one. bfloat16: a few units in its last place.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


def random(*shape, seed=0, size=1.0, dtype=torch.float32):
    return (size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def check(twins, moved, operation, weights, arguments, bound):
    """Both bound to the same weights, called with the same arguments; whatever they give agrees."""
    plain, compiled = twins
    expected = plain.bind(operation, **weights)(*arguments)
    actual = compiled.bind(operation, **moved(weights))(*moved(arguments))
    pairs = zip(expected, actual) if isinstance(expected, tuple) else [(expected, actual)]
    for before, after in pairs:
        assert before.dtype == after.dtype and before.shape[0] == after.shape[0]
        if before.numel():
            torch.testing.assert_close(after.cpu().double(), before.double(), rtol=bound, atol=bound)


@DTYPES
@pytest.mark.parametrize("num_rows,num_in,num_out", [(0, 3, 5), (1, 700, 70), (17, 129, 3), (35, 1, 64)])
def test_products(triton_twins, moved, num_rows, num_in, num_out, dtype):
    size = num_in**-0.5
    weight, x = random(num_in, num_out, seed=1, size=size, dtype=dtype), random(num_rows, num_in, dtype=dtype)
    check(triton_twins, moved, "linear", {"weight": weight}, (x,), BOUNDS[dtype])
    weight, x = random(3, num_in, num_out, size=size, dtype=dtype), random(num_rows, 3, num_in, dtype=dtype)
    check(triton_twins, moved, "grouped_linear", {"weight": weight}, (x,), BOUNDS[dtype])


@pytest.mark.parametrize("size", [1e-20, 1e15])
def test_product_of_extreme_values_and_strided_rows(triton_twins, moved, size):
    x, weight = random(5, 40, size=size)[:, 20:33], random(13, 6, seed=1, size=1 / size)
    check(triton_twins, moved, "linear", {"weight": weight}, (x,), 1e-5)


def test_many_rows_are_the_library_product(triton_twins, moved):
    check(triton_twins, moved, "linear", {"weight": random(9, 4, seed=1)}, (random(300, 9),), 1e-5)


def plan_at(positions):
    rows = torch.zeros(5, len(positions), dtype=torch.int64)
    rows[0] = torch.tensor(positions)
    return build_plan(rows.numpy(), torch.zeros((1, 1), dtype=torch.int32), ())


@DTYPES
@pytest.mark.parametrize("heads,d,rope_dim", [(1, 2, 2), (3, 9, 4), (2, 32, 32)])
@pytest.mark.parametrize("positions", [[], [5, 0, 31, 5]])
def test_norms_and_rotations(triton_twins, moved, tables, positions, heads, d, rope_dim, dtype):
    plan, rope, bound = plan_at(positions), tables(rope_dim, 32), BOUNDS[dtype]
    q, kv = random(len(positions), heads, d, dtype=dtype), random(len(positions), d, seed=1, dtype=dtype)
    weight = random(d, seed=2)
    check(triton_twins, moved, "rms_norm", {"weight": weight, "eps": 1e-5}, (kv,), bound)
    check(triton_twins, moved, "head_rope", {"rope": rope}, (q, plan), bound)
    check(triton_twins, moved, "head_norm_rope", {"rope": rope, "eps": 1e-5}, (q, plan), bound)
    check(triton_twins, moved, "key_norm_rope", {"rope": rope, "eps": 1e-5, "weight": weight}, (kv, plan), 2 * bound)


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e15])
def test_norm_of_extreme_rows(triton_twins, moved, size):
    check(triton_twins, moved, "rms_norm", {"weight": random(7, seed=1), "eps": 1e-6}, (random(3, 7, size=size),), 2e-5)


@DTYPES
@pytest.mark.parametrize("num_rows,index_heads", [(0, 2), (1, 0), (5, 2)])
def test_project(triton_twins, moved, tables, num_rows, index_heads, dtype):
    latent, d, raw, heads, index_d, hidden = 13, 10, 6, 3, 6, 11
    sizes = ProjectionSizes(latent, d, raw, heads, index_heads, index_d)
    columns = latent + d + raw + index_heads
    weights = {
        "weight_in": random(hidden, columns, seed=1, size=0.3, dtype=dtype),
        "weight_q": random(latent, heads * d + index_heads * index_d, seed=2, size=0.3, dtype=dtype),
        "latent_norm": random(latent, seed=3),
        "key_norm": random(d, seed=4),
        "sizes": sizes,
        "rope": tables(4, 32),
        "eps": 1e-5,
    }
    arguments = (random(num_rows, hidden, dtype=dtype), plan_at(list(range(7, 7 + num_rows))))
    check(triton_twins, moved, "project", weights, arguments, 3 * BOUNDS[dtype])


def hyper_weights(n, width, size=0.3):
    columns = (2 + n) * n
    return {
        "fn": random(n * width, columns, seed=1, size=(n * width) ** -0.5),
        "base": random(columns, seed=2, size=size),
        "scale": torch.tensor([0.7, 1.3, 0.9]),
        "norm_weight": random(width, seed=4),
        "hc_eps": 1e-6,
        "norm_eps": 1e-6,
    }


@DTYPES
@pytest.mark.parametrize("constrained", [True, False], ids=["mHC", "HC"])
@pytest.mark.parametrize("num_rows,n,width", [(0, 4, 8), (1, 1, 5), (18, 2, 7), (2, 4, 70), (2, 5, 3)])
def test_reading_streams(triton_twins, moved, num_rows, n, width, constrained, dtype):
    streams, weights = random(num_rows, n, width, dtype=dtype), hyper_weights(n, width)
    law = {"num_iters": 20 if num_rows != 18 else 1, "constrained": constrained}
    check(triton_twins, moved, "hc_pre", weights | law, (streams,), BOUNDS[dtype])


@pytest.mark.parametrize("size", [5.0, 200.0])
def test_reading_saturated_streams(triton_twins, moved, size):
    """Sigmoids at 0 and 1, and a softmax that leaves one number a row."""
    law = {"num_iters": 20, "constrained": True}
    check(triton_twins, moved, "hc_pre", hyper_weights(4, 8, size) | law, (random(4, 4, 8, size=50.0),), 1e-4)


@DTYPES
@pytest.mark.parametrize("num_rows,n,width", [(0, 4, 8), (1, 1, 5), (3, 2, 7), (5, 4, 70)])
def test_writing_and_collapsing_streams(triton_twins, moved, num_rows, n, width, dtype):
    streams, y = random(num_rows, n, width, dtype=dtype), random(num_rows, width, seed=1, dtype=dtype)
    post, comb = random(num_rows, n, seed=2), random(num_rows, n, n, seed=3)
    check(triton_twins, moved, "hc_post", {}, (streams, y, post, comb), BOUNDS[dtype])
    weights = {"fn": random(n * width, n, seed=1, size=(n * width) ** -0.5), "base": random(n, seed=2)}
    weights |= {"scale": torch.tensor([0.7]), "hc_eps": 0.01, "norm_eps": 1e-5}
    check(triton_twins, moved, "hc_collapse", weights, (streams,), BOUNDS[dtype])


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
@pytest.mark.parametrize("num_rows,num_experts,top_k", [(0, 4, 2), (1, 1, 1), (3, 3, 3), (4, 24, 6)])
def test_routing(triton_twins, moved, num_rows, num_experts, top_k, scoring):
    logits, bias = random(num_rows, num_experts, size=4.0), random(num_experts, seed=1, size=0.3)
    for renormalise in (True, False):
        law = {"scoring": scoring, "renormalise": renormalise, "scale": 1.5}
        check(triton_twins, moved, "route_scored", {"bias": bias, "top_k": top_k} | law, (logits,), 1e-5)
        chosen = torch.randint(0, num_experts, (num_rows, top_k), generator=torch.Generator().manual_seed(2))
        check(triton_twins, moved, "route_hashed", law, (logits, chosen), 1e-5)


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
def test_routing_of_ties_and_extremes(triton_twins, moved, scoring):
    """Of equal scores the lower id wins; logits far out neither overflow nor divide by zero."""
    logits = torch.zeros(6, 6)
    logits[1, 3:], logits[2, ::2], logits[3, 5], logits[4], logits[5] = 1.0, -1.0, 2.0, -1e4, 1e4
    law = {"scoring": scoring, "renormalise": True, "scale": 1.0}
    check(triton_twins, moved, "route_scored", {"bias": torch.zeros(6), "top_k": 3} | law, (logits,), 1e-5)
    tiny = random(3, 6, seed=1) - 40.0  # scores of 1e-9 keep their digits
    check(triton_twins, moved, "route_scored", {"bias": torch.zeros(6), "top_k": 3} | law, (tiny,), 1e-5)


@DTYPES
@pytest.mark.parametrize("limit", [0.5, math.inf])
@pytest.mark.parametrize("num_rows,width,size", [(0, 3, 1.0), (3, 5, 1.0), (2, 33, 30.0)])
def test_swiglu(triton_twins, moved, num_rows, width, size, limit, dtype):
    gate_up = random(num_rows, 2 * width, size=size, dtype=dtype)
    check(triton_twins, moved, "swiglu", {"limit": limit}, (gate_up,), BOUNDS[dtype])


def expert_weights(num_experts, hidden, width, dtype=torch.float32):
    return {
        "gate_up": random(num_experts, hidden, 2 * width, seed=3, size=hidden**-0.5, dtype=dtype),
        "down": random(num_experts, width, hidden, seed=4, size=width**-0.5, dtype=dtype),
        "limit": 2.0,
    }


@DTYPES
@pytest.mark.parametrize("elsewhere", [0.5, 1.0], ids=["half elsewhere", "all elsewhere"])
@pytest.mark.parametrize("num_rows,hidden,width", [(0, 4, 4), (1, 1, 1), (14, 24, 17), (18, 7, 70)])
def test_experts(triton_twins, moved, num_rows, hidden, width, elsewhere, dtype):
    made = torch.Generator().manual_seed(num_rows)
    experts = torch.rand(num_rows, 5, generator=made).argsort(dim=1)[:, :3]
    experts = torch.where(torch.rand(num_rows, 3, generator=made) < elsewhere, -1, experts)
    routing = Routing(experts, torch.rand(num_rows, 3, generator=made))
    x = random(num_rows, hidden, dtype=dtype)
    check(triton_twins, moved, "experts_forward", expert_weights(5, hidden, width, dtype), (x, routing), BOUNDS[dtype])


@pytest.mark.parametrize("experts", [[4], [1, 1, -1]], ids=["one for all", "one chosen twice"])
def test_experts_that_get_many_rows(triton_twins, moved, experts):
    """More rows than a tile holds, and experts without any."""
    chosen = torch.tensor([experts]).expand(60, len(experts))
    routing = Routing(chosen, random(60, len(experts), seed=1).abs())
    check(triton_twins, moved, "experts_forward", expert_weights(6, 6, 7), (random(60, 6), routing), 2e-5)


def test_rows_do_not_know_each_other(moved, device):
    """Bound deterministically, a row's result has the same bits in any company.

    The interpreter's products are the library's, whose rows know their place in a tile: there only rows behind differ.
    """
    pytest.importorskip("triton")
    parts = (slice(0, 1), slice(0, 18)) if device.type == "cpu" else (slice(0, 1), slice(3, 11))
    kernels = Kernels("triton", deterministic=True)
    hyper = hyper_weights(4, 9) | {"num_iters": 20, "constrained": True}
    experts = torch.randint(0, 4, (24, 2), generator=torch.Generator().manual_seed(2))
    bound = {name: kernels.bind(name, **moved(weights)) for name, weights in {
        "linear": {"weight": random(300, 11, seed=1)},
        "experts_forward": expert_weights(4, 37, 5),
        "hc_pre": hyper,
    }.items()}  # fmt: skip
    calls = [
        (bound["linear"], (random(24, 300),)),
        (lambda x, e, w: bound["experts_forward"](x, Routing(e, w)), (random(24, 37), experts, random(24, 2, seed=3))),
        (lambda streams: bound["hc_pre"](streams).x, (random(24, 4, 9),)),
    ]
    for call, rows in calls:
        together = call(*moved(list(rows)))
        for part in parts:
            assert torch.equal(call(*(one[part] for one in moved(list(rows)))), together[part])


@DTYPES
@pytest.mark.parametrize("num_blocks,gamma,vocab,rank", [(0, 2, 9, 4), (3, 3, 150, 5), (2, 1, 64, 16)])
def test_markov_greedy(triton_twins, moved, num_blocks, gamma, vocab, rank, dtype):
    """Logits and biases are whole numbers, so most places tie, and the lower id wins."""
    base = random(num_blocks, gamma, vocab, size=2.0).round()
    weights = {name: random(vocab, rank, seed=i).round().to(dtype) for i, name in enumerate(("w1", "w2"))}
    anchors = torch.arange(num_blocks) * 7 % vocab
    check(triton_twins, moved, "markov_greedy", weights, (base, anchors), 0.0)
