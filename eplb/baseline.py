"""The greedy balancer published with DeepSeek-V3, written anew from its description: what every plan is held against.

Replicas: every spare slot goes to the expert whose copies are the most loaded at that moment. Packing: heaviest first,
each onto the lightest GPU that still has room. With expert groups: groups are packed onto nodes by the same rule, then
each node is replicated and packed alone. Ties go to the lowest index; arithmetic is float32, as published. It may put
two copies of an expert on one GPU. Used as the baseline of benchmarks, and no plan may be worse on any layer.

Shapes: L layers, E experts, P slots, G GPUs, K slots of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .shape import Shape

FlatGreedy = Callable[[np.ndarray, int, int], np.ndarray]

_FULL = np.float32(np.inf)


def greedy_plan(load: np.ndarray, shape: Shape, flat: FlatGreedy | None = None) -> np.ndarray:
    """Slots to experts, [L, P] int32, for ``load`` [L, E]; ``flat`` is a faster ``flat_greedy``."""
    flat = flat or flat_greedy
    load = np.asarray(load, np.float32)
    if not shape.hierarchical:
        return flat(load, shape.num_slots, shape.num_gpus)
    num_layers, num_nodes = load.shape[0], shape.num_nodes
    per_group = shape.num_experts // shape.num_groups
    groups = pack_greedy(load.reshape(num_layers, shape.num_groups, per_group).sum(-1), num_nodes)
    experts = (groups[..., None] * per_group + np.arange(per_group, dtype=np.int32)).reshape(num_layers * num_nodes, -1)
    layers = np.repeat(np.arange(num_layers), num_nodes)[:, None]
    local = flat(load[layers, experts], shape.num_slots // num_nodes, shape.gpus_per_node)
    return np.take_along_axis(experts, local, 1).reshape(num_layers, shape.num_slots)


def flat_greedy(load: np.ndarray, num_slots: int, num_gpus: int) -> np.ndarray:
    """Slots to experts, [B, P] int32, without groups, for ``load`` [B, E] float32."""
    copies = replicate_greedy(load, num_slots)
    count = np.zeros(load.shape, np.int64)
    np.add.at(count, (np.arange(len(load))[:, None], copies), 1)
    pieces = np.take_along_axis((load / count.astype(np.float32)), copies, 1)
    return np.take_along_axis(copies, pack_greedy(pieces, num_gpus).reshape(copies.shape), 1)


def replicate_greedy(load: np.ndarray, num_slots: int) -> np.ndarray:
    """Experts of the slots before packing, [L, P] int32: first 0..E-1, then the spare copies in the order given."""
    num_layers, num_experts = load.shape
    rows = np.arange(num_layers)
    count = np.ones((num_layers, num_experts), np.float32)
    priority = load.copy()
    copies = np.empty((num_layers, num_slots), np.int32)
    copies[:, :num_experts] = np.arange(num_experts)
    for slot in range(num_experts, num_slots):
        hottest = priority.argmax(1)
        copies[:, slot] = hottest
        count[rows, hottest] += 1
        priority[rows, hottest] = load[rows, hottest] / count[rows, hottest]
    return copies


def pack_greedy(weight: np.ndarray, num_packs: int) -> np.ndarray:
    """Items of each pack, [L, packs, items a pack] int32, from ``weight`` [L, items] float32."""
    num_layers, num_items = weight.shape
    room = num_items // num_packs
    order = np.argsort(-weight, axis=1, kind="stable")
    ordered = np.take_along_axis(weight, order, 1)
    rows = np.arange(num_layers) * num_packs
    total = np.zeros((num_layers, num_packs), np.float32)
    filled = np.zeros(num_layers * num_packs, np.int64)
    packs = np.empty((num_items, num_layers), np.int64)
    first = 0
    if room > 1 and (ordered[:, :num_packs] > 0).all():
        # While packs are empty, each item goes to the next one.
        first = num_packs
        packs[:first] = np.arange(first)[:, None] + rows
        total[:] = ordered[:, :first]
        filled[:] = 1
    for item in range(first, num_items):
        # Full packs carry an infinite load here; nothing adds to them again.
        pack = packs[item] = total.argmin(1) + rows
        filled[pack] += 1
        total.ravel()[pack] = np.where(filled[pack] == room, _FULL, total.ravel()[pack] + ordered[:, item])
    by_pack = np.argsort(packs.T, axis=1, kind="stable")
    return np.take_along_axis(order, by_pack, 1).astype(np.int32).reshape(num_layers, num_packs, room)
