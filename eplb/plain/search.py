"""The plain core: a local search on many rows at once, in numpy.

Moves, none of which puts a second copy of an expert on a GPU:

1. *Pair rounds*: GPUs are paired fullest with emptiest, and every pair takes its best single swap.
2. *Climb*: the fullest GPU takes the swap, with any slot elsewhere, that leaves the lower maximum of the two.
3. *Trade*: where no swap helps, an expert gains a copy and another loses one, so that the fullest GPU gets lighter.
4. *Shake* and *kick*: swaps drawn by a hash disturb the loads a little, or an expert of the fullest GPU gets a copy in
   a drawn slot, and the climb starts anew; the best placement is kept.

``compiled/search.py`` is the same search, row after row; both give the same placement, which the tests hold them to.
So the order in which candidates are scanned is part of both: the first best in that order wins.

Shapes: B rows, E experts, G GPUs, K slots of a GPU, P = G * K.
"""

from __future__ import annotations

import numpy as np

from ..rows import NEVER, Rows
from ..schedule import SLIGHT, Effort
from .trade import kick, shake, swap, trade


def refine(rows: Rows, goal: np.ndarray, nearly: np.ndarray, effort: Effort) -> None:
    """Search until a row's fullest GPU is at ``goal`` [B] or below, or the effort is spent; changes ``rows``.

    After the close cycles (see ``Effort``) being at ``nearly`` [B] or below is enough. The fullest GPU of a row never
    ends fuller than it began.
    """
    _, num_gpus, num_slots = rows.slot.shape
    num_redundant = num_gpus * num_slots - rows.weight.shape[1]
    if num_gpus == 1 or num_slots == 1:
        return
    idle = np.zeros(len(rows), np.int64)
    for cycle in range(effort.num_cycles):
        if cycle == effort.num_close_cycles:
            goal = np.maximum(goal, nearly)
        top = rows.load.max(1)
        live = np.flatnonzero((top > goal) & (idle < effort.patience))
        if not live.size:
            return
        part = rows.take(live)
        if not cycle:
            for _ in range(effort.num_rounds):
                pair_round(part)
        elif effort.kicks(cycle, num_redundant):
            kick(part, cycle)
        else:
            shake(part, cycle, effort.num_shakes, effort.room)
        most_steps = effort.most_again if cycle else effort.most_steps
        settle(part, goal[live], most_steps, effort.trades(cycle, num_redundant))
        found, top = part.load.max(1), top[live]
        better = np.flatnonzero(found < top)
        rows.put(live[better], part.take(better))
        idle[live] = np.where(found < top - top // SLIGHT, 0, idle[live] + 1)


def pair_round(rows: Rows) -> None:
    """Every GPU and its opposite in the order of loads take the swap that brings them closest together."""
    num_gpus, num_slots = rows.slot.shape[1:]
    half = num_gpus // 2
    order = np.argsort(-rows.load, axis=1, kind="stable")
    heavy, light = order[:, :half], order[:, : num_gpus - half - 1 : -1]
    at = np.arange(len(rows))[:, None]
    gap = rows.load[at, heavy] - rows.load[at, light]
    # The pairs lie along the last axis, which is the long one.
    gives = np.ascontiguousarray(rows.piece[at, heavy].transpose(0, 2, 1)) * -2
    takes = np.ascontiguousarray(rows.piece[at, light].transpose(0, 2, 1)) * 2 + gap[:, None]
    cost = np.abs(gives[:, :, None] + takes[:, None]).reshape(len(rows), num_slots * num_slots, half)
    best = cost.argmin(1)
    row, pair = np.nonzero(np.take_along_axis(cost, best[:, None], 1)[:, 0] < gap)
    g, h, best = heavy[row, pair], light[row, pair], best[row, pair]
    met = rows.slot[row, g][:, :, None] == rows.slot[row, h][:, None]
    for n in np.flatnonzero(met[np.arange(len(row)), best // num_slots].any(1) | _column(met, best % num_slots).any(1)):
        free = ~(met[n].any(1)[:, None] | met[n].any(0)).ravel()
        allowed = np.where(free, cost[row[n], :, pair[n]], NEVER)
        best[n] = allowed.argmin() if allowed.min() < gap[row[n], pair[n]] else -1
    keep = best >= 0
    i, j = np.divmod(best[keep], num_slots)
    swap(rows, row[keep], g[keep], i, h[keep], j)


def _column(met: np.ndarray, column: np.ndarray) -> np.ndarray:
    return met[np.arange(len(met)), :, column]


def settle(rows: Rows, goal: np.ndarray, most_steps: int, may_trade: bool) -> None:
    """Climb, and trade copies where the climb is stuck, until neither helps."""
    stuck = climb(rows, goal, most_steps)
    while may_trade and stuck.size:
        part = rows.take(stuck)
        traded = np.flatnonzero(trade(part))
        if not traded.size:
            return
        part, stuck = part.take(traded), stuck[traded]
        still = climb(part, goal[stuck], most_steps)
        rows.put(stuck, part)
        stuck = stuck[still]


def climb(rows: Rows, goal: np.ndarray, most_steps: int) -> np.ndarray:
    """Swap away from the fullest GPU until every row is at its goal or stuck; returns the rows that are stuck."""
    live, stuck = np.arange(len(rows)), []
    part = _Climb(rows)
    for _ in range(most_steps):
        going, blocked = part.step(goal[live])
        stuck.append(live[blocked])
        if not going.any():
            break
        if np.count_nonzero(going) < 0.8 * len(live):
            rows.put(live, part.rows)
            live = live[going]
            part = _Climb(rows.take(live))
    rows.put(live, part.rows)
    return np.unique(np.concatenate(stuck)) if stuck else np.zeros(0, np.int64)


class _Climb:
    """Rows that climb together, and what a step needs of them: arrays over all P slots of a row, and flat views."""

    def __init__(self, rows: Rows) -> None:
        num_rows, num_gpus, self.num_slots = rows.slot.shape
        self.rows = rows
        self.slot, self.piece, self.load = rows.slot.ravel(), rows.piece.ravel(), rows.load.ravel()
        self.first_gpu = np.arange(num_rows) * num_gpus
        self.first_slot = self.first_gpu * self.num_slots
        self.first_cost = self.first_slot * self.num_slots
        self.places = np.arange(self.num_slots)
        # Twice the larger of two loads after a swap = their sum + the absolute difference of the two.
        self.host = np.repeat(rows.load, self.num_slots, axis=1)
        self.gap = 2 * rows.piece.reshape(num_rows, -1) - self.host
        self.cost = np.empty((num_rows, self.num_slots, num_gpus * self.num_slots), np.int32)

    def step(self, goal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One swap on every row above its goal where one helps; masks of the rows that swapped and that are stuck."""
        cost, num_slots = self.cost, self.num_slots
        g = self.rows.load.argmax(1)
        top = self.load[self.first_gpu + g]
        mine = (self.first_slot + g * num_slots)[:, None] + self.places
        np.add(self.gap[:, None], (top[:, None] - self.piece[mine] * 2)[:, :, None], out=cost)
        np.abs(cost, out=cost)
        cost += (self.host + top[:, None])[:, None]
        best = cost.reshape(len(g), -1).argmin(1)
        better = cost.ravel()[self.first_cost + best] < 2 * top
        i, place = np.divmod(best, self.gap.shape[1])
        above = top > goal
        going = better & above
        theirs = (self.first_slot + place // num_slots * num_slots)[:, None] + self.places
        here, there = self.first_slot + g * num_slots + i, self.first_slot + place
        met = (self.slot[theirs] == self.slot[here][:, None]) | (self.slot[mine] == self.slot[there][:, None])
        for n in np.flatnonzero(met.any(1) & going):
            allowed = self._allowed(n, g[n])
            i, h, j = np.unravel_index(allowed.argmin(), allowed.shape)
            better[n] = going[n] = allowed[i, h, j] < 2 * top[n]
            here[n], there[n] = mine[n, i], self.first_slot[n] + h * num_slots + j
            theirs[n] = self.first_slot[n] + h * num_slots + self.places
        if not going.all():
            mine, theirs, here, there = mine[going], theirs[going], here[going], there[going]
        self._swap(mine, theirs, here, there)
        return going, above & ~better

    def _swap(self, mine: np.ndarray, theirs: np.ndarray, here: np.ndarray, there: np.ndarray) -> None:
        """Exchange the slots ``here`` and ``there``, of GPUs with the slots ``mine`` and ``theirs``; flat indices."""
        a, b = self.piece[here], self.piece[there]
        self.slot[here], self.slot[there] = self.slot[there], self.slot[here]
        self.piece[here], self.piece[there] = b, a
        both = np.concatenate((mine, theirs))
        gpu, rise = both[:, 0] // self.num_slots, b - a
        load = self.load[gpu] + np.concatenate((rise, -rise))
        self.load[gpu] = load
        load = load[:, None]
        self.host.ravel()[both] = load
        self.gap.ravel()[both] = 2 * self.piece[both] - load

    def _allowed(self, n: int, g: int) -> np.ndarray:
        """One row's costs [own slot, other GPU, its slot] without the swaps that would make a second copy."""
        slot = self.rows.slot[n]
        meets = slot[g][:, None, None] == slot
        meets[:, g] = False
        blocked = meets.any(2)[:, :, None] | meets.any(0)
        return np.where(blocked, NEVER, self.cost[n].reshape(meets.shape))
