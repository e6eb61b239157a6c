"""From one map to the next: what moves, from where, in which batches, at what cost."""

import numpy as np
import pytest
from dspark.eplb.balance import plan
from dspark.eplb.moves import (
    Links,
    Transfer,
    batches,
    break_even_steps,
    cost,
    difference,
    keep_slots,
    transfers,
)
from dspark.eplb.placement import Placement
from dspark.eplb.shape import Shape
from dspark.eplb.synthetic import drifting_loads


def placement(row, num_experts, num_gpus=4, num_nodes=2):
    return Placement(np.array([row]), Shape(num_experts, len(row), num_gpus, num_nodes))


def test_copies_come_from_the_own_node_where_it_has_one():
    """Counted elsewhere by running another engine's exchange: 3 transfers, none across nodes."""
    old, new = placement([0, 1, 2, 3, 4, 5, 0, 1], 6), placement([0, 2, 2, 3, 4, 0, 1, 5], 6)
    moves = transfers(old, new)
    assert len(moves) == 3 and not any(move.crosses_node for move in moves)
    assert {(move.expert, move.source_gpu, move.target_gpu) for move in moves} == {(2, 1, 0), (0, 3, 2), (5, 2, 3)}


def test_swapping_two_nodes_moves_everything_across():
    old, new = placement([0, 1, 2, 3, 4, 5, 6, 7], 8), placement([4, 5, 6, 7, 0, 1, 2, 3], 8)
    moves = transfers(old, new)
    assert len(moves) == 8 and all(move.crosses_node for move in moves)


def test_reordering_within_a_gpu_moves_nothing():
    old, new = placement([0, 1, 2, 3, 4, 5, 6, 7], 8), placement([1, 0, 3, 2, 4, 5, 7, 6], 8)
    found = difference(old, new)
    assert (found.changed_slots[0], found.moved[0]) == (6, 0)
    assert transfers(old, new) == [] and np.array_equal(keep_slots(old, new).slots, old.slots)


def test_a_second_copy_on_the_same_gpu_is_no_transfer():
    old, new = placement([0, 1, 2, 3, 0, 1, 2, 3], 4), placement([0, 0, 2, 3, 1, 1, 2, 3], 4)
    assert transfers(old, new) == []


@pytest.fixture(scope="module")
def maps():
    loads = drifting_loads(2, 5, 48, 0.5, seed=8, tokens=20_000)
    return tuple(plan(load, 8, num_redundant=16, num_nodes=2) for load in loads)


def test_transfers_turn_the_old_weights_into_the_new(maps):
    old, new = maps
    kept = keep_slots(old, new)
    assert np.array_equal(np.sort(kept.by_gpu, 2), np.sort(new.by_gpu, 2)), "the same experts on every GPU"
    weights = old.slots.copy()
    moves = transfers(old, new)
    for move in moves:
        assert old.slots[move.layer, move.source_slot] == move.expert
        assert move.source_gpu == move.source_slot // 8 != move.target_gpu == move.target_slot // 8
        assert move.crosses_node == (move.source_gpu // 4 != move.target_gpu // 4)
        weights[move.layer, move.target_slot] = move.expert
    assert np.array_equal(weights, kept.slots)
    wanted = [
        len(set(after) - set(before))
        for layer in range(5)
        for before, after in zip(old.by_gpu[layer], new.by_gpu[layer])
    ]
    assert len(moves) == sum(wanted)
    for move in moves:
        homes = np.flatnonzero(old.slots[move.layer] == move.expert) // 8
        assert move.crosses_node == all(home // 4 != move.target_gpu // 4 for home in homes)


def test_batches_are_bounded_and_keep_layers_apart(maps):
    moves = transfers(*maps)
    for per_gpu, most in ((1, None), (2, 5), (3, None)):
        plan_ = batches(moves, per_gpu, most)
        assert sorted(move for batch in plan_ for move in batch) == sorted(moves)
        layers = [batch[0].layer for batch in plan_]
        assert layers == sorted(layers)
        for batch in plan_:
            assert len({move.layer for move in batch}) == 1 and (most is None or len(batch) <= most)
            for end in ("source_gpu", "target_gpu"):
                assert np.bincount([getattr(move, end) for move in batch]).max() <= per_gpu
        for layer in set(layers):
            kinds = [[move.crosses_node for move in batch] for batch in plan_ if batch[0].layer == layer]
            assert all(kind == sorted(kind) for kind in kinds), "within a node first"
    with pytest.raises(ValueError, match="most_per_gpu is 0"):
        batches(moves, 0)


def test_cost_by_hand():
    moves = [
        [Transfer(0, 1, 0, 4, 0, 1, False), Transfer(0, 2, 1, 5, 0, 1, False)],
        [Transfer(0, 3, 2, 9, 1, 2, True)],
        [Transfer(1, 3, 2, 9, 1, 2, True)],
    ]
    found = cost(moves, 100, Links(within_node=1000, across_nodes=100, batch_latency=0.5))
    assert found == (4, 200, 200, 3, 200, pytest.approx(0.2 + 1 + 1 + 1.5))
    with pytest.raises(ValueError, match="across_nodes is 0"):
        Links(1.0, 0.0)


def test_break_even():
    assert break_even_steps(100, 90, seconds=3, step_seconds=0.2) == pytest.approx(3 / (0.2 * 0.1))
    assert break_even_steps(100, 100, 3, 0.2) == float("inf") == break_even_steps(90, 100, 3, 0.2)


def test_maps_of_different_deployments():
    old = placement([0, 1, 2, 3], 4, 2)
    with pytest.raises(ValueError, match="first map has 2 GPUs, the second 4"):
        difference(old, placement([0, 1, 2, 3], 4, 4))
    with pytest.raises(ValueError, match="first map has 4 slots, the second 8"):
        transfers(old, placement([0, 1, 2, 3, 0, 1, 2, 3], 4, 2))
