"""Where every expert's copies lie: maps between slots and experts, and the loads of GPUs under a map.

Shapes: L layers, E experts, P slots, G GPUs, K = P / G slots of a GPU (contiguous), N nodes (GPUs contiguous).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .shape import Shape


@dataclass(frozen=True)
class Placement:
    """``slots`` [L, P] int32: the expert in every slot. Every expert has at least one slot in every layer.

    Raises ``ValueError`` naming the layer and slot of an expert that does not exist or is missing, and whatever
    ``Shape`` refuses.
    """

    slots: np.ndarray
    shape: Shape

    def __post_init__(self) -> None:
        slots, shape = np.asarray(self.slots), self.shape
        if slots.ndim != 2 or slots.shape[0] == 0 or slots.shape[1] != shape.num_slots:
            raise ValueError(f"a map must be [layers, {shape.num_slots} slots], not {list(slots.shape)}")
        if not np.issubdtype(slots.dtype, np.integer):
            raise ValueError(f"a map must hold whole numbers, not {slots.dtype}")
        bad = (slots < 0) | (slots >= shape.num_experts)
        if bad.any():
            layer, slot = np.argwhere(bad)[0]
            raise ValueError(
                f"layer {layer}, slot {slot} holds expert {slots[layer, slot]}, "
                f"but experts are 0..{shape.num_experts - 1}"
            )
        object.__setattr__(self, "slots", np.array(slots, np.int32))
        self.slots.setflags(write=False)
        missing = np.argwhere(self.counts == 0)
        if missing.size:
            raise ValueError(
                f"layer {missing[0][0]} has no slot for expert {missing[0][1]} ({len(missing)} experts without a slot)"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.slots)

    @cached_property
    def counts(self) -> np.ndarray:
        """Copies of each expert, [L, E] int64."""
        return count_copies(self.slots, self.shape.num_experts)

    @property
    def by_gpu(self) -> np.ndarray:
        """``slots`` as [L, G, K]."""
        return self.slots.reshape(self.num_layers, self.shape.num_gpus, -1)

    @property
    def num_duplicates(self) -> np.ndarray:
        """Slots that hold an expert which an earlier slot of the same GPU holds too, [L] int64."""
        ordered = np.sort(self.by_gpu, axis=2)
        return (ordered[:, :, 1:] == ordered[:, :, :-1]).sum((1, 2))

    def check_groups(self) -> None:
        """Raise ``ValueError`` naming an expert whose copies lie on several nodes though groups are pinned to nodes."""
        if not self.shape.hierarchical:
            return
        node = np.arange(self.shape.num_slots) // (self.shape.num_slots // self.shape.num_nodes)
        lives = np.zeros((self.num_layers, self.shape.num_nodes, self.shape.num_experts), bool)
        lives[np.arange(self.num_layers)[:, None], node, self.slots] = True
        groups = lives.reshape(self.num_layers, self.shape.num_nodes, self.shape.num_groups, -1).any(3)
        split = np.argwhere(groups.sum(1) > 1)
        if split.size:
            layer, group = split[0]
            nodes = np.flatnonzero(groups[layer, :, group]).tolist()
            raise ValueError(
                f"layer {layer} has experts of group {group} on nodes {nodes}; groups must stay on one node"
            )

    def experts_to_slots(self) -> np.ndarray:
        """Slots of every expert in rising order, [L, E, most copies] int64, padded with -1."""
        num_layers, num_experts = self.counts.shape
        order = np.argsort(self.slots, axis=1, kind="stable")
        experts = np.take_along_axis(self.slots, order, 1)
        starts = np.cumsum(self.counts, axis=1) - self.counts
        place = np.arange(self.shape.num_slots) - np.take_along_axis(starts, experts, 1)
        table = np.full((num_layers, num_experts, int(self.counts.max())), -1, np.int64)
        table[np.arange(num_layers)[:, None], experts, place] = order
        return table

    def gpu_load(self, load: np.ndarray) -> np.ndarray:
        """Load of every GPU, [L, G] float64, when ``load`` [L, E] is split evenly over an expert's copies."""
        load = np.asarray(load, np.float64)
        if load.shape != self.counts.shape:
            raise ValueError(
                f"loads of {list(load.shape)} [layers, experts] do not fit a map of {list(self.counts.shape)}"
            )
        return load_of_gpus(load, self.slots, self.counts, self.shape.num_gpus)

    def balance(self, load: np.ndarray) -> np.ndarray:
        """Mean load of a GPU over the largest, [L]; 1 where there is no load."""
        return balance_of(self.gpu_load(load))


def count_copies(slots: np.ndarray, num_experts: int) -> np.ndarray:
    """Copies of each expert, [L, E] int64, in ``slots`` [L, P]."""
    rows = np.arange(len(slots))[:, None] * num_experts
    counts = np.bincount((rows + slots).ravel(), minlength=len(slots) * num_experts)
    return counts.reshape(len(slots), num_experts)


def load_of_gpus(load: np.ndarray, slots: np.ndarray, counts: np.ndarray, num_gpus: int) -> np.ndarray:
    """Load of every GPU, [L, G] float64, for ``load`` [L, E] split evenly over the ``counts`` [L, E] copies."""
    return np.take_along_axis(load / counts, slots, 1).reshape(len(slots), num_gpus, -1).sum(2)


def balance_of(gpu_load: np.ndarray) -> np.ndarray:
    """Mean over largest along the last axis; 1 where the largest is 0."""
    largest = gpu_load.max(-1)
    return np.divide(gpu_load.mean(-1), largest, out=np.ones(largest.shape), where=largest > 0)


def trivial_slots(num_layers: int, shape: Shape) -> np.ndarray:
    """Experts in order over the slots, starting anew when they run out, [L, P] int32; groups stay on their nodes."""
    nodes = shape.num_nodes if shape.hierarchical else 1
    experts = shape.num_experts // nodes
    slots = np.arange(shape.num_slots // nodes, dtype=np.int32)
    if shape.num_forced_copies:
        # More slots on a GPU than experts in reach: every GPU holds them all, so nothing is ever out of balance.
        slots = slots % shape.slots_per_gpu
    row = (slots % experts + np.arange(nodes, dtype=np.int32)[:, None] * experts).ravel()
    return np.tile(row, (num_layers, 1))
