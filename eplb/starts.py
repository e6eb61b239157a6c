"""Several choices of copies to start from, for problems so small that each can be tried.

Shapes: B rows, E experts, P slots, N choices.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from .schedule import draw

# So many choices are tried; in the smallest problems more, to have them all.
MOST, MOST_TINY, TINY = 512, 2048, 16


def choices_of_copies(count: np.ndarray, most: int) -> np.ndarray:
    """Copies to try, [B, N, E] int64: ``count`` [B, E] first.

    All ways to hand out the spare slots where these are few enough; else ``count`` with one, two or three copies
    given from drawn experts to drawn others. ``most`` bounds the copies of one expert; what it forbids is repeated as
    ``count``.
    """
    num_experts = count.shape[1]
    spare = int(count[0].sum()) - num_experts
    tiny = num_experts + spare <= TINY
    if math.comb(spare + num_experts - 1, spare) <= (MOST_TINY if tiny else MOST):
        ways = itertools.combinations_with_replacement(range(num_experts), spare)
        every = 1 + np.array([np.bincount(np.array(way, np.int64), minlength=num_experts) for way in ways])
        found = np.broadcast_to(every, (len(count), *every.shape))
        return np.concatenate(
            [count[:, None], np.where((found <= most).all(2, keepdims=True), found, count[:, None])], 1
        )
    numbers = (draw(1 << 21, 6 * MOST).reshape(MOST, 3, 2) % np.uint64(num_experts)).astype(np.int64)
    found = np.repeat(count[:, None], MOST, axis=1)
    for choice in range(1, MOST):
        for gains, loses in numbers[choice, : 1 + choice % 3]:
            legal = (found[:, choice, loses] > 1) & (found[:, choice, gains] < most) & (gains != loses)
            found[:, choice, gains] += legal
            found[:, choice, loses] -= legal
    return found
