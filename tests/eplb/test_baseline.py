"""The published greedy, against the placements and balances that its authors' code gives."""

import pathlib

import numpy as np
import pytest
from dspark.eplb.baseline import greedy_plan
from dspark.eplb.cores import load_core
from dspark.eplb.placement import Placement
from dspark.eplb.shape import Shape

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "eplb"


def readme():
    return np.load(DATA / "readme2x12.npz")["load"][0]


def test_the_example_of_its_readme():
    shape = Shape(12, 16, 8, num_nodes=2, num_groups=4)
    slots = greedy_plan(readme(), shape)
    assert slots[0].tolist() == [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1]
    assert Placement(slots, shape).gpu_load(readme())[0].max() == 156
    assert np.round(Placement(slots, shape).balance(readme()), 4).tolist() == [0.8277, 0.8050]


def test_the_same_without_groups():
    shape = Shape(12, 16, 8)
    assert np.round(Placement(greedy_plan(readme(), shape), shape).balance(readme()), 4).tolist() == [0.9323, 0.8401]


@pytest.mark.parametrize(
    ("num_gpus", "redundant", "mean", "worst"),
    [
        (8, 0, 0.9969, 0.9868),
        (8, 16, 0.9992, 0.9983),
        (32, 0, 0.9032, 0.5911),
        (32, 32, 0.9934, 0.9897),
        (72, 32, 0.9773, 0.9630),
        (72, 104, 0.9753, 0.9591),
        (144, 176, 0.9360, 0.9161),
        (320, 64, 0.5507, 0.5177),
        (320, 384, 0.9513, 0.9365),
    ],
)
def test_balances_of_a_whole_model(num_gpus, redundant, mean, worst):
    load = np.load(DATA / "v3_logn0.8.npz")["load"][0]
    shape = Shape(256, 256 + redundant, num_gpus)
    balance = Placement(greedy_plan(load, shape), shape).balance(load)
    assert (round(balance.mean(), 4), round(balance.min(), 4)) == (mean, worst)


def test_groups_of_a_whole_model():
    load = np.load(DATA / "v3_logn0.8.npz")["load"][0]
    shape = Shape(256, 288, 32, num_nodes=4, num_groups=8)
    balance = Placement(greedy_plan(load, shape), shape).balance(load)
    assert (round(balance.mean(), 4), round(balance.min(), 4)) == (0.9494, 0.8188)


def test_all_zero_loads_pile_up_on_the_first_expert():
    counts = Placement(greedy_plan(np.zeros((1, 16)), Shape(16, 24, 8)), Shape(16, 24, 8)).counts
    assert counts[0, 0] == 9


def test_compiled_is_the_same():
    pytest.importorskip("numba")
    rng = np.random.default_rng(3)
    for _ in range(60):
        num_gpus, room = rng.integers(1, 12, 2)
        num_experts = int(rng.integers(1, num_gpus * room + 1))
        load = rng.integers(0, rng.choice([3, 1000]), (3, num_experts)).astype(np.float32)
        shape = Shape(num_experts, int(num_gpus * room), int(num_gpus))
        plain, compiled = (greedy_plan(load, shape, load_core(name).flat_greedy) for name in ("plain", "compiled"))
        assert np.array_equal(plain, compiled), shape
