"""Re-planning from a live map: budgets are never exceeded, little moves, and the next window is nearly as even."""

import numpy as np
import pytest
from dspark.eplb.balance import plan
from dspark.eplb.placement import Placement
from dspark.eplb.replan import budget_of, replan
from dspark.eplb.shape import Shape
from dspark.eplb.synthetic import drifting_loads


def new_pairs(old, new):
    """(GPU, expert) pairs of ``new`` that ``old`` lacks, counted the plain way."""
    return [
        sum(len(set(after) - set(before)) for before, after in zip(old.by_gpu[layer], new.by_gpu[layer]))
        for layer in range(old.num_layers)
    ]


@pytest.fixture(scope="module")
def drifted():
    loads = drifting_loads(2, 6, 64, 0.9, seed=4, tokens=50_000)
    return loads, plan(loads[0], 8, num_redundant=16)


def test_moves_are_counted(drifted):
    loads, live = drifted
    found = replan(loads[1], live)
    assert found.moved.tolist() == new_pairs(live, found.placement)
    assert (found.placement.balance(loads[1]) >= 0.98).all()
    assert (found.placement.num_duplicates == 0).all()
    assert 0 < found.moved.sum() < 0.15 * live.slots.size


def test_budgets_are_never_exceeded(drifted):
    loads, live = drifted
    before = live.gpu_load(loads[1]).max(1).sum()
    tops = []
    for budget in (0, 1, 2, 3, 5, 8, 13, 21, 34, 1000):
        found = replan(loads[1], live, max_moves=budget)
        assert found.moved.tolist() == new_pairs(live, found.placement) and found.moved.sum() <= budget
        tops.append(found.placement.gpu_load(loads[1]).max(1).sum())
    assert tops[0] == before and tops[4] < 0.995 * before and tops[-1] < tops[4]
    for size in (0, 99, 100, 250, 1000):
        assert replan(loads[1], live, max_bytes=size, expert_bytes=100).moved.sum() <= size // 100
    assert replan(loads[1], live, max_moves=4, max_bytes=250, expert_bytes=100).moved.sum() <= 2


def test_budgets_are_never_exceeded_on_random_maps():
    rng = np.random.default_rng(12)
    for _ in range(40):
        num_gpus, slots = int(rng.integers(2, 6)), int(rng.integers(2, 5))
        num_experts = int(rng.integers(slots, num_gpus * slots + 1))
        shape = Shape(num_experts, num_gpus * slots, num_gpus)
        rows = [
            rng.permutation([*range(num_experts), *rng.integers(0, num_experts, shape.num_redundant)]) for _ in range(3)
        ]
        live, budget = Placement(np.array(rows), shape), int(rng.integers(0, 6))
        load = np.exp(rng.normal(0, 1, (3, num_experts)))
        found = replan(load, live, max_moves=budget, target=1.0)
        assert sum(new_pairs(live, found.placement)) == found.moved.sum() <= budget
        assert (found.placement.balance(load) >= live.balance(load) - 1e-12).all()


def test_what_is_even_stays(drifted):
    loads, live = drifted
    found = replan(loads[0], live)
    assert found.moved.sum() == 0 and np.array_equal(found.placement.slots, live.slots)
    idle = replan(np.zeros_like(loads[0]), live)
    assert np.array_equal(idle.placement.slots, live.slots)


def test_groups_stay_on_their_nodes():
    loads = drifting_loads(2, 4, 32, 0.8, seed=1, tokens=20_000)
    live = plan(loads[0], 8, num_redundant=16, num_nodes=2, num_groups=4)
    found = replan(loads[1], live)
    found.placement.check_groups()
    assert (found.placement.balance(loads[1]) >= live.balance(loads[1])).all()


def test_refusals(drifted):
    loads, live = drifted
    with pytest.raises(ValueError, match=r"\[6, 32\] do not fit a map of \[6, 64\]"):
        replan(loads[1][:, :32], live)
    with pytest.raises(ValueError, match="max_moves is -1"):
        replan(loads[1], live, max_moves=-1)
    with pytest.raises(ValueError, match="500 bytes needs the size of an expert"):
        replan(loads[1], live, max_bytes=500)
    with pytest.raises(ValueError, match="not 0"):
        replan(loads[1], live, target=0)
    assert budget_of(None, None, None) is None and budget_of(7, 30, 10) == 3


@pytest.mark.parametrize(("drift", "most_moved"), [("slow", 0.045), ("mid", 0.09)])
def test_drift(shared_load, drift, most_moved):
    """Every window is re-planned from the live map and scored on the next, beside a full plan of every window."""
    windows = shared_load(f"v3_logn0.8_{drift}")
    full = [plan(load, 32, num_redundant=32) for load in windows[:-1]]
    live, moved, gaps = full[0], [], []
    for number in range(1, len(windows) - 1):
        found = replan(windows[number], live)
        live = found.placement
        moved.append(found.moved.sum() / live.slots.size)
        after = windows[number + 1]
        gaps.append(full[number].balance(after).mean() - live.balance(after).mean())
    assert np.mean(gaps) <= 0.006 and np.mean(moved) <= most_moved, (gaps, moved)
