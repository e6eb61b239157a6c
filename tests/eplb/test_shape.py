"""Every size that cannot work, and every load that means nothing, is refused with its numbers and a way out."""

import numpy as np
import pytest
from dspark.eplb.balance import plan, rebalance_experts
from dspark.eplb.shape import Shape, check_load


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((16, 12, 4), ["12 slots", "16 experts", "at least 16 slots", "0 redundant"]),
        ((16, 15, 5), ["15 slots", "16 experts", "at least 20 slots", "4 redundant"]),
        ((16, 18, 8), ["18 slots", "8 GPUs", "16 or 24 slots", "0 or 8 redundant"]),
        ((256, 256, 3), ["256 slots", "3 GPUs", "258 slots", "2 redundant"]),
        ((16, 16, 8, 3), ["8 GPUs", "3 nodes"]),
        ((16, 16, 8, 2, 5), ["16 experts", "5 groups"]),
        ((16, 24, 12, 3, 4), ["4 expert groups", "3 nodes", "num_groups=1"]),
        ((12, 12, 6, 2, 3), ["3 expert groups", "2 nodes", "num_groups=1"]),
        ((16, 16, 0), ["num_gpus is 0", "at least 1"]),
        ((16, 16, 8, 0), ["num_nodes is 0"]),
        ((16, 16, 8, 1, 0), ["num_groups is 0"]),
        ((16, 16, 8.0), ["num_gpus", "whole number", "8.0"]),
    ],
)
def test_sizes_are_named(sizes, words):
    with pytest.raises(ValueError) as caught:
        Shape(*sizes)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (np.ones(8), ["two axes", "[8]"]),
        (np.ones((0, 8)), ["0 layers"]),
        (np.array([[1.0, np.nan, 2, 3]]), ["layer 0, expert 1", "nan", "not a finite"]),
        (np.array([[1.0, 1, 1, 1], [1, 1, np.inf, 3]]), ["layer 1, expert 2", "inf"]),
        (np.array([[3, 1, -2, 3]]), ["layer 0, expert 2", "-2", "negative"]),
        (np.array([["a", "b"]]), ["real numbers"]),
        (np.ones((1, 4), complex), ["real numbers"]),
    ],
)
def test_loads_are_named(load, words):
    for call in (lambda: check_load(load), lambda: plan(load, 2), lambda: rebalance_experts(load, 4, 1, 1, 2)):
        with pytest.raises(ValueError) as caught:
            call()
        assert all(word in str(caught.value) for word in words), caught.value


def test_slots_that_nothing_can_use_are_counted():
    assert Shape(4, 16, 2).num_forced_copies == 8
    assert Shape(16, 32, 4, 2, 2).num_forced_copies == 0
    assert Shape(16, 80, 4, 2, 2).num_forced_copies == 4 * (20 - 8)
