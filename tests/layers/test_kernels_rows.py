"""Kernels that treat every row by itself (products, norms, rotations, hyper-connections), plain and compiled, against
float64 formulas."""

import math

import numpy as np
import pytest
import torch
from dspark.layers.attention.plan import build_plan
from dspark.layers.kernels import Kernels
from dspark.layers.kernels.moe import Routing

EPS32 = 2.0**-24
# Compiled products take rows in tiles of at most 6, columns in vectors of 8 or panels of 16.
ROWS = (0, 1, 2, 3, 5, 7, 11, 64, 65)
COLUMNS = [(1, 1), (3, 5), (4, 8), (7, 1), (6, 9), (2, 16), (30, 33), (9, 64), (129, 70), (5, 250), (5, 0)]


def random(*shape, seed=0, size=1.0):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(actual, expected, bound=1e-5):
    torch.testing.assert_close(actual.double(), expected, rtol=bound, atol=bound)


def check_product(actual, x, weight):
    """Within the worst case of a float32 sum in any order."""
    exact = x.double() @ weight.double()
    worst = 2 * weight.shape[0] * EPS32 * (x.abs().double() @ weight.abs().double())
    assert actual.shape == exact.shape and actual.dtype == torch.float32
    assert ((actual.double() - exact).abs() <= worst + 1e-44).all()


@pytest.mark.parametrize("shape", COLUMNS)
@pytest.mark.parametrize("num_rows", ROWS)
def test_linear(twins, num_rows, shape):
    x, weight = random(num_rows, shape[0], seed=num_rows), random(*shape, seed=1)
    for kernels in twins:
        check_product(kernels.bind("linear", weight=weight)(x), x, weight)


@pytest.mark.parametrize("shape", COLUMNS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 6, 13])
def test_products_stay_inside_their_matrices(num_rows, shape):
    """Inputs and results lie in the middle of larger memory, whose NaNs must neither be used nor overwritten."""
    pytest.importorskip("numba")
    from dspark.layers.kernels.cpu.packed import pack, packed_part_product
    from dspark.layers.kernels.cpu.product import part_product

    def within(*matrix_shape):
        memory = np.full(math.prod(matrix_shape) + 2 * 64, np.nan, np.float32)
        return memory, memory[64 : len(memory) - 64].reshape(matrix_shape)

    (_, x), (_, weight), (memory, out) = within(num_rows, shape[0]), within(*shape), within(num_rows, shape[1])
    x[:], weight[:] = random(*x.shape).numpy(), random(*shape, seed=1).numpy()
    panels, at = pack(torch.from_numpy(weight)), [matrix.ctypes.data for matrix in (x, weight, out)]
    for packed in (False, True):
        memory[:] = np.nan
        if packed:
            packed_part_product(at[0], shape[0], panels, at[2], shape[1], num_rows, shape[1])
        else:
            part_product(at[0], shape[0], 1, at[1], shape[1], at[2], shape[1], num_rows, *shape)
        check_product(torch.from_numpy(out), torch.from_numpy(x), torch.from_numpy(weight))
        assert np.isnan(memory[:64]).all() and np.isnan(memory[len(memory) - 64 :]).all()


@pytest.mark.parametrize("num_rows", [1, 17, 65])
@pytest.mark.parametrize("size", [1e-30, 1e15])
def test_linear_of_extreme_values_and_strided_rows(twins, num_rows, size):
    weight = random(13, 6, seed=1)
    wide = random(num_rows, 40, size=size)
    for kernels in twins:
        check_product(kernels.bind("linear", weight=weight)(wide[:, 20:33]), wide[:, 20:33], weight)


@pytest.mark.parametrize("shape", [(1, 3, 2), (2, 8, 5), (3, 17, 4), (4, 5, 8), (3, 6, 19)])
@pytest.mark.parametrize("num_rows", ROWS)
def test_grouped_linear(twins, num_rows, shape):
    groups, num_in, num_out = shape
    x, weight = random(num_rows, groups, num_in, seed=num_rows), random(*shape, seed=1)
    for kernels in twins:
        y = kernels.bind("grouped_linear", weight=weight)(x)
        assert y.shape == (num_rows, groups * num_out)
        for g in range(groups):
            check_product(y[:, g * num_out : (g + 1) * num_out], x[:, g], weight[g])


def dense_norm(x, eps, weight=1.0):
    return x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("size", [0.0, 1e-12, 1.0, 1e15])
@pytest.mark.parametrize("num_rows,width", [(0, 4), (1, 1), (3, 7), (18, 64)])
def test_rms_norm(twins, num_rows, width, size):
    x, weight = random(num_rows, width, size=size), random(width, seed=1)
    for kernels in twins:
        near(kernels.bind("rms_norm", weight=weight, eps=1e-6)(x), dense_norm(x, 1e-6, weight.double()))


def plan_at(positions):
    rows = torch.zeros(5, len(positions), dtype=torch.int64)
    rows[0] = torch.tensor(positions)
    return build_plan(rows.numpy(), torch.zeros((1, 1), dtype=torch.int32), ())


