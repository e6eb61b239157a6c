"""The search of ``plain/search.py``, row after row, compiled: same moves, same order, same whole numbers.

Shapes: E experts, G GPUs, K slots of a GPU.
"""

from __future__ import annotations

import numpy as np

from ..rows import Rows
from ..schedule import KICK_SEED, KICKS, SLIGHT, Effort
from .jit import jit
from .order import fullest, stable_order


def refine(rows: Rows, goal: np.ndarray, nearly: np.ndarray, effort: Effort) -> None:
    """See ``plain/search.py``."""
    _, num_gpus, num_slots = rows.slot.shape
    num_redundant = num_gpus * num_slots - rows.weight.shape[1]
    if num_gpus == 1 or num_slots == 1:
        return
    cycles = range(effort.num_cycles)
    kicked = np.array([effort.kicks(cycle, num_redundant) for cycle in cycles], np.bool_)
    trades = np.array([effort.trades(cycle, num_redundant) for cycle in cycles], np.bool_)
    goals = np.stack([goal, np.maximum(goal, nearly)]).astype(np.int32)
    limits = (effort.num_close_cycles, effort.patience, effort.most_steps, effort.most_again)
    steps = (*limits, effort.num_rounds, effort.num_shakes, effort.room)
    _refine(*rows.arrays(), goals, kicked, trades, *steps)


@jit
def _refine(
    weights,
    counts,
    shares,
    slots,
    pieces,
    loads,
    goals,
    kicked,
    trades,
    close,
    patience,
    most_steps,
    most_again,
    rounds,
    shakes,
    room,
):
    for n in range(len(weights)):
        weight, idle = weights[n], 0
        for cycle in range(len(kicked)):
            goal = goals[0 if cycle < close else 1, n]
            best = loads[n, fullest(loads[n])]
            if best <= goal or idle >= patience:
                break
            # The row itself holds the best placement so far; a cycle searches on from a copy of it.
            count, share = counts[n].copy(), shares[n].copy()
            slot, piece, load = slots[n].copy(), pieces[n].copy(), loads[n].copy()
            if cycle == 0:
                for _ in range(rounds):
                    _pair_round(slot, piece, load)
            elif kicked[cycle]:
                _kick(weight, count, share, slot, piece, load, cycle)
            else:
                limit = _shake_limit(load, room)
                for one in range(cycle * shakes, (cycle + 1) * shakes):
                    _shake(slot, piece, load, one, limit)
            most = most_again if cycle else most_steps
            stuck = _climb(slot, piece, load, goal, most)
            while stuck and trades[cycle] and _trade(weight, count, share, slot, piece, load):
                stuck = _climb(slot, piece, load, goal, most)
            top = load[fullest(load)]
            idle = 0 if top < best - best // SLIGHT else idle + 1
            if top < best:
                counts[n], shares[n], slots[n], pieces[n], loads[n] = count, share, slot, piece, load


@jit
def _holds(slot, g, expert):
    for k in range(slot.shape[1]):
        if slot[g, k] == expert:
            return True
    return False


@jit
def _swap(slot, piece, load, g, i, h, j):
    x, y, a, b = slot[g, i], slot[h, j], piece[g, i], piece[h, j]
    slot[g, i], slot[h, j], piece[g, i], piece[h, j] = y, x, b, a
    load[g] += b - a
    load[h] += a - b


