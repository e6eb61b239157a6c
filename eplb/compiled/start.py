"""The start of ``plain/copies.py`` and ``plain/deal.py``, row after row, compiled: same copies, same slots.

Shapes: B rows, E experts, G GPUs, K slots of a GPU, P = G * K.
"""

from __future__ import annotations

import numpy as np

from .jit import jit
from .order import fullest, stable_order


def spread_copies(load: np.ndarray, num_slots: int, most: int) -> np.ndarray:
    """See ``plain/copies.py``."""
    assert load.shape[1] <= num_slots <= most * load.shape[1], (load.shape, num_slots, most)
    return _spread(load.astype(np.float64), num_slots, most)


def deal(share: np.ndarray, count: np.ndarray, num_gpus: int) -> np.ndarray:
    """See ``plain/deal.py``."""
    return _deal(share.astype(np.int64), count.astype(np.int64), num_gpus, int(count[0].sum()) // num_gpus)


@jit
def _spread(loads, num_slots, most):
    num_rows, num_experts = loads.shape
    counts = np.ones((num_rows, num_experts), np.int64)
    for n in range(num_rows):
        load, count = loads[n].copy(), counts[n]
        if load[fullest(load)] == 0:
            load[:] = 1
        level = load[fullest(load)]
        low = 0.0
        for one in load:
            low += one / num_slots
        for _ in range(12):
            # Every expert at or below the level needs this many copies; too many ends the narrowing.
            middle = (low + level) / 2
            total = 0
            for e in range(num_experts):
                total += _copies_below(load[e], middle, most)
            if total <= num_slots:
                level = middle
            else:
                low = middle
        left = num_slots
        for e in range(num_experts):
            count[e] = _copies_below(load[e], level, most)
            left -= count[e]
        for _ in range(left):
            hottest, priority = -1, -1.0
            for e in range(num_experts):
                if count[e] < most and load[e] / count[e] > priority:
                    hottest, priority = e, load[e] / count[e]
            count[hottest] += 1
    return counts


@jit
def _copies_below(load, level, most):
    count = min(max(np.int64(np.ceil(load / level)), 1), most)
    if count < most and load / count > level:
        count += 1
    if count > 1 and load / (count - 1) <= level:
        count -= 1
    return count


@jit
def _deal(shares, counts, num_gpus, num_slots):
    num_rows = len(shares)
    slots = np.empty((num_rows, num_gpus, num_slots), np.int32)
    copies = np.empty(num_gpus * num_slots, np.int32)
    for n in range(num_rows):
        share, count, slot = shares[n], counts[n], slots[n]
        filled = 0
        for e in stable_order(-share):
            for _ in range(count[e]):
                copies[filled] = e
                filled += 1
        load = np.zeros(num_gpus, np.int64)
        for wave in range(num_slots):
            here = copies[wave * num_gpus : (wave + 1) * num_gpus]
            lightest = stable_order(load)
            first, given = here[0], 0
            if wave and copies[wave * num_gpus - 1] == first:
                # Its copies go to the lightest GPUs that do not hold it yet, the others follow in order.
                wanted = 0
                while wanted < num_gpus and here[wanted] == first:
                    wanted += 1
                taken = np.zeros(num_gpus, np.bool_)
                for g in lightest:
                    if given < wanted and slot[g, wave - 1] != first:
                        slot[g, wave] = first
                        load[g] += share[first]
                        taken[g] = True
                        given += 1
                for g in lightest:
                    if not taken[g]:
                        slot[g, wave] = here[given]
                        load[g] += share[here[given]]
                        given += 1
            else:
                for item in range(num_gpus):
                    g = lightest[item]
                    slot[g, wave] = here[item]
                    load[g] += share[here[item]]
    return slots
