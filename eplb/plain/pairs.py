"""The search for copies of ``eplb/pairs.py`` on many rows at once, in numpy.

Shapes: B rows, E experts, H = BINS / 2 bin edges from T/2 on.
"""

from __future__ import annotations

import numpy as np

from ..pairs import BINS, HALF, LOOKS, STEPS, Draws


def search(weight: np.ndarray, count: np.ndarray, limit: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Copies at the last limit that each row reached, and the least costly ones at the limit it did not, [B, E] each.

    ``weight`` and ``count`` are [B, E] int64, ``limit`` [B, levels] from the easiest on, ``most`` the copies of one
    expert.
    """
    draws = Draws.of(weight.shape[1])
    found, tried = count.copy(), count.copy()
    live = np.arange(len(weight))
    level, step = np.zeros((2, len(weight)), np.int64)
    state = _State(weight, count.copy(), limit[:, 0])
    least = state.cost()
    while True:
        reached = np.flatnonzero((state.cost() == 0) & (level < limit.shape[1]))
        if reached.size:
            found[live[reached]] = tried[live[reached]] = state.count[reached]
            level[reached] += 1
            state.set_limit(reached, limit[live[reached], np.minimum(level[reached], limit.shape[1] - 1)])
            least[reached] = state.cost()[reached]
            continue
        going = (level < limit.shape[1]) & (step < STEPS)
        if not going.any():
            return found, tried
        if np.count_nonzero(going) < 0.8 * len(live):
            live, level, step, least, state = live[going], level[going], step[going], least[going], state.take(going)
            going = going[going]
        state.step(draws, step, most, going)
        step += going
        better = np.flatnonzero((state.cost() < least) & going)
        tried[live[better]] = state.count[better]
        least[better] = state.cost()[better]


class _State:
    """Rows under way: copies, and for each edge y the shares above y less the shares up to T - y, [B, H]."""

    def __init__(self, weight: np.ndarray, count: np.ndarray, limit: np.ndarray) -> None:
        self.weight, self.count, self.limit = weight, count, limit.copy()
        self.excess = np.empty((len(weight), HALF), np.int64)
        self.set_limit(np.arange(len(weight)), limit)

    def take(self, rows: np.ndarray) -> _State:
        """Some of the rows."""
        return _State(self.weight[rows], self.count[rows], self.limit[rows])

    def set_limit(self, rows: np.ndarray, limit: np.ndarray) -> None:
        """The excess of some rows under a new limit."""
        self.limit[rows] = limit
        weight, count = self.weight[rows], self.count[rows]
        edge, sign = _reach(_bins(weight, count, limit[:, None]))
        sizes = np.zeros((len(weight), HALF), np.int64)
        np.add.at(sizes, (np.arange(len(weight))[:, None], edge), sign * count)
        self.excess[rows] = _sum_from(sizes)

    def cost(self) -> np.ndarray:
        """Shares without a partner, summed over the edges, [B]."""
        return np.maximum(self.excess, 0).sum(1)

    def step(self, draws: Draws, step: np.ndarray, most: int, going: np.ndarray) -> None:
        """Try one move of a copy on every row that is ``going``, whose cost is not 0."""
        at = np.arange(len(self.weight))
        step = np.minimum(step, STEPS - 1)
        total = np.maximum(self.excess, 0).cumsum(1)
        cost = total[:, -1]
        edge = (total <= (draws.excess[step] % np.maximum(cost, 1))[:, None]).sum(1)
        gains, loses = self._gains(draws.gains[step], edge, most), draws.loses[step]
        gain_count, lose_count = self.count[at, gains], self.count[at, loses]
        less = _bins(self.weight[at, loses], np.maximum(lose_count - 1, 1), self.limit)
        legal = going & (gains != loses) & (lose_count > 1) & (gain_count < most) & (less < BINS)
        changes = np.zeros(self.excess.shape, np.int64)
        for bins, amount in (
            (_bins(self.weight[at, gains], gain_count, self.limit), -gain_count),
            (_bins(self.weight[at, gains], gain_count + 1, self.limit), gain_count + 1),
            (_bins(self.weight[at, loses], lose_count, self.limit), -lose_count),
            (less, lose_count - 1),
        ):
            where, sign = _reach(bins)
            changes[at, where] += sign * amount
        excess = self.excess + _sum_from(changes)
        kept = np.flatnonzero(legal & (np.maximum(excess, 0).sum(1) <= cost + draws.slack[step]))
        self.excess[kept] = excess[kept]
        self.count[kept, gains[kept]] += 1
        self.count[kept, loses[kept]] -= 1

    def _gains(self, first: np.ndarray, edge: np.ndarray, most: int) -> np.ndarray:
        """From expert ``first`` on, the next that lowers the excess at ``edge`` with one copy more; else ``first``."""
        rows = np.arange(len(first))[:, None]
        looks = (first[:, None] + np.arange(LOOKS)) % self.weight.shape[1]
        weight, count = self.weight[rows, looks], self.count[rows, looks]
        now, sign = _reach(_bins(weight, count, self.limit[:, None]))
        more, more_sign = _reach(_bins(weight, count + 1, self.limit[:, None]))
        before = np.where(now >= edge[:, None], sign * count, 0)
        after = np.where(more >= edge[:, None], more_sign * (count + 1), 0)
        return looks[rows[:, 0], ((after < before) & (count < most)).argmax(1)]


def _bins(weight: np.ndarray, count: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Bins of shares; shares at or above the limit come out at ``BINS`` or more."""
    return weight // count * BINS // limit


def _reach(bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The last edge (0 is T/2) at which a share of this bin counts, and whether as a large share or as a partner."""
    large = bins >= HALF
    return np.where(large, np.minimum(bins, BINS - 1) - HALF, HALF - 1 - bins), np.where(large, 1, -1)


def _sum_from(sizes: np.ndarray) -> np.ndarray:
    """Sums over each edge and all after it, along the last axis."""
    return sizes[:, ::-1].cumsum(1)[:, ::-1]
