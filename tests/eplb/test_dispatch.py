"""Splits of an expert's tokens over its copies: sums, nearness to the linear program, agreement between ranks."""

import numpy as np
import pytest
from dspark.eplb.balance import plan
from dspark.eplb.cores import load_core
from dspark.eplb.dispatch import ReplicaSplit
from dspark.eplb.placement import Placement
from dspark.eplb.shape import Shape
from dspark.eplb.synthetic import drifting_loads


def lp_top(tokens, placement, layer):
    """The least load of the fullest GPU, by linear programming."""
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix

    slots, shape = placement.slots[layer], placement.shape
    num_slots, num_gpus = shape.num_slots, shape.num_gpus
    place = np.arange(num_slots)
    gpu = coo_matrix((np.ones(num_slots), (place // shape.slots_per_gpu, place)), (num_gpus, num_slots + 1)).tolil()
    gpu[:, num_slots] = -1
    expert = coo_matrix((np.ones(num_slots), (slots, place)), (shape.num_experts, num_slots + 1))
    cost = np.zeros(num_slots + 1)
    cost[-1] = 1
    return linprog(cost, A_ub=gpu.tocsr(), b_ub=np.zeros(num_gpus), A_eq=expert, b_eq=tokens, method="highs").fun


@pytest.mark.parametrize("redundant", [32, 64, 128])
@pytest.mark.parametrize("keep", [0.95, 0.8])
def test_weighted_is_near_the_linear_optimum(redundant, keep):
    pytest.importorskip("scipy")
    loads = drifting_loads(2, 8, 256, keep, seed=3)
    placement = plan(loads[0], 32, num_redundant=redundant)
    for layer, tokens in enumerate(loads[1]):
        split = ReplicaSplit(placement, layer)
        quota = split.weighted(tokens)
        assert np.array_equal(np.bincount(placement.slots[layer], quota, 256), tokens) and (quota >= 0).all()
        mean = tokens.sum() / 32
        best, found = mean / lp_top(tokens, placement, layer), mean / split.gpu_load(quota).max()
        assert best - 0.002 <= found <= best + 1e-9, layer
        assert found >= mean / split.gpu_load(split.even(tokens)).max()


def test_next_window_of_the_files(shared_load):
    windows = shared_load("v3_logn0.8_mid")
    placement = plan(windows[0], 32, num_redundant=64)
    found = [
        windows[1][layer].sum() / 32 / split.gpu_load(split.weighted(windows[1][layer])).max()
        for layer in range(58)
        for split in [ReplicaSplit(placement, layer)]
    ]
    assert np.mean(found) >= 0.985


@pytest.fixture(scope="module")
def placement():
    loads = drifting_loads(1, 3, 24, 0.9, seed=2, tokens=5000)
    return plan(loads[0], 8, num_redundant=16, num_nodes=2)


def test_even_leaves_at_most_one_token_between_copies(placement):
    rng = np.random.default_rng(1)
    split = ReplicaSplit(placement, 0)
    for _ in range(20):
        tokens = rng.integers(0, 40, 24)
        quota = split.even(tokens)
        assert np.array_equal(np.bincount(placement.slots[0], quota, 24), tokens)
        for expert in range(24):
            mine = quota[placement.slots[0] == expert]
            assert mine.max() - mine.min() <= 1


def test_leftovers_do_not_always_go_to_the_first_copy(placement):
    split = ReplicaSplit(placement, 0)
    several = np.flatnonzero(placement.counts[0] > 1)
    first = [split.even(np.ones(24, np.int64))[split.copies[e, 0]] for e in several]
    assert 0 < np.mean(first) < 1


@pytest.mark.parametrize("core", ["plain", "compiled"])
def test_cores_and_ranks_agree(core):
    try:
        load_core(core)
    except ValueError:
        pytest.skip("numba is not installed")
    rng = np.random.default_rng(9)
    for _ in range(30):
        num_gpus, slots = int(rng.integers(1, 9)), int(rng.integers(1, 6))
        num_experts = int(rng.integers(slots, num_gpus * slots + 1))
        made = plan(np.exp(rng.normal(0, 1, (1, num_experts))), num_gpus, num_redundant=num_gpus * slots - num_experts)
        tokens = rng.integers(0, rng.choice([2, 30, 5000]), num_experts)
        plain = ReplicaSplit(made, 0).weighted(tokens)
        assert np.array_equal(ReplicaSplit(made, 0, core).weighted(tokens), plain)
        assert np.array_equal(ReplicaSplit(made, 0, core).weighted(tokens.astype(np.int32)), plain)


def test_rows_of_all_ranks_fill_the_quotas_exactly(placement):
    rng = np.random.default_rng(4)
    split = ReplicaSplit(placement, 1)
    ranks = [rng.integers(0, 24, rng.integers(0, 60)) for _ in range(8)]
    counts = np.stack([np.bincount(rows, minlength=24) for rows in ranks])
    before = counts.cumsum(0) - counts
    for quota in (split.weighted(counts.sum(0)), split.even(counts.sum(0))):
        chosen = [split.assign(rows, before[rank], quota) for rank, rows in enumerate(ranks)]
        for rows, slots in zip(ranks, chosen):
            assert np.array_equal(placement.slots[1][slots], rows), "a row goes to a copy of its own expert"
        assert np.array_equal(np.bincount(np.concatenate(chosen), minlength=40), quota)
    # Ranks that hold the same rows all choose the same.
    rows = np.concatenate(ranks)
    quota = split.weighted(np.bincount(rows, minlength=24))
    assert np.array_equal(np.bincount(split.assign(rows, np.zeros(24, np.int64), quota), minlength=40), quota)


def test_counts_of_another_batch_are_noticed(placement):
    split = ReplicaSplit(placement, 0)
    quota = split.weighted(np.full(24, 2))
    with pytest.raises(ValueError, match="row 2 of expert 5 is beyond its quota of 2"):
        split.assign(np.array([5, 5, 5]), np.zeros(24, np.int64), quota)
    with pytest.raises(ValueError, match="whole numbers"):
        split.weighted(np.full(24, 2.0))
    with pytest.raises(ValueError, match="expert 3 has -1"):
        split.weighted(np.array([1, 1, 1, -1] + [1] * 20))
    with pytest.raises(ValueError, match=r"\[23\] do not fit 24"):
        split.weighted(np.full(23, 2))


def test_nearest():
    # Nodes {0, 1} and {2, 3}; expert 0 on GPUs 0 and 2, expert 3 on GPUs 1 and 3.
    placement = Placement(np.array([[0, 1, 3, 2, 0, 4, 3, 5]]), Shape(6, 8, 4, 2))
    near = ReplicaSplit(placement, 0).nearest()
    assert near[:, 0].tolist() == [0, 0, 4, 4] and near[:, 3].tolist() == [2, 2, 6, 6]
    assert near[:, 2].tolist() == [3, 3, 3, 3], "a single copy serves all"
    quota = ReplicaSplit(placement, 0).nearest_quota(np.full(6, 8))
    assert quota.tolist() == [4, 8, 4, 8, 4, 8, 4, 8]


def test_equally_near_copies_take_turns():
    placement = Placement(np.array([[0, 0, 1, 2, 3, 4, 5, 6]]), Shape(7, 8, 8, 2))
    hosts = ReplicaSplit(placement, 0).nearest()[:, 0]
    assert hosts[:2].tolist() == [0, 1]
    assert sorted(hosts[2:].tolist()) == [0, 0, 0, 1, 1, 1]
