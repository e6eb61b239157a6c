"""The search of ``plain/search.py``, row after row, compiled: same moves, same order, same whole numbers.

Shapes: E experts, G GPUs, K slots of a GPU.
"""

from __future__ import annotations

import numpy as np

from ..rows import Rows
from ..schedule import Effort, draw_kick, draw_shake
from .jit import jit


def refine(rows: Rows, goal: np.ndarray, effort: Effort) -> None:
    """See ``plain/search.py``."""
    _, num_gpus, num_slots = rows.slot.shape
    num_redundant = num_gpus * num_slots - rows.weight.shape[1]
    if num_gpus == 1 or num_slots == 1:
        return
    cycles = range(effort.num_cycles)
    shakes = [draw_shake(seed, num_gpus, num_slots) for seed in range(effort.num_cycles * effort.num_shakes)]
    drawn = np.full((len(shakes), 4, num_gpus // 2), -1, np.int32)
    for number, one in enumerate(shakes):
        drawn[number, :, : len(one.g)] = one
    kicks = np.array([draw_kick(cycle, num_gpus, num_slots) for cycle in cycles], np.int64).reshape(len(cycles), 2, -1)
    kicked = np.array([effort.kicks(cycle, num_redundant) for cycle in cycles], np.bool_)
    trades = np.array([effort.trades(cycle, num_redundant) for cycle in cycles], np.bool_)
    steps = (effort.num_rounds, effort.num_shakes, effort.most_steps)
    _refine(*rows.arrays(), goal.astype(np.int32), drawn, kicks, kicked, trades, *steps)


@jit
def _refine(
    weights, counts, shares, slots, pieces, loads, goals, drawn, kicks, kicked, trades, rounds, shakes, most_steps
):
    for n in range(len(goals)):
        weight, goal = weights[n], goals[n]
        for cycle in range(len(kicked)):
            best = loads[n].max()
            if best <= goal:
                break
            # The row itself holds the best placement so far; a cycle searches on from a copy of it.
            count, share = counts[n].copy(), shares[n].copy()
            slot, piece, load = slots[n].copy(), pieces[n].copy(), loads[n].copy()
            if cycle == 0:
                for _ in range(rounds):
                    _pair_round(slot, piece, load)
            elif kicked[cycle]:
                _kick(weight, count, share, slot, piece, load, kicks[cycle])
            else:
                limit = _shake_limit(load)
                for one in range(cycle * shakes, (cycle + 1) * shakes):
                    _shake(slot, piece, load, drawn[one], limit)
            stuck = _climb(slot, piece, load, goal, most_steps)
            while stuck and trades[cycle] and _trade(weight, count, share, slot, piece, load):
                stuck = _climb(slot, piece, load, goal, most_steps)
            if load.max() < best:
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
    order = np.argsort(-load, kind="mergesort")
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
        g = load.argmax()
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
def _shake_limit(load):
    mean = load.astype(np.int64).sum() // len(load)
    return mean + max(mean // 50, (load.max() - mean) * 4 // 5)


@jit
def _shake(slot, piece, load, drawn, limit):
    for pair in range(drawn.shape[1]):
        g, i, h, j = drawn[0, pair], drawn[1, pair], drawn[2, pair], drawn[3, pair]
        if g < 0:
            break
        moved = piece[g, i] - piece[h, j]
        if load[g] - moved <= limit and load[h] + moved <= limit:
            if not _holds(slot, h, slot[g, i]) and not _holds(slot, g, slot[h, j]):
                _swap(slot, piece, load, g, i, h, j)


@jit
def _trade(weight, count, share, slot, piece, load):
    num_gpus, num_slots = slot.shape
    num_experts = len(weight)
    g = load.argmax()
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
def _kick(weight, count, share, slot, piece, load, drawn):
    num_gpus, num_slots = slot.shape
    g = load.argmax()
    for choice in range(drawn.shape[1]):
        h, j = drawn[0, choice] // num_slots, drawn[0, choice] % num_slots
        x, y = slot[g, drawn[1, choice]], slot[h, j]
        if count[y] > 1 and count[x] < num_gpus and not _holds(slot, h, x):
            _change_slot(weight, count, share, slot, piece, load, drawn[0, choice], x)
            break
