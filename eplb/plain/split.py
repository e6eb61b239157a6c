"""Evening out GPUs by moving tokens between copies, for ``eplb/dispatch.py``; whole numbers throughout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

SWEEPS = 64
Several = Sequence[tuple[list[int], list[int]]]
"""Slots and GPUs of every expert with several copies."""
LevelOut = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Tokens of the slots [P] and loads of the GPUs [G], int64, to better tokens of the slots [P]."""


def level_out(several: Several) -> LevelOut:
    """A function that sweeps over these experts until the loads are even, nothing moves, or for ``SWEEPS`` times."""
    pairs = [(*slots, *hosts) for slots, hosts in several if len(slots) == 2]
    more = [(slots, hosts) for slots, hosts in several if len(slots) > 2]
    return lambda quota, load: np.array(_sweeps(quota.tolist(), load.tolist(), pairs, more), np.int64)


def _sweeps(quota: list[int], load: list[int], pairs: Sequence[tuple[int, ...]], more: Several) -> list[int]:
    mean = sum(load) // len(load)
    enough, little = mean + mean // 4096, mean // 256
    for _ in range(SWEEPS):
        moved = 0
        for a, b, host_a, host_b in pairs:
            # Three quarters of the gap instead of a half: overshooting makes the sweeps converge sooner.
            gap = load[host_a] - load[host_b]
            step = min(3 * gap >> 2, quota[a]) if gap > 0 else -min(-3 * gap >> 2, quota[b])
            if step:
                quota[a] -= step
                quota[b] += step
                load[host_a] -= step
                load[host_b] += step
                moved += abs(step)
        for slots, hosts in more:
            moved += _level(quota, load, slots, hosts)
        if moved <= little or max(load) <= enough:
            break
    return quota


def _level(quota: list[int], load: list[int], slots: Sequence[int], hosts: Sequence[int]) -> int:
    """Move tokens of one expert from its fullest GPU to its lightest, once per copy; the number of tokens moved."""
    total = 0
    for _ in range(len(slots) - 1):
        heavy = light = -1
        most, least = -1, 1 << 62
        for slot, host in zip(slots, hosts):
            here = load[host]
            if here > most and quota[slot] > 0:
                heavy, from_host, most = slot, host, here
            if here < least:
                light, to_host, least = slot, host, here
        if most - least < 2:
            break
        moved = min((most - least) >> 1, quota[heavy])
        quota[heavy] -= moved
        quota[light] += moved
        load[from_host] -= moved
        load[to_host] += moved
        total += moved
    return total
