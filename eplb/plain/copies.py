"""How many copies each expert gets.

Giving every spare slot to the expert whose copies are the most loaded minimises the largest share. The greedy order is
kept exactly, but most of its steps are taken at once: all increments above a share level belong to it, so the level is
found by bisection and only the last few slots are handed out one by one.

Shapes: B rows (one placement problem each), E experts, P slots.
"""

from __future__ import annotations

import numpy as np

_BISECTIONS = 12


def spread_copies(load: np.ndarray, num_slots: int, most: int) -> np.ndarray:
    """Copies of each expert, [B, E] int64, that make the largest load per copy as small as possible.

    ``load`` is [B, E] and not negative, ``most`` the largest number of copies of one expert (one per GPU). Every
    expert gets at least one; the sum is ``num_slots``, which must lie between E and ``most * E``. Ties go to the lowest
    expert, and a row without any load gets its copies evenly.
    """
    num_experts = load.shape[1]
    assert num_experts <= num_slots <= most * num_experts, (num_experts, num_slots, most)
    load = np.where(load.any(1, keepdims=True), load, 1).astype(np.float64)
    count = _bisected(load, num_slots, most)
    rows = np.arange(len(load))
    priority = np.where(count < most, load / count, -1.0)
    left = num_slots - count.sum(1)
    while left.any():
        # The few slots that the bisection left over, one for each row that has any.
        hottest = priority.argmax(1)
        count[rows, hottest] += left > 0
        now = count[rows, hottest]
        priority[rows, hottest] = np.where(now < most, load[rows, hottest] / now, -1.0)
        left -= left > 0
    return count


def _bisected(load: np.ndarray, num_slots: int, most: int) -> np.ndarray:
    """Copies at the lowest level found, at which every expert has just enough copies to be at or below it."""
    low, high = load.sum(1) / num_slots, load.max(1)
    for _ in range(_BISECTIONS):
        level = (low + high) / 2
        fits = np.minimum(np.maximum(np.ceil(load / level[:, None]), 1), most).sum(1) <= num_slots
        high, low = np.where(fits, level, high), np.where(fits, low, level)
    count = copies_below(load, high[:, None], most)
    # Rounding may have let one too many through; such a row is handed out one by one from the start.
    count[count.sum(1) > num_slots] = 1
    return count


def copies_below(load: np.ndarray, level: np.ndarray, most: int) -> np.ndarray:
    """The fewest copies, [B, E], for which ``load / copies <= level``, at least 1 and at most ``most``."""
    count = np.clip(np.ceil(load / level), 1, most).astype(np.int64)
    # The division above may round the wrong way by one; the comparison that the greedy makes decides.
    count += (load / count > level) & (count < most)
    count -= (count > 1) & (load / np.maximum(count - 1, 1) <= level)
    return count
