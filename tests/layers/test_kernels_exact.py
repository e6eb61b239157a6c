"""What the compiled kernels promise bit by bit, and how exact their exponential function is."""

import numpy as np
import pytest
import torch
from dspark.layers.kernels.moe import Routing


def looped(name):
    """The compiled function ``name`` of each number of an array, in a loop that may run on vectors."""
    pytest.importorskip("numba", reason="without numba there is no compiled exp")
    from dspark.layers.kernels.cpu import exp as functions
    from dspark.layers.kernels.cpu.jit import jit

    function = getattr(functions, name)

    @jit
    def fill(x, out):
        for i in range(x.shape[0]):
            out[i] = function(x[i])

    def run(x):
        out = np.empty_like(x)
        fill(x, out)
        return out

    return run


@pytest.fixture(scope="module")
def exp_of():
    return looped("exp")


@pytest.fixture(scope="module")
def exp_below_of():
    return looped("exp_below")


def test_exp_over_its_range(exp_of):
    """Within 2 units in the last place where results are normal numbers, and of the smallest number below."""
    x = np.linspace(-110.0, 88.72, 1_000_001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    unit = 2.0 ** np.maximum(np.floor(np.log2(exact)) - 23, -149)
    assert (np.abs(exp_of(x) - exact) <= 2 * unit).all()


def test_exp_below_zero(exp_below_of):
    """Within 2 units in the last place down to -87, and there is nothing below; NaN stays."""
    x = np.linspace(-87.0, 0.0, 1_000_001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    unit = 2.0 ** (np.floor(np.log2(exact)) - 23)
    assert (np.abs(exp_below_of(x) - exact) <= 2 * unit).all()
    for count in (1, 37):
        lowest = exp_below_of(np.repeat(np.float32([-88.0, -1e30, -np.inf]), count))
        assert (0 <= lowest).all() and (lowest < 1e-37).all()
        assert (exp_below_of(np.zeros(count, np.float32)) == 1.0).all()
        assert np.isnan(exp_below_of(np.full(count, np.nan, np.float32))).all()


@pytest.mark.parametrize("count", [1, 37])
def test_exp_at_its_limits(exp_of, count):
    """Alone, as the rest of a loop, and in vectors."""
    limits = {-np.inf: 0.0, -1e30: 0.0, -104.5: 0.0, 0.0: 1.0, 89.0: np.inf, 1e30: np.inf, np.inf: np.inf}
    for value, expected in limits.items():
        assert (exp_of(np.full(count, value, np.float32)) == expected).all(), value
    assert np.isnan(exp_of(np.full(count, np.nan, np.float32))).all()


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_in,num_out", [(1, 1), (33, 7), (20, 8), (31, 9), (64, 31), (40, 128), (17, 300)])
def test_rows_of_a_product_do_not_know_each_other(twins, num_in, num_out):
    """Every count of rows, so every mixture of tiles; columns that fill vectors and that do not."""
    linear = twins[1].bind("linear", weight=random(num_in, num_out, seed=1))
    x = random(15, num_in, seed=2)
    alone = torch.cat([linear(x[i : i + 1]) for i in range(15)])
    for count in range(1, 16):
        assert torch.equal(linear(x[:count]), alone[:count]), count


def test_rows_of_experts_do_not_know_each_other(twins):
    weights = {"gate_up": random(3, 12, 20, seed=1), "down": random(3, 10, 12, seed=2)}
    forward = twins[1].bind("experts_forward", **weights, limit=2.0)
    x, experts = random(14, 12, seed=3), torch.rand(14, 3, generator=torch.Generator().manual_seed(4)).argsort(1)[:, :2]
    routing = Routing(torch.where(experts == 1, -1, experts), random(14, 2, seed=5))
    alone = [forward(x[i : i + 1], Routing(*(part[i : i + 1] for part in routing))) for i in range(14)]
    assert torch.equal(forward(x, routing), torch.cat(alone))


def test_rows_of_attention_do_not_know_each_other(twins, scenes, tables):
    """A request's rows share the keys that are gathered for them; each one's result is as if it came alone."""
    scene = scenes(seed=1, spans=((21, 13), (2, 9)), d=10, ring=30)
    q = random(22, 3, 10, seed=2)
    weights = {"sinks": torch.zeros(3), "window": 7, "ratio": 4, "rope": tables(4, 64), "scale": 0.4}
    attend, plan = twins[1].bind("attend", **weights), scene.plan
    whole = attend(q, scene.keys, scene.cache, None, plan)
    for i in range(22):
        host = plan.host._replace(queries=np.ascontiguousarray(plan.host.queries[:, i : i + 1]))
        alone = attend(q[i : i + 1], scene.keys, scene.cache, None, plan._replace(host=host))
        assert torch.equal(alone, whole[i : i + 1]), i
