"""Sorting and maxima for the compiled core, written out: numba's own take seconds to compile in every function."""

from __future__ import annotations

import numpy as np

from .jit import jit


@jit
def stable_order(key):
    """Indices that sort ``key`` in rising order, equal ones as they stand: ``np.argsort(key, kind="stable")``."""
    size = len(key)
    order, other = np.empty(size, np.int64), np.empty(size, np.int64)
    for n in range(size):
        order[n] = n
    width = 1
    while width < size:
        for start in range(0, size, 2 * width):
            middle, end = min(start + width, size), min(start + 2 * width, size)
            left, right = start, middle
            for place in range(start, end):
                if left < middle and (right >= end or key[order[left]] <= key[order[right]]):
                    other[place] = order[left]
                    left += 1
                else:
                    other[place] = order[right]
                    right += 1
        order, other = other, order
        width *= 2
    return order


@jit
def fullest(load):
    """The first index of the largest entry."""
    best = 0
    for n in range(1, len(load)):
        if load[n] > load[best]:
            best = n
    return best