@pytest.mark.parametrize("heads,d,rope_dim", [(1, 2, 2), (3, 9, 4), (2, 32, 32)])
@pytest.mark.parametrize("positions", [[], [0], [5, 0, 31, 5]])
def test_rotations(twins, tables, turned, positions, heads, d, rope_dim):
    plan, rope = plan_at(positions), tables(rope_dim, 32)
    q, kv, weight = random(len(positions), heads, d), random(len(positions), d, seed=1), random(d, seed=2)
    cos, sin = rope.cos[plan.queries.positions], rope.sin[plan.queries.positions]
    for kernels in twins:
        near(kernels.bind("head_rope", rope=rope)(q, plan), turned(q.double(), cos[:, None], sin[:, None]))
        rotated = kernels.bind("head_norm_rope", rope=rope, eps=1e-5)(q, plan)
        near(rotated, turned(dense_norm(q, 1e-5), cos[:, None], sin[:, None]))
        keys = kernels.bind("key_norm_rope", weight=weight, rope=rope, eps=1e-5)(kv, plan)
        near(keys, turned(dense_norm(kv, 1e-5, weight.double()), cos, sin))


# --- hyper-connections: streams [T, n, D] --------------------------------------------------------------------------


def dense_sinkhorn(logits, num_iters, eps):
    """One matrix, number by number."""
    n = len(logits)
    matrix = []
    for row in logits:
        top = max(row)
        powers = [math.exp(value - top) for value in row]
        matrix.append([power / sum(powers) + eps for power in powers])
    for step in range(num_iters):
        if step:
            matrix = [[value / (sum(row) + eps) for value in row] for row in matrix]
        sums = [sum(matrix[i][k] for i in range(n)) + eps for k in range(n)]
        matrix = [[matrix[i][k] / sums[k] for k in range(n)] for i in range(n)]
    return torch.tensor(matrix, dtype=torch.float64)


def dense_hc_pre(row, fn, base, scale, norm_weight, hc_eps, norm_eps, num_iters, constrained):
    """x, post and comb of one row of streams [n, D]."""
    n = row.shape[0]
    flat = row.double().flatten()
    mix = (flat / (flat.square().mean() + norm_eps).sqrt()) @ fn.double()
    base, scale = base.double(), scale.double()
    cuts = (slice(0, n), slice(n, 2 * n), slice(2 * n, None))
    if constrained:
        pre, post, comb = (mix[cut] * scale[i] + base[cut] for i, cut in enumerate(cuts))
        pre, post = pre.sigmoid() + hc_eps, 2 * post.sigmoid()
        comb = dense_sinkhorn(comb.reshape(n, n).tolist(), num_iters, hc_eps)
    else:
        pre, post, comb = (mix[cut].tanh() * scale[i] + base[cut] for i, cut in enumerate(cuts))
        comb = comb.reshape(n, n)
    x = sum(pre[j] * row[j].double() for j in range(n))
    return dense_norm(x, norm_eps, norm_weight.double()), post, comb


def hyper_weights(n, width, size=0.3):
    columns = (2 + n) * n
    return {
        "fn": random(n * width, columns, seed=1, size=(n * width) ** -0.5),
        "base": random(columns, seed=2, size=size),
        "scale": torch.tensor([0.7, 1.3, 0.9]),
    }


@pytest.mark.parametrize("constrained", [True, False], ids=["mHC", "HC"])
@pytest.mark.parametrize("hc_eps,num_iters", [(1e-6, 20), (1e-2, 1), (1e-2, 3)])
@pytest.mark.parametrize("num_rows,n,width", [(0, 4, 8), (1, 1, 5), (3, 2, 7), (17, 4, 16), (2, 5, 3)])
def test_hc_pre(twins, num_rows, n, width, hc_eps, num_iters, constrained):
    streams = random(num_rows, n, width)
    weights = hyper_weights(n, width) | {"norm_weight": random(width, seed=4)}
    weights |= {"hc_eps": hc_eps, "norm_eps": 1e-6, "num_iters": num_iters, "constrained": constrained}
    for kernels in twins:
        x, post, comb = kernels.bind("hc_pre", **weights)(streams)
        assert x.shape == (num_rows, width) and post.shape == (num_rows, n) and comb.shape == (num_rows, n, n)
        for i in range(num_rows):
            for actual, expected in zip((x[i], post[i], comb[i]), dense_hc_pre(streams[i], **weights)):
                near(actual, expected, 2e-5)


@pytest.mark.parametrize("size", [5.0, 200.0])
def test_hc_pre_saturated(twins, size):
    """Sigmoids at 0 and 1, and a softmax that leaves one number a row; the epsilons keep all of it finite."""
    streams, n, width = random(4, 4, 8, size=50.0), 4, 8
    weights = hyper_weights(n, width, size) | {"norm_weight": torch.ones(width)}
    weights |= {"hc_eps": 1e-6, "norm_eps": 1e-6, "num_iters": 20, "constrained": True}
    for kernels in twins:
        x, post, comb = kernels.bind("hc_pre", **weights)(streams)
        for i in range(4):
            for actual, expected in zip((x[i], post[i], comb[i]), dense_hc_pre(streams[i], **weights)):
                near(actual, expected, 1e-4)


