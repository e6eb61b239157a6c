"""The sweeps of ``plain/split.py``, compiled: same moves, same whole numbers."""

from __future__ import annotations

import numpy as np

from ..plain.split import SWEEPS, LevelOut, Several
from .jit import jit


def level_out(several: Several) -> LevelOut:
    """See ``plain/split.py``."""
    # Two copies first, as the plain sweeps take them.
    ordered = sorted(several, key=lambda one: len(one[0]) > 2)
    size = max((len(slots) for slots, _ in ordered), default=1)
    table = np.full((2, len(ordered), size), -1, np.int64)
    for n, both in enumerate(ordered):
        for side in (0, 1):
            table[side, n, : len(both[side])] = both[side]
    counts = np.array([len(slots) for slots, _ in ordered], np.int64)

    def run(quota: np.ndarray, load: np.ndarray) -> np.ndarray:
        quota = quota.copy()
        _sweeps(quota, load.copy(), table[0], table[1], counts)
        return quota

    return run


@jit
def _sweeps(quota, load, slots, hosts, counts):
    mean = load.sum() // len(load)
    enough, little = mean + mean // 4096, mean // 256
    for _ in range(SWEEPS):
        moved = 0
        for n in range(len(counts)):
            if counts[n] > 2:
                moved += _level(quota, load, slots[n], hosts[n], counts[n])
                continue
            a, b, host_a, host_b = slots[n, 0], slots[n, 1], hosts[n, 0], hosts[n, 1]
            gap = load[host_a] - load[host_b]
            step = min(3 * gap >> 2, quota[a]) if gap > 0 else -min(-3 * gap >> 2, quota[b])
            quota[a] -= step
            quota[b] += step
            load[host_a] -= step
            load[host_b] += step
            moved += abs(step)
        if moved <= little or load.max() <= enough:
            break


@jit
def _level(quota, load, slots, hosts, count):
    total = 0
    for _ in range(count - 1):
        heavy = light = most = -1
        least = 1 << 62
        for n in range(count):
            here = load[hosts[n]]
            if here > most and quota[slots[n]] > 0:
                heavy, most = n, here
            if here < least:
                light, least = n, here
        if most - least < 2:
            break
        moved = min((most - least) >> 1, quota[slots[heavy]])
        quota[slots[heavy]] -= moved
        quota[slots[light]] += moved
        load[hosts[heavy]] -= moved
        load[hosts[light]] += moved
        total += moved
    return total
