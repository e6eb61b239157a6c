"""The rows of one verify step: ragged blocks of several requests, packed without gaps.

Shapes: R requests, γ drafts a block, ℓ_r <= γ drafts of request r that are verified, T = Σ (1 + ℓ_r) rows.
Row (r, k) holds x_k of request r (k = 0 is the anchor, the last emitted token) and its logits predict x_{k+1}. Where
drafts are trees, row (r, k) holds node k and its logits predict the nodes that follow it; γ is the longest path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...layers.attention.plan import to_device
from .tree import DraftTree


@dataclass(frozen=True)
class PackedRows:
    """Where the rows of each request lie in a packed verify step; int64 host arrays."""

    gamma: int
    lens: np.ndarray
    """[R] drafts verified."""
    first: np.ndarray
    """[R] row of the anchor."""
    trees: tuple[DraftTree, ...] | None = None
    """[R] of which the rows are the nodes; ``None`` where drafts follow one another."""

    @classmethod
    def from_lens(cls, lens: Sequence[int] | np.ndarray, gamma: int) -> PackedRows:
        """Lay out blocks of ``lens[r]`` verified drafts each.

        Raises ``ValueError`` when a length is negative or above ``gamma``.
        """
        lens = np.asarray(lens, dtype=np.int64)
        values = lens.tolist()
        if values and not 0 <= min(values) <= max(values) <= gamma:
            raise ValueError(f"verified lengths must lie in 0..{gamma}, got {min(values)}..{max(values)}")
        widths = lens + 1
        return cls(gamma, lens, widths.cumsum() - widths)

    @classmethod
    def from_trees(cls, trees: Sequence[DraftTree], gamma: int) -> PackedRows:
        """Lay out the nodes of ``trees``, whose paths have up to ``gamma`` drafts."""
        widths = np.array([len(tree.tokens) for tree in trees], dtype=np.int64)
        return cls(gamma, widths - 1, widths.cumsum() - widths, tuple(trees))

    def of(self, requests: Sequence[int]) -> PackedRows:
        """The rows of these requests alone, packed anew."""
        widths = self.lens[requests] + 1
        trees = None if self.trees is None else tuple(self.trees[r] for r in requests)
        return PackedRows(self.gamma, self.lens[requests], widths.cumsum() - widths, trees)

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.lens)

    @property
    def num_rows(self) -> int:
        """T."""
        return int(self.lens.sum()) + len(self.lens)

    @cached_property
    def request(self) -> np.ndarray:
        """[T] the request of each row."""
        return np.repeat(np.arange(len(self.lens)), self.lens + 1)

    @cached_property
    def offset(self) -> np.ndarray:
        """[T] the place k of each row in its block."""
        return np.arange(len(self.request)) - self.first[self.request]

    @cached_property
    def depth(self) -> np.ndarray:
        """[T] how many drafts have been written at each row, its own included."""
        return self.offset if self.trees is None else np.concatenate([tree.depths for tree in self.trees])

    def written(self, width: int) -> np.ndarray:
        """[T, width] bool: which of the request's drafts x_1..x_width those are."""
        if self.trees is None:
            return np.arange(width) < self.offset[:, None]
        table = np.zeros((self.num_rows, width), bool)
        for tree, first in zip(self.trees, self.first.tolist()):
            table[first : first + len(tree.tokens), : tree.num_drafts] = tree.sees[:, 1:]
        return table

    def pack(self, anchors: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """The target's input ids [T] from ``anchors`` [R] and ``drafts`` [R, γ]: x_0, x_1 .. x_ℓ of each request."""
        flat: list[int] = []
        for anchor, block, length in zip(anchors.tolist(), drafts.tolist(), self.lens.tolist()):
            flat += [anchor, *block[:length]]
        return np.array(flat, dtype=np.int64)

    def emitted_rows(self, tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """The rows [Σ emitted] that gave the emitted ``tokens`` of each request, in order.

        The log-probability of an emitted token is the target's at this row, whether the token was a draft or drawn.
        """
        if self.trees is not None:
            paths = [np.array(tree.follow(block[:-1])) for tree, block in zip(self.trees, tokens)]
            return np.concatenate([path + first for path, first in zip(paths, self.first)])
        emitted = np.array([len(block) for block in tokens], dtype=np.int64)
        request = np.repeat(np.arange(len(emitted)), emitted)
        before = emitted.cumsum() - emitted
        return np.arange(len(request)) - before[request] + self.first[request]

    def on(self, device: torch.device | str) -> DeviceRows:
        """What verification on a device needs; one copy."""
        lens, first, steps = to_device([self.lens, self.first, np.arange(self.gamma + 1)], torch.device(device))
        block = (first[:, None] + steps[:-1]).clamp(max=max(self.num_rows - 1, 0))
        return DeviceRows(self.gamma, lens, first, steps, block, steps[:-1] < lens[:, None])


@dataclass(frozen=True)
class DeviceRows:
    """:class:`PackedRows` as tensors on one device, int64 and bool."""

    gamma: int
    lens: Tensor
    """[R] drafts verified."""
    first: Tensor
    """[R] row of the anchor."""
    steps: Tensor
    """[γ + 1] the numbers 0..γ."""
    block: Tensor
    """[R, γ] the row whose logits judge draft x_{k+1}; some valid row where the draft is not verified."""
    verified: Tensor
    """[R, γ] whether draft x_{k+1} is verified."""


@dataclass(frozen=True)
class BlockPlan:
    """What is verified in a step, host arrays: decided on one rank, the same on all."""

    drafts: np.ndarray
    """[R, γ] int64."""
    lens: np.ndarray
    """[R] int64."""

    def to_tensor(self) -> Tensor:
        """[R, 1 + γ] int64: the length, then the drafts. The shape is known to every rank before it arrives."""
        return torch.from_numpy(np.concatenate([self.lens[:, None], self.drafts], axis=1))

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> BlockPlan:
        """The inverse of :meth:`to_tensor`, from any device."""
        table = tensor.cpu().numpy()
        return cls(drafts=table[:, 1:], lens=table[:, 0])