def test_sinkhorn_is_nearly_doubly_stochastic(twins):
    """It ends on columns: those sum to one up to epsilon, rows only approximately."""
    weights = hyper_weights(4, 8) | {"norm_weight": torch.ones(8), "hc_eps": 1e-6, "norm_eps": 1e-6}
    for kernels in twins:
        comb = kernels.bind("hc_pre", **weights, num_iters=20, constrained=True)(random(30, 4, 8)).comb
        assert (comb > 0).all()
        torch.testing.assert_close(comb.sum(1), torch.ones(30, 4), rtol=0, atol=3e-6)
        torch.testing.assert_close(comb.sum(2), torch.ones(30, 4), rtol=0, atol=1e-3)


@pytest.mark.parametrize("num_rows,n,width", [(0, 4, 8), (1, 1, 5), (3, 2, 7), (17, 4, 16)])
def test_hc_post_sums_over_the_first_index(twins, num_rows, n, width):
    streams, y = random(num_rows, n, width), random(num_rows, width, seed=1)
    post, comb = random(num_rows, n, seed=2), random(num_rows, n, n, seed=3)
    expected = torch.zeros(num_rows, n, width, dtype=torch.float64)
    for i in range(num_rows):
        for k in range(n):
            expected[i, k] = post[i, k].double() * y[i].double()
            for j in range(n):
                expected[i, k] += comb[i, j, k].double() * streams[i, j].double()
    for kernels in twins:
        near(kernels.bind("hc_post")(streams, y, post, comb), expected)


@pytest.mark.parametrize("num_rows,n,width", [(0, 4, 8), (1, 1, 5), (3, 2, 7), (17, 4, 16)])
def test_hc_mean(twins, num_rows, n, width):
    streams = random(num_rows, n, width)
    for kernels in twins:
        near(kernels.bind("hc_mean")(streams), streams.double().sum(1) / n)


@pytest.mark.parametrize("num_rows,n,width", [(0, 4, 8), (1, 1, 5), (3, 2, 7), (17, 4, 16)])
def test_hc_collapse(twins, num_rows, n, width):
    streams, fn, base = random(num_rows, n, width), random(n * width, n, seed=1), random(n, seed=2)
    flat = streams.flatten(1).double()
    mix = (flat / (flat.square().mean(1, keepdim=True) + 1e-5).sqrt()) @ fn.double()
    pre = (mix * 0.7 + base.double()).sigmoid() + 0.01
    expected = (pre[:, :, None] * streams.double()).sum(1)
    weights = {"fn": fn, "base": base, "scale": torch.tensor([0.7]), "hc_eps": 0.01, "norm_eps": 1e-5}
    for kernels in twins:
        near(kernels.bind("hc_collapse", **weights)(streams), expected)


def check_alone(call, *rows):
    """Every row has the same bits in any company."""
    together = call(*rows)
    for first, stop in [(i, i + 1) for i in range(len(together))] + [(3, 11), (0, len(together) - 1)]:
        assert torch.equal(call(*(part[first:stop] for part in rows)), together[first:stop])


def test_a_row_does_not_depend_on_its_neighbours(twins):
    """Compiled norms and hyper-connections always, products of up to 64 rows."""
    compiled = twins[1]
    hyper = hyper_weights(4, 9) | {"norm_weight": torch.ones(9), "hc_eps": 1e-6, "norm_eps": 1e-6}
    check_alone(compiled.bind("linear", weight=random(37, 11, seed=1)), random(64, 37))
    check_alone(compiled.bind("rms_norm", weight=torch.ones(37), eps=1e-6), random(40, 37))
    read = compiled.bind("hc_pre", **hyper, num_iters=20, constrained=True)
    check_alone(lambda streams: read(streams).x, random(40, 4, 9))


def test_deterministic_products_do_not_depend_on_the_row_count(twins):
    kernels = Kernels("numba", deterministic=True)
    check_alone(kernels.bind("linear", weight=random(37, 11, seed=1)), random(80, 37))
    check_alone(kernels.bind("grouped_linear", weight=random(3, 37, 11, seed=1)), random(80, 3, 37))
    experts = torch.randint(0, 4, (80, 2), generator=torch.Generator().manual_seed(2))
    forward = kernels.bind(
        "experts_forward", gate_up=random(4, 37, 10, seed=1), down=random(4, 5, 37, seed=2), limit=2.0
    )
    check_alone(lambda x, e, w: forward(x, Routing(e, w)), random(80, 37), experts, random(80, 2, seed=3))


def test_backends_that_do_not_exist_or_cannot_promise_are_named():
    with pytest.raises(ValueError, match="'cuda'.*'torch'.*numba"):
        Kernels("cuda")
    with pytest.raises(ValueError, match="--deterministic needs compiled kernels"):
        Kernels("torch", deterministic=True)
