"""The published greedy of ``eplb/baseline.py``, compiled: the same placements, as a floor that costs little.

Shapes: B rows, E experts, P slots, G GPUs, K slots of a GPU.
"""

from __future__ import annotations

import numpy as np

from .jit import jit
from .order import fullest, stable_order


def flat_greedy(load: np.ndarray, num_slots: int, num_gpus: int) -> np.ndarray:
    """See ``eplb/baseline.py``."""
    return _flat_greedy(load.astype(np.float32), num_slots, num_gpus)


@jit
def _flat_greedy(loads, num_slots, num_gpus):
    num_rows, num_experts = loads.shape
    room = num_slots // num_gpus
    slots = np.empty((num_rows, num_slots), np.int32)
    copies = np.empty(num_slots, np.int32)
    pieces = np.empty(num_slots, np.float32)
    for n in range(num_rows):
        load = loads[n]
        count = np.ones(num_experts, np.float32)
        priority = load.copy()
        for slot in range(num_slots):
            if slot < num_experts:
                copies[slot] = slot
                continue
            hottest = fullest(priority)
            copies[slot] = hottest
            count[hottest] += np.float32(1)
            priority[hottest] = load[hottest] / count[hottest]
        for slot in range(num_slots):
            pieces[slot] = load[copies[slot]] / count[copies[slot]]
        # A full GPU carries an infinite load.
        total = np.zeros(num_gpus, np.float32)
        filled = np.zeros(num_gpus, np.int64)
        for item in stable_order(-pieces):
            best, least = 0, total[0]
            for g in range(1, num_gpus):
                if total[g] < least:
                    best, least = g, total[g]
            slots[n, best * room + filled[best]] = copies[item]
            filled[best] += 1
            total[best] = total[best] + pieces[item] if filled[best] < room else np.float32(np.inf)
    return slots
