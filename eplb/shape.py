"""Sizes of a placement problem and the checks that name what is wrong with them. Pure integers and one load check."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shape:
    """One layer's experts and the slots that hold them.

    ``num_slots`` slots lie on ``num_gpus`` GPUs, contiguous per GPU; GPUs are contiguous per node. With ``num_groups``
    above 1, experts ``g * E / num_groups ...`` form group ``g`` and every group lives on one node.

    Raises ``ValueError`` naming the numbers and the way out when the sizes cannot work.
    """

    num_experts: int
    num_slots: int
    num_gpus: int
    num_nodes: int = 1
    num_groups: int = 1

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_slots", "num_gpus", "num_nodes", "num_groups"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or isinstance(value, bool):
                raise ValueError(f"{name} must be a whole number, not {value!r}")
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
            object.__setattr__(self, name, int(value))
        self._check_slots()
        self._check_nodes()

    def _check_slots(self) -> None:
        experts, slots, gpus = self.num_experts, self.num_slots, self.num_gpus
        enough = -(-experts // gpus) * gpus
        if slots < experts:
            raise ValueError(
                f"{slots} slots cannot hold {experts} experts: every expert needs one; "
                f"use at least {enough} slots ({enough - experts} redundant)"
            )
        if slots % gpus:
            lower, upper = slots // gpus * gpus, -(-slots // gpus) * gpus
            choices = f"{lower} or {upper}" if lower >= experts else f"{upper}"
            raise ValueError(
                f"{slots} slots do not divide over {gpus} GPUs; use {choices} slots "
                f"({' or '.join(str(int(n) - experts) for n in choices.split(' or '))} redundant)"
            )

    def _check_nodes(self) -> None:
        if self.num_gpus % self.num_nodes:
            raise ValueError(f"{self.num_gpus} GPUs do not divide over {self.num_nodes} nodes")
        if self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_experts} experts do not divide into {self.num_groups} groups")
        if self.num_groups > 1 and self.num_groups % self.num_nodes:
            raise ValueError(
                f"{self.num_groups} expert groups do not divide over {self.num_nodes} nodes, so no group could stay "
                f"on one node; use a number of nodes that divides {self.num_groups}, or num_groups=1 to place globally"
            )

    @property
    def slots_per_gpu(self) -> int:
        """Slots of one GPU."""
        return self.num_slots // self.num_gpus

    @property
    def num_redundant(self) -> int:
        """Slots beyond one per expert."""
        return self.num_slots - self.num_experts

    @property
    def gpus_per_node(self) -> int:
        """GPUs of one node."""
        return self.num_gpus // self.num_nodes

    @property
    def hierarchical(self) -> bool:
        """Whether groups are pinned to nodes; with one node or one group that would restrict nothing."""
        return self.num_groups > 1 and self.num_nodes > 1

    @property
    def num_forced_copies(self) -> int:
        """Slots that no placement can use: copies beyond one per (expert, GPU)."""
        experts_in_reach = self.num_experts // self.num_nodes if self.hierarchical else self.num_experts
        return self.num_gpus * max(0, self.slots_per_gpu - experts_in_reach)

    def node_shape(self) -> Shape:
        """One node's part of a hierarchical problem, as a flat problem of its own."""
        nodes = self.num_nodes
        return Shape(self.num_experts // nodes, self.num_slots // nodes, self.num_gpus // nodes)


def check_load(load: np.ndarray, what: str = "load") -> np.ndarray:
    """``load`` [layers, experts] as float64; ``ValueError`` naming the first bad entry.

    Loads must be finite and not negative, with at least one layer and one expert.
    """
    load = np.asarray(load)
    if load.ndim != 2:
        raise ValueError(f"{what} must have two axes, [layers, experts], not shape {list(load.shape)}")
    if load.shape[0] == 0 or load.shape[1] == 0:
        raise ValueError(f"{what} has {load.shape[0]} layers and {load.shape[1]} experts; both must be at least 1")
    if not (np.issubdtype(load.dtype, np.number) and not np.issubdtype(load.dtype, np.complexfloating)):
        raise ValueError(f"{what} must hold real numbers, not {load.dtype}")
    load = load.astype(np.float64)
    for bad, word in ((~np.isfinite(load), "not a finite number"), (load < 0, "negative")):
        if bad.any():
            layer, expert = np.argwhere(bad)[0]
            raise ValueError(
                f"{what} of layer {layer}, expert {expert} is {load[layer, expert]}: {word} "
                f"({int(bad.sum())} such entries); drop that window or fix the recorder"
            )
    return load
