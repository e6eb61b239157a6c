"""How even plans are: on the files of loads, on loads never seen before, and against exact optima."""

import numpy as np
import pytest
from dspark.eplb.balance import plan
from dspark.eplb.baseline import greedy_plan
from dspark.eplb.placement import Placement
from dspark.eplb.synthetic import synthetic_loads

# GPUs, redundant slots; the least mean and the least worst layer for log-normal loads.
LOGNORMAL = {
    (8, 16): (0.999, 0.998),
    (32, 32): (0.999, 0.998),
    (32, 64): (0.999, 0.998),
    (72, 32): (0.998, 0.99),
    (72, 104): (0.998, 0.99),
    (144, 176): (0.997, 0.995),
    (320, 384): (0.98, 0.97),
}
FILES = [
    "v3_logn0.8_none",
    "v3_zipf0.6_none",
    "v3_zipf0.9_none",
    "v3_zipf1.2_none",
    "v3_sparse_none",
    "v3_hot1_none",
    "v3_depth_none",
    "k384_logn0.8_none",
    "q128_sparse_none",
    "v4f_zipf0.9_none",
]


def balances(load, num_gpus, redundant, **more):
    placement = plan(load, num_gpus, num_redundant=redundant, **more)
    baseline = Placement(greedy_plan(load, placement.shape), placement.shape)
    assert (placement.num_duplicates == 0).all()
    return placement.balance(load), baseline.balance(load)


@pytest.mark.parametrize("sizes", LOGNORMAL)
@pytest.mark.parametrize("seed", [101, 102])
def test_unseen_lognormal_loads(sizes, seed):
    balance, baseline = balances(synthetic_loads("logn0.8", 24, 256, seed), *sizes)
    mean, worst = LOGNORMAL[sizes]
    assert balance.mean() >= mean and balance.min() >= worst, (balance.mean(), balance.min())
    assert (balance >= baseline).all()


@pytest.mark.parametrize("kind", ["zipf0.9", "zipf1.2", "sparse", "hot1", "depth"])
@pytest.mark.parametrize("sizes", [(8, 16), (32, 32)])
def test_unseen_loads_with_many_slots_a_gpu(kind, sizes):
    balance, baseline = balances(synthetic_loads(kind, 16, 256, 77), *sizes)
    assert balance.mean() >= 0.999 and balance.min() >= 0.998, (balance.mean(), balance.min())
    assert (balance >= baseline).all()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("sizes", [(32, 64), (72, 96), (144, 48)])
def test_files_are_never_below_the_greedy(shared_load, name, sizes):
    load = shared_load(name)[0]
    num_gpus = sizes[0]
    redundant = -load.shape[1] % num_gpus + (num_gpus if sizes[1] >= num_gpus else 0)
    balance, baseline = balances(load, num_gpus, redundant)
    assert (balance >= baseline).all()
    if redundant and (load.shape[1] + redundant) // num_gpus >= 8:
        assert balance.mean() >= 0.999 and balance.min() >= 0.998


@pytest.mark.parametrize(
    ("name", "sizes", "mean", "worst"),
    [("v3_zipf1.2_none", (320, 384), 0.97, 0.96), ("v3_depth_none", (72, 32), 0.998, 0.99)],
)
def test_hard_files(shared_load, name, sizes, mean, worst):
    balance, _ = balances(shared_load(name)[0], *sizes)
    assert balance.mean() >= mean and balance.min() >= worst


def test_the_readme_example_at_its_optimum(readme_load):
    """Optima proved elsewhere by a constraint solver over copies and placement together."""
    assert np.round(plan(readme_load, 8, num_redundant=4).balance(readme_load), 4).tolist() == [0.9494, 0.8401]
    grouped = plan(readme_load, 8, num_redundant=4, num_nodes=2, num_groups=4)
    assert np.round(grouped.balance(readme_load), 4).tolist() == [0.8551, 0.8050]


def test_groups_of_a_whole_model(model_load):
    balance, baseline = balances(model_load, 32, 32, num_nodes=4, num_groups=8)
    assert (balance >= baseline).all() and balance.mean() >= 0.954


@pytest.mark.parametrize(
    ("num_experts", "num_slots", "num_gpus"),
    [(6, 9, 3), (8, 12, 4), (6, 8, 4), (9, 12, 3), (10, 12, 4), (9, 12, 6), (12, 12, 4)],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_small_cases_against_an_exact_solver(num_experts, num_slots, num_gpus, seed):
    pytest.importorskip("scipy")
    load = np.exp(np.random.default_rng(seed).normal(0, 0.9, num_experts))
    load *= num_gpus / load.sum()
    best = 1 / exact_top(load, num_slots, num_gpus)
    found = plan(load[None], num_gpus, num_redundant=num_slots - num_experts).balance(load[None])[0]
    assert best - 0.005 <= found <= best + 1e-3


def exact_top(load, num_slots, num_gpus):
    """The least load of the fullest GPU (mean 1), by mixed-integer programming over copies and placement together.

    ``z[e, g, c]`` says that GPU g holds one of c copies of expert e, ``y[e, c]`` that e has c copies.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import lil_matrix

    num_experts, most = len(load), min(num_gpus, num_slots - len(load) + 1)
    z = np.arange(num_experts * num_gpus * most).reshape(num_experts, num_gpus, most)
    y = z.size + np.arange(num_experts * most).reshape(num_experts, most)
    top = z.size + y.size
    copies = np.arange(1, most + 1)
    rows = []
    for e in range(num_experts):
        rows.append((dict.fromkeys(y[e], 1.0), 1, 1))
        for c in range(most):
            rows.append(({**dict.fromkeys(z[e, :, c], 1.0), y[e, c]: -float(c + 1)}, 0, 0))
            rows += [({z[e, g, c]: 1.0, y[e, c]: -1.0}, -np.inf, 0) for g in range(num_gpus)]
    for g in range(num_gpus):
        rows.append((dict.fromkeys(z[:, g].ravel(), 1.0), num_slots // num_gpus, num_slots // num_gpus))
        shares = (load[:, None] / copies).ravel()
        rows.append(({**dict(zip(z[:, g].ravel(), shares)), top: -1.0}, -np.inf, 0))
    matrix = lil_matrix((len(rows), top + 1))
    for n, (row, _, _) in enumerate(rows):
        for column, value in row.items():
            matrix[n, column] = value
    solved = milp(
        np.eye(1, top + 1, top)[0],
        constraints=LinearConstraint(matrix.tocsr(), [row[1] for row in rows], [row[2] for row in rows]),
        integrality=np.append(np.ones(top), 0),
        bounds=Bounds(np.append(np.zeros(top), 1.0), np.append(np.ones(top), load.sum())),
        options={"mip_rel_gap": 1e-4},
    )
    assert solved.status == 0, solved.message
    return solved.fun
