"""The state that the search works on: many placement problems side by side, in whole-number units.

Loads are scaled so that one layer's total is ``UNITS``; then every sum and comparison is exact, and the plain and the
compiled core reach the same placement whatever the order of their additions. ``UNITS`` leaves two bits of headroom in
int32 for the sums of four loads that the search forms.

Shapes: B rows, E experts, G GPUs, K slots of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

UNITS = 1 << 28
NEVER = np.int32(np.iinfo(np.int32).max)


@dataclass
class Rows:
    """``weight``, ``count``, ``share`` are [B, E]; ``slot`` (experts) and ``piece`` (their shares) [B, G, K];
    ``load`` [B, G]; all int32. Changed in place by the search."""

    weight: np.ndarray
    count: np.ndarray
    share: np.ndarray
    slot: np.ndarray
    piece: np.ndarray
    load: np.ndarray

    @classmethod
    def of(cls, weight: np.ndarray, count: np.ndarray, slot: np.ndarray) -> Rows:
        """The state of placement ``slot`` [B, G, K], where expert e has ``count[:, e]`` copies."""
        weight, count = weight.astype(np.int32), count.astype(np.int32)
        share = weight // count
        slot = np.array(slot, np.int32)
        piece = np.take_along_axis(share, slot.reshape(len(slot), -1), 1).reshape(slot.shape)
        return cls(weight, count, share, slot, piece, piece.sum(-1, dtype=np.int32))

    def __len__(self) -> int:
        return len(self.weight)

    def take(self, rows: np.ndarray) -> Rows:
        """A copy of some rows."""
        return Rows(*(array[rows] for array in self.arrays()))

    def put(self, rows: np.ndarray, part: Rows) -> None:
        """Write ``part`` back as these rows."""
        for array, new in zip(self.arrays(), part.arrays()):
            array[rows] = new

    def arrays(self) -> tuple[np.ndarray, ...]:
        """All arrays, in the order of the fields."""
        return self.weight, self.count, self.share, self.slot, self.piece, self.load


def to_units(load: np.ndarray) -> np.ndarray:
    """``load`` [L, E] scaled to whole numbers that sum to at most ``UNITS`` per layer, int32; no load stays 0."""
    largest = load.max(1, keepdims=True, initial=0)
    # Scaled by the largest first: a sum of huge loads could overflow.
    scaled = np.divide(load, largest, out=np.zeros(load.shape), where=largest > 0)
    total = scaled.sum(1, keepdims=True)
    return np.floor(np.divide(scaled * UNITS, total, out=np.zeros(load.shape), where=total > 0)).astype(np.int32)
