"""The search of ``plain/pairs.py``, row after row, compiled: same steps, same whole numbers.

Shapes: E experts, H = BINS / 2 bin edges from T/2 on.
"""

from __future__ import annotations

import numpy as np

from ..pairs import BINS, HALF, LOOKS, STEPS, Draws
from .jit import jit


def search(weight: np.ndarray, count: np.ndarray, limit: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """See ``plain/pairs.py``."""
    found, tried = count.copy(), count.copy()
    _search(weight, limit, most, found, tried, *Draws.of(weight.shape[1]))
    return found, tried


@jit
def _search(weights, limits, most, found, tried, gains, loses, drawn, slack):
    for n in range(len(weights)):
        weight, count = weights[n], found[n].copy()
        step = 0
        for level in range(limits.shape[1]):
            limit = limits[n, level]
            excess = _excess(weight, count, limit)
            cost = least = _cost(excess)
            while cost > 0 and step < STEPS:
                cost = _step(
                    weight, count, excess, limit, most, gains[step], loses[step], drawn[step] % cost, slack[step] + cost
                )
                step += 1
                if cost < least:
                    least = cost
                    tried[n] = count
            if cost > 0:
                break
            found[n] = count
            tried[n] = count


@jit
def _reach(weight, count, limit):
    """The last edge at which a share counts, whether as a large one or as a partner, and whether it is below T."""
    place = weight // count * BINS // limit
    if place >= HALF:
        return min(place, BINS - 1) - HALF, 1, place < BINS
    return HALF - 1 - place, -1, True


@jit
def _excess(weight, count, limit):
    sizes = np.zeros(HALF, np.int64)
    for e in range(len(weight)):
        edge, sign, _ = _reach(weight[e], count[e], limit)
        sizes[edge] += sign * count[e]
    for edge in range(HALF - 2, -1, -1):
        sizes[edge] += sizes[edge + 1]
    return sizes


@jit
def _cost(excess):
    cost = 0
    for edge in range(HALF):
        cost += max(excess[edge], 0)
    return cost


@jit
def _step(weight, count, excess, limit, most, gain, lose, drawn, allowed):
    """One step, kept if the cost is then at most ``allowed``; the cost after it."""
    edge = total = 0
    cost = _cost(excess)
    while total + max(excess[edge], 0) <= drawn:
        total += max(excess[edge], 0)
        edge += 1
    first = gain
    for look in range(LOOKS):
        e = (first + look) % len(weight)
        if count[e] >= most:
            continue
        now, sign, _ = _reach(weight[e], count[e], limit)
        more, more_sign, _ = _reach(weight[e], count[e] + 1, limit)
        before = sign * count[e] if now >= edge else 0
        after = more_sign * (count[e] + 1) if more >= edge else 0
        if after < before:
            gain = e
            break
    if gain == lose or count[lose] < 2 or count[gain] >= most:
        return cost
    less, less_sign, fits = _reach(weight[lose], count[lose] - 1, limit)
    if not fits:
        return cost
    _move(weight, count, excess, limit, gain, 1)
    _move(weight, count, excess, limit, lose, -1)
    new = _cost(excess)
    if new <= allowed:
        return new
    _move(weight, count, excess, limit, gain, -1)
    _move(weight, count, excess, limit, lose, 1)
    return cost


@jit
def _move(weight, count, excess, limit, expert, change):
    edge, sign, _ = _reach(weight[expert], count[expert], limit)
    for y in range(edge + 1):
        excess[y] -= sign * count[expert]
    count[expert] += change
    edge, sign, _ = _reach(weight[expert], count[expert], limit)
    for y in range(edge + 1):
        excess[y] += sign * count[expert]
