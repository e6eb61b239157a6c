"""Bounds hold for every placement, name what is in the way, and say how much redundancy is needed."""

import numpy as np
import pytest
from dspark.eplb.balance import plan
from dspark.eplb.baseline import greedy_plan
from dspark.eplb.bounds import smallest_redundancy, upper_bounds
from dspark.eplb.placement import Placement
from dspark.eplb.shape import Shape


def best_of(load, shape):
    return np.array([bound.balance for bound in upper_bounds(load, shape)])


def test_no_placement_beats_a_bound():
    rng = np.random.default_rng(5)
    for case in range(150):
        num_gpus, slots = int(rng.integers(2, 12)), int(rng.integers(1, 6))
        num_experts = int(rng.integers(slots, num_gpus * slots + 1))
        load = np.exp(rng.normal(0, rng.choice([0.3, 1.0, 2.0]), (2, num_experts)))
        placement = plan(load, num_gpus, num_redundant=num_gpus * slots - num_experts)
        best = best_of(load, placement.shape)
        greedy = Placement(greedy_plan(load, placement.shape), placement.shape)
        assert (placement.balance(load) <= best + 1e-9).all(), case
        # The greedy may put two copies on a GPU, which only an uneven split could use; it is below the bound as well
        # wherever it does not.
        clean = greedy.num_duplicates == 0
        assert (greedy.balance(load) <= best + 1e-9)[clean].all(), case


def test_groups_bound_too():
    rng = np.random.default_rng(6)
    for case in range(40):
        load = np.exp(rng.normal(0, 1, (2, 24)))
        placement = plan(load, 8, num_redundant=8, num_nodes=2, num_groups=4)
        assert (placement.balance(load) <= best_of(load, placement.shape) + 1e-9).all(), case


def test_one_expert_too_hot():
    load = np.ones((1, 8))
    load[0, 3] = 14
    (bound,) = upper_bounds(load, Shape(8, 8, 4))
    assert (bound.reason, bound.expert) == ("hot expert", 3)
    assert "2.67 times" in bound.detail and "1 copy" in bound.detail
    # Alone it makes 14 of a mean of 21 / 4; a second slot must hold one more.
    assert bound.balance == pytest.approx(21 / 4 / 15, rel=0.05) and bound.balance >= 21 / 4 / 15


def test_too_few_slots():
    (bound,) = upper_bounds(np.array([[10.0, 10, 1, 1]]), Shape(4, 5, 5))
    assert bound.reason == "slots" and "1 redundant slots" in bound.detail
    assert bound.balance == pytest.approx(22 / 5 / 10)


def test_a_copy_on_every_gpu_is_the_end():
    (bound,) = upper_bounds(np.array([[100.0, 0]]), Shape(2, 4, 2))
    assert bound.balance == 1, "two copies of each are even"


def test_groups_are_named():
    load = np.ones((1, 8))
    load[0, :2] = 10
    (bound,) = upper_bounds(load, Shape(8, 8, 4, 2, 4))
    assert bound.reason == "groups" and "2 nodes" in bound.detail
    # One node must hold the group of 20 and one of 2, of 26 in all.
    assert bound.balance == pytest.approx(13 / 22)


@pytest.mark.parametrize(
    ("num_gpus", "redundant", "reached"),
    [(320, 64, 1e-9), (32, 0, 0.007), (8, 0, 1e-3)],
)
def test_bounds_are_close_where_plans_are_stuck(model_load, num_gpus, redundant, reached):
    placement = plan(model_load, num_gpus, num_redundant=redundant)
    best, balance = best_of(model_load, placement.shape), placement.balance(model_load)
    stuck = balance < 0.99
    assert (best - balance)[stuck].max(initial=0) <= reached


def test_why_zipf_loads_stop_short(shared_load):
    load = shared_load("v3_zipf1.2_none")[0][:10]
    bounds = upper_bounds(load, Shape(256, 288, 72))
    assert {bound.reason for bound in bounds} == {"company"}
    assert max(bound.balance for bound in bounds) < 0.95


def test_smallest_redundancy(model_load):
    load = model_load[:8]
    needed = smallest_redundancy(load, Shape(256, 320, 320), 0.95)
    assert needed.found == needed.proven == 384 and needed.best >= 0.95
    assert smallest_redundancy(load, Shape(256, 256, 32), 0.95).found == 32
    nothing = smallest_redundancy(load, Shape(256, 256, 32, 4, 8), 0.999, most_slots_per_gpu=2)
    assert nothing.found is None and nothing.proven is None
    with pytest.raises(ValueError, match="not 1.5"):
        smallest_redundancy(load, Shape(256, 256, 32), 1.5)
