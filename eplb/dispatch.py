"""Which copy of an expert a token goes to: split evenly, to the nearest copy, or weighted so that GPUs fill evenly.

A weighted split is made for one batch, from the counts of tokens that each expert gets in it, agreed beforehand (summed
over the ranks). It is whole-number arithmetic on those counts alone, so every rank that has the counts makes the same
choice, on any machine. The tokens of an expert are then numbered through all ranks in rank order, and each copy takes
one run of numbers; copies and ranks are in the same order, so many tokens stay near.

Splitting so that the fullest GPU is as light as it can be is a linear program. Its optimum is also reached by making
the sum of squared loads least, and that by evening out one expert's copies after the other until nothing moves.

Shapes: E experts, P slots, G GPUs, T tokens (rows of one rank that go to one expert each), C most copies.
"""

from __future__ import annotations

import numpy as np

from .cores import load_core
from .placement import Placement


class ReplicaSplit:
    """One layer of a placement, prepared for splitting batch after batch; ``core`` as in ``plan``, same splits."""

    def __init__(self, placement: Placement, layer: int, core: str = "plain") -> None:
        shape = placement.shape
        self.num_gpus, self.num_nodes = shape.num_gpus, shape.num_nodes
        self.slots_per_gpu = shape.slots_per_gpu
        self.counts = placement.counts[layer]
        self.copies = placement.experts_to_slots()[layer, :, : int(self.counts.max())]
        hosts = self.copies // self.slots_per_gpu
        several = np.flatnonzero(self.counts > 1)
        self._level_out = load_core(core).level_out(
            [(self.copies[e, : self.counts[e]].tolist(), hosts[e, : self.counts[e]].tolist()) for e in several]
        )

    def even(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens of every slot, [P] int64, when each expert's ``tokens`` [E] are split evenly over its copies.

        What is left over goes to copies in turn, beginning at one that depends on the expert, so no slot gains.
        """
        tokens = _whole(tokens, len(self.counts))
        place = np.arange(self.copies.shape[1])
        turn = (place + np.arange(len(tokens))[:, None]) % self.counts[:, None]
        each, left = np.divmod(tokens, self.counts)
        quota = each[:, None] + (turn < left[:, None])
        return self._to_slots(quota)

    def weighted(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens of every slot, [P] int64, for ``tokens`` [E] of a batch; the fullest GPU is nearly least full."""
        quota = self.even(tokens)
        return self._level_out(quota, self.gpu_load(quota))

    def _to_slots(self, quota: np.ndarray) -> np.ndarray:
        slots = np.zeros(self.num_gpus * self.slots_per_gpu, np.int64)
        real = self.copies >= 0
        slots[self.copies[real]] = quota[real]
        return slots

    def gpu_load(self, quota: np.ndarray) -> np.ndarray:
        """Tokens of every GPU, [G], under the ``quota`` [P] of its slots."""
        return quota.reshape(self.num_gpus, -1).sum(1)

    def assign(self, experts: np.ndarray, before: np.ndarray, quota: np.ndarray) -> np.ndarray:
        """Slots, [T] int64, for one rank's rows that go to ``experts`` [T].

        ``before`` [E] counts the rows of each expert on the ranks before this one (zeros where all ranks hold the same
        rows), ``quota`` [P] is from :meth:`even` or :meth:`weighted`.
        """
        experts = np.asarray(experts)
        order = np.argsort(experts, kind="stable")
        here = np.bincount(experts, minlength=len(self.counts))
        number = np.empty(len(experts), np.int64)
        number[order] = np.arange(len(experts)) - np.repeat(np.cumsum(here) - here, here)
        number += before[experts]
        until = np.where(self.copies >= 0, quota[self.copies], 0).cumsum(1)
        over = np.flatnonzero(number >= until[experts, -1])
        if over.size:
            e = int(experts[over[0]])
            raise ValueError(
                f"row {int(number[over[0]])} of expert {e} is beyond its quota of {int(until[e, -1])}: the counts that "
                "the split was made from are not this batch's"
            )
        return self.copies[experts, (number[:, None] >= until[experts]).sum(1)]

    def nearest(self) -> np.ndarray:
        """The slot that GPU g sends its tokens for expert e to, [G, E] int64: its own, else its node's, else any.

        Where several are equally near, GPUs take them in turn.
        """
        gpu = np.arange(self.num_gpus)[:, None, None]
        real = self.copies >= 0
        hosts = self.copies // self.slots_per_gpu
        per_node = self.num_gpus // self.num_nodes
        distance = np.where(hosts == gpu, 0, np.where(hosts // per_node == gpu // per_node, 1, 2))
        distance = np.where(real, distance, 3)
        near = distance == distance.min(2, keepdims=True)
        turn = (gpu[:, :, 0] + np.arange(len(self.counts))) % near.sum(2)
        chosen = (near.cumsum(2) <= turn[:, :, None]).sum(2)
        return np.take_along_axis(np.broadcast_to(self.copies, near.shape), chosen[:, :, None], 2)[:, :, 0]

    def nearest_quota(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens of every slot, [P] float64, when ``tokens`` [E] come evenly from all GPUs to the nearest copies."""
        share = np.broadcast_to(np.asarray(tokens, np.float64) / self.num_gpus, (self.num_gpus, len(self.counts)))
        return np.bincount(self.nearest().ravel(), share.ravel(), self.num_gpus * self.slots_per_gpu)


def _whole(tokens: np.ndarray, num_experts: int) -> np.ndarray:
    tokens = np.asarray(tokens)
    if tokens.shape != (num_experts,):
        raise ValueError(f"token counts of shape {list(tokens.shape)} do not fit {num_experts} experts")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"token counts must be whole numbers, not {tokens.dtype}: ranks must agree on them exactly")
    if (tokens < 0).any():
        raise ValueError(f"expert {int((tokens < 0).argmax())} has {int(tokens.min())} tokens")
    return tokens.astype(np.int64)