@jit
def _pair_round(slot, piece, load):
    num_gpus, num_slots = slot.shape
    order = stable_order(-load)
    for pair in range(num_gpus // 2):
        g, h = order[pair], order[num_gpus - 1 - pair]
        gap = load[g] - load[h]
        best, best_i, best_j = gap, -1, -1
        for i in range(num_slots):
            for j in range(num_slots):
                cost = abs(2 * piece[h, j] - 2 * piece[g, i] + gap)
                if cost < best and not _holds(slot, h, slot[g, i]) and not _holds(slot, g, slot[h, j]):
                    best, best_i, best_j = cost, i, j
        if best_i >= 0:
            _swap(slot, piece, load, g, best_i, h, best_j)


@jit
def _climb(slot, piece, load, goal, most_steps):
    """Whether it ended stuck above its goal, rather than at it or out of steps."""
    num_gpus, num_slots = slot.shape
    for _ in range(most_steps):
        g = fullest(load)
        top = load[g]
        if top <= goal:
            return False
        best, best_i, best_h, best_j = 2 * top, -1, -1, -1
        for i in range(num_slots):
            own = top - 2 * piece[g, i]
            met = slot[g, i]
            for h in range(num_gpus):
                both = load[h] + top
                if both >= best:
                    continue
                part = own - load[h]
                for j in range(num_slots):
                    cost = both + abs(part + 2 * piece[h, j])
                    if cost < best and not _holds(slot, h, met) and not _holds(slot, g, slot[h, j]):
                        best, best_i, best_h, best_j = cost, i, h, j
        if best_i < 0:
            return True
        _swap(slot, piece, load, g, best_i, best_h, best_j)
    return False


@jit
def _shake_limit(load, room):
    total = 0
    for one in load:
        total += one
    mean = total // len(load)
    return mean + max(mean // room, (load[fullest(load)] - mean) * 4 // 5)


@jit
def _shake(slot, piece, load, seed, limit):
    num_gpus, num_slots = slot.shape
    offset = np.int64(_draw(seed, 0) % np.uint64(num_gpus))
    for g in range(num_gpus):
        h = (offset - g) % num_gpus
        if h <= g:
            continue
        both = np.int64(_draw(seed, g + 1) % np.uint64(num_slots * num_slots))
        i, j = both // num_slots, both % num_slots
        moved = piece[g, i] - piece[h, j]
        if load[g] - moved <= limit and load[h] + moved <= limit:
            if not _holds(slot, h, slot[g, i]) and not _holds(slot, g, slot[h, j]):
                _swap(slot, piece, load, g, i, h, j)


@jit
def _draw(seed, number):
    """``schedule.draw(seed, ...)[number]``."""
    z = np.uint64(number + 1) * np.uint64(0x9E3779B97F4A7C15) + (np.uint64(seed) << np.uint64(32))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@jit
def _trade(weight, count, share, slot, piece, load):
    num_gpus, num_slots = slot.shape
    num_experts = len(weight)
    g = fullest(load)
    top = load[g]
    # Of every expert's GPUs: the fullest one's slot, its load, and the load of the next.
    place, first, second = np.full(num_experts, -1), np.full(num_experts, -1), np.full(num_experts, -1)
    for h in range(num_gpus):
        for j in range(num_slots):
            y = slot[h, j]
            if load[h] > first[y]:
                place[y], first[y], second[y] = h * num_slots + j, load[h], first[y]
            elif load[h] > second[y]:
                second[y] = load[h]
    best, best_place, best_expert = top, -1, -1
    for i in range(num_slots):
        x = slot[g, i]
        if count[x] >= num_gpus:
            continue
        mine = weight[x] // (count[x] + 1)
        for h in range(num_gpus):
            if _holds(slot, h, x):
                continue
            for j in range(num_slots):
                y = slot[h, j]
                if count[y] < 2:
                    continue
                other = second[y] if place[y] == h * num_slots + j else first[y]
                after = max(other + weight[y] // (count[y] - 1) - share[y], load[h] - piece[h, j] + mine)
                after = max(after, top + mine - piece[g, i])
                if after < best and not _holds(slot, g, y):
                    best, best_place, best_expert = after, h * num_slots + j, x
    for j in range(num_slots):
        y = slot[g, j]
        if count[y] < 2:
            continue
        other = second[y] if place[y] == g * num_slots + j else first[y]
        given = other + weight[y] // (count[y] - 1) - share[y]
        if given >= best:
            continue
        for x in range(num_experts):
            after = max(given, top - piece[g, j] + weight[x] // (count[x] + 1))
            if after < best and count[x] < num_gpus and not _holds(slot, g, x):
                best, best_place, best_expert = after, g * num_slots + j, x
    if best_place < 0:
        return False
    _change_slot(weight, count, share, slot, piece, load, best_place, best_expert)
    return True


@jit
def _change_slot(weight, count, share, slot, piece, load, place, expert):
    num_gpus, num_slots = slot.shape
    loser = slot[place // num_slots, place % num_slots]
    slot[place // num_slots, place % num_slots] = expert
    count[expert] += 1
    count[loser] -= 1
    share[expert] = weight[expert] // count[expert]
    share[loser] = weight[loser] // count[loser]
    for h in range(num_gpus):
        for j in range(num_slots):
            if slot[h, j] == expert or slot[h, j] == loser:
                load[h] += share[slot[h, j]] - piece[h, j]
                piece[h, j] = share[slot[h, j]]


@jit
def _kick(weight, count, share, slot, piece, load, cycle):
    num_gpus, num_slots = slot.shape
    g = fullest(load)
    for choice in range(KICKS):
        number = _draw(KICK_SEED + cycle, choice)
        place = np.int64(number % np.uint64(num_gpus * num_slots))
        x = slot[g, np.int64((number >> np.uint64(32)) % np.uint64(num_slots))]
        h, j = place // num_slots, place % num_slots
        if count[slot[h, j]] > 1 and count[x] < num_gpus and not _holds(slot, h, x):
            _change_slot(weight, count, share, slot, piece, load, place, x)
            break
