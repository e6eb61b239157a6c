"""Weights on the move: every slot of the new map holds its expert bit by bit, and no byte more travels than planned."""

import numpy as np
import pytest
import torch
from dspark.eplb.balance import plan
from dspark.eplb.migrate import fetch
from dspark.eplb.moves import Links, batches, cost, keep_slots, transfers
from dspark.eplb.placement import Placement
from dspark.eplb.shape import Shape
from dspark.parallel.groups import Group

LAYERS, EXPERTS, GPUS = 3, 12, 4


def expert(layer, number, dtype):
    """The two weights of an expert, which no other has."""
    generator = torch.Generator().manual_seed(1000 * layer + number)
    bits = torch.randint(0, 250, (5, 8), generator=generator, dtype=torch.uint8)
    return bits.view(dtype), torch.full((3,), 100.0 * layer + number)


def weights_of(layer, row, dtype):
    """A layer's tensors for the slots ``row`` of one rank."""
    pairs = [expert(layer, int(number), dtype) for number in row]
    return [torch.stack([pair[part] for pair in pairs]) for part in (0, 1)]


def same(x, y):
    """Bit by bit."""
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def migrate(rank, world, old, new, nodes, dtype, most):
    remote = tuple(peer for peer in range(world) if peer // (world // nodes) != rank // (world // nodes))
    group = Group("moe_ep", tuple(range(world)), rank, torch.distributed.group.WORLD, remote)
    shape = Shape(EXPERTS, old.shape[1], world, nodes)
    old, new = Placement(old, shape), Placement(new, shape)
    new, moves = keep_slots(old, new), transfers(old, new)
    for layer in range(LAYERS):
        weights = weights_of(layer, old.by_gpu[layer, rank], dtype)
        before = [weight.clone() for weight in weights]
        own = [move for move in moves if move.layer == layer]
        arrivals = fetch(own, old.slots[layer], new.slots[layer], weights, group, most)
        assert all(same(x, y) for x, y in zip(weights, before)), "the old map is still in use"
        arrivals.put(weights)
        for weight, wanted in zip(weights, weights_of(layer, new.by_gpu[layer, rank], dtype)):
            assert same(weight, wanted), layer
    sent = group.traffic["send"]
    return sent.sent_bytes, sent.cross_node_bytes


def random_maps(seed, slots):
    rng = np.random.default_rng(seed)
    return [
        np.stack(
            [rng.permutation([*range(EXPERTS), *rng.integers(0, EXPERTS, slots - EXPERTS)]) for _ in range(LAYERS)]
        )
        for _ in range(2)
    ]


@pytest.mark.parametrize(
    ("seed", "slots", "nodes", "most"), [(1, 12, 1, 2), (2, 16, 2, 1), (3, 20, 4, 3), (4, 24, 2, 2)]
)
def test_any_map_to_any_other(run_ranks, seed, slots, nodes, most):
    dtype = torch.uint8 if seed % 2 else torch.float16
    old, new = random_maps(seed, slots)
    sent = run_ranks(migrate, GPUS, old, new, nodes, dtype, most)
    shape = Shape(EXPERTS, slots, GPUS, nodes)
    planned = batches(transfers(Placement(old, shape), Placement(new, shape)), most)
    wanted = cost(planned, 5 * 8 + 3 * 4, Links(1.0, 1.0))
    assert sum(one for one, _ in sent) == wanted.bytes_within_node + wanted.bytes_across_nodes > 0
    assert sum(across for _, across in sent) == wanted.bytes_across_nodes


def test_from_order_to_a_plan(run_ranks):
    load = np.exp(np.random.default_rng(5).normal(0, 1, (LAYERS, EXPERTS)))
    new = plan(load, GPUS, num_redundant=4)
    old = np.tile([*range(EXPERTS), *range(4)], (LAYERS, 1))
    assert sum(one for one, _ in run_ranks(migrate, GPUS, old, new.slots, 1, torch.uint8, 2)) > 0
