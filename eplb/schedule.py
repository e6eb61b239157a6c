"""How long the search runs, and the numbers it draws: both depend on nothing but the sizes, so plans repeat exactly."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SLIGHT = 4096


class Effort(NamedTuple):
    """How long to search, in steps, so that a plan never depends on the clock.

    ``num_rounds`` pair rounds, then ``num_cycles`` climbs: the first from where the rounds ended, each further one from
    the best placement so far after a disturbance: a kick (every second cycle, where there is redundancy) or a shake of
    ``num_shakes`` passes. Trades are tried in every ``trade_every``-th cycle. The first climb takes at most
    ``most_steps`` steps, each further one ``most_again``. The first ``num_close_cycles`` aim at a row's goal, the
    others only at being nearly there: they are for the hard rows. A row is left as it is after ``patience`` cycles in
    a row that lowered its fullest GPU by less than a ``SLIGHT``-th. A shake fills a GPU up to a ``room``-th above the
    mean, or four fifths of the way from the mean to the fullest one where that is more.
    """

    num_rounds: int = 6
    num_cycles: int = 16
    num_close_cycles: int = 4
    patience: int = 5
    num_shakes: int = 4
    trade_every: int = 4
    most_steps: int = 1000
    most_again: int = 48
    room: int = 50

    def kicks(self, cycle: int, num_redundant: int) -> bool:
        """Whether a cycle begins with a kick rather than a shake."""
        return cycle % 2 == 0 and num_redundant > 0

    def trades(self, cycle: int, num_redundant: int) -> bool:
        """Whether trades are tried where a climb is stuck."""
        return cycle % self.trade_every == 0 and num_redundant > 0


def draw(seed: int, size: int) -> np.ndarray:
    """``size`` whole numbers that depend on ``seed`` alone, uint64 (the splitmix64 hash of a counter)."""
    z = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed << 32)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Shake(NamedTuple):
    """Disjoint pairs of GPUs and one slot of each, the same for every row."""

    g: np.ndarray
    i: np.ndarray
    h: np.ndarray
    j: np.ndarray


def draw_shake(seed: int, num_gpus: int, num_slots: int) -> Shake:
    """The swaps that one pass of a shake tries."""
    numbers = draw(seed, num_gpus + 1)
    g = np.arange(num_gpus)
    h = (int(numbers[0] % np.uint64(num_gpus)) - g) % num_gpus
    first = h > g
    slots = (numbers[1:] % np.uint64(num_slots * num_slots)).astype(np.int64)[first]
    return Shake(g[first], slots // num_slots, h[first], slots % num_slots)


# The choices of one kick, and where the seeds of kicks begin.
KICKS, KICK_SEED = 32, 1 << 20


def draw_kick(seed: int, num_gpus: int, num_slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Slots to change (0..P-1) and slots of the fullest GPU whose expert may gain: the choices of one kick."""
    numbers = draw(KICK_SEED + seed, KICKS)
    place = numbers % np.uint64(num_gpus * num_slots)
    return place.astype(np.int64), ((numbers >> np.uint64(32)) % np.uint64(num_slots)).astype(np.int64)
