"""Copies for GPUs with two slots, where the choice of copies decides everything.

With two slots a GPU and given copies, the best placement is known: the most loaded share beside the least loaded one,
the second beside the second last, and so on. It stays below a limit T exactly if, for every load y from T/2 to T, there
are at least as many shares up to T - y as shares above y. So the search is over copies alone. Shares are counted in
``BINS`` bins of T; the cost is the excess of large shares over partners for them, summed over the bin edges y. A step
gives a copy to an expert that lowers the excess at a drawn edge and takes one from a drawn expert, and is kept unless
it raises the cost by more than a small drawn amount. A row that reaches cost 0 goes on to the next, lower limit.

The search itself is in ``plain/pairs.py`` and ``compiled/pairs.py``, with the same result.

Shapes: B rows, E experts, G GPUs, P = 2 * G slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .schedule import draw

BINS = 512
HALF = BINS // 2
# Balances to reach, one after the other, the steps that they may take together, and the experts a step looks at.
LEVELS = (0.95, 0.965, 0.975, 0.982, 0.987, 0.991)
STEPS = 2000
LOOKS = 32


class Draws(NamedTuple):
    """Random numbers of the steps, the same for every row: [STEPS] each; the slack is k with odds 2^-(k+1)."""

    gains: np.ndarray
    loses: np.ndarray
    excess: np.ndarray
    slack: np.ndarray

    @classmethod
    def of(cls, num_experts: int) -> Draws:
        """For ``num_experts`` experts."""
        size = np.uint64(num_experts)
        numbers = draw(0, 4 * STEPS).reshape(4, STEPS)
        lowest_bit = numbers[3] & (~numbers[3] + np.uint64(1))
        return cls(
            (numbers[0] % size).astype(np.int64),
            (numbers[1] % size).astype(np.int64),
            (numbers[2] >> np.uint64(2)).astype(np.int64),
            np.log2(np.maximum(lowest_bit, 1)).astype(np.int64),
        )


def limits(weight: np.ndarray, num_gpus: int) -> np.ndarray:
    """Loads of the fullest GPU to reach, [B, levels] int64, for ``weight`` [B, E] in whole units."""
    mean = weight.sum(1, dtype=np.int64) / num_gpus
    return np.maximum(np.floor(mean[:, None] / np.array(LEVELS)), 1).astype(np.int64)


def best_pairs(weight: np.ndarray, choices: list[np.ndarray]) -> np.ndarray:
    """Per row the choice of copies with the lightest fullest pair; the first one on a tie."""
    tops = np.stack([fullest_pair(weight, count) for count in choices])
    return np.stack(choices)[tops.argmin(0), np.arange(len(weight))]


def fullest_pair(weight: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Load of the fullest GPU, [B], when the most loaded shares stand beside the least loaded ones."""
    pieces = np.repeat((weight // count).ravel(), count.ravel()).reshape(len(weight), -1)
    pieces = np.sort(pieces, axis=1)
    return (pieces + pieces[:, ::-1]).max(1)
