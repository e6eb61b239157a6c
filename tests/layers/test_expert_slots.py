"""Copies of experts: picks spread evenly over them, agreed on by ranks with the same rows, and counted."""

import pytest
import torch
from dspark.layers.expert_slots import ExpertSlots
from dspark.layers.kernels.moe import Routing
from dspark.parallel.groups import Group

CPU = torch.device("cpu")
SLOTS = (0, 1, 2, 3, 1, 0, 1, 3)  # expert 0 twice, 1 three times, 2 once, 3 twice


def slots_of(turn=0, counts=True):
    return ExpertSlots(SLOTS, 4, turn, counts, CPU, Group.alone("moe_block", 0))


def routing(num_rows, seed=0, num_experts=4):
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, :2]
    return Routing(experts, torch.rand(num_rows, 2, generator=generator))


def test_every_pick_goes_to_a_copy_of_its_expert_and_copies_get_alike():
    for seed in range(5):
        given = routing(37, seed)
        chosen = slots_of(turn=seed).choose(given)
        assert torch.equal(torch.tensor(SLOTS)[chosen.experts], given.experts)
        assert torch.equal(chosen.weights, given.weights)
        picks = torch.bincount(chosen.experts.flatten(), minlength=8)
        for expert in range(4):
            mine = picks[torch.tensor(SLOTS) == expert]
            assert mine.max() - mine.min() <= 1


def test_rows_without_experts_and_no_rows():
    given = Routing(torch.tensor([[0, -1], [-1, -1], [1, 0]]), torch.ones(3, 2))
    slots = slots_of()
    slots.count_picks()
    chosen = slots.choose(given).experts
    assert (chosen[:, 1] == -1).tolist() == [True, True, False] and chosen[1, 0] == -1
    assert slots.take_picks().sum() == 3
    empty = Routing(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2))
    assert slots.choose(empty).experts.shape == (0, 2)
    assert slots.take_picks().tolist() == [0] * 8


def test_turns_differ_so_that_ranks_do_not_all_begin_at_the_first_copy():
    given = Routing(torch.ones(1, 1, dtype=torch.int64), torch.ones(1, 1))
    chosen = [int(slots_of(turn=turn).choose(given).experts) for turn in range(3)]
    assert sorted(chosen) == [1, 4, 6]


@pytest.mark.parametrize("counts", [True, False])
def test_counts_since_the_last_call(counts):
    slots = slots_of(counts=counts)
    slots.choose(routing(20))
    slots.count_picks()
    for _ in range(2):
        chosen = slots.choose(routing(20)).experts
    picks = slots.take_picks()
    assert picks.tolist() == (2 * torch.bincount(chosen.flatten(), minlength=8)).tolist() if counts else [0] * 8
    slots.set((3, 2, 1, 0, 0, 1, 2, 3))
    assert slots.take_picks().sum() == 0
    chosen = slots.choose(routing(20)).experts
    assert torch.equal(torch.tensor(slots.slots)[chosen], routing(20).experts)
