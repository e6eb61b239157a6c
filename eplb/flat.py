"""A placement without groups: copies, a first packing, the search, and the published greedy as a floor.

Shapes: B rows (one problem each: a layer, or one node of a layer), E experts, G GPUs, K slots of a GPU, P = G * K.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .cores import Core
from .pairs import best_pairs, limits
from .placement import count_copies, load_of_gpus
from .rows import Rows
from .schedule import Effort
from .shape import Shape
from .starts import choices_of_copies

# Problems of fewer slots than this are tried from many choices of copies, and from so many of these for long.
SMALL, PROMISING = 40, 64


class Aim(NamedTuple):
    """Balances, as shares of what no placement can beat: where a search stops, and where a long one stops."""

    close: float
    nearly: float


def place(units: np.ndarray, shape: Shape, core: Core, effort: Effort, aim: Aim, together: int = 1) -> np.ndarray:
    """Experts of the slots, [B, P] int32, for loads ``units`` [B, E] int32 (see ``rows.to_units``).

    A row is searched until its fullest GPU is within ``aim`` of what no placement can beat; the fullest GPU of
    ``together`` rows that follow each other counts, as if they were one.
    """
    assert not shape.num_forced_copies, shape
    num_gpus = shape.num_gpus
    count = core.spread_copies(units, shape.num_slots, num_gpus)
    floor = lowest_top(units, count, shape).reshape(-1, together).max(1).repeat(together)
    if shape.slots_per_gpu == 2 and shape.num_redundant:
        weight = units.astype(np.int64)
        count = best_pairs(weight, [count, *core.search_copies(weight, count, limits(weight, num_gpus), num_gpus)])
    goal, nearly = (np.ceil(floor / balance).astype(np.int32) for balance in aim)
    if shape.num_slots < SMALL and shape.num_redundant and shape.slots_per_gpu > 1:
        return _place_small(units, count, shape, core, effort, goal)
    rows = Rows.of(units, count, core.deal(units // count, count, num_gpus))
    core.refine(rows, goal, nearly, effort)
    return rows.slot.reshape(len(units), -1)


def _place_small(
    units: np.ndarray, count: np.ndarray, shape: Shape, core: Core, effort: Effort, goal: np.ndarray
) -> np.ndarray:
    """The best of many starts: a short search from each choice of copies, then a long one from the most promising."""
    choices = choices_of_copies(count, shape.num_gpus)
    short = effort._replace(num_cycles=6, patience=6, trade_every=9, most_again=9)
    rows = _search_choices(units, choices, shape, core, short, goal)
    few = rows.load.max(1).reshape(choices.shape[:2]).argsort(1, kind="stable")[:, :PROMISING]
    choices = np.take_along_axis(rows.count.reshape(choices.shape), few[:, :, None], 1)
    rows = _search_choices(units, choices.astype(np.int64), shape, core, effort, goal)
    best = rows.load.max(1).reshape(len(units), -1).argmin(1)
    return rows.slot.reshape(len(units), -1, shape.num_slots)[np.arange(len(units)), best]


def _search_choices(
    units: np.ndarray, choices: np.ndarray, shape: Shape, core: Core, effort: Effort, goal: np.ndarray
) -> Rows:
    """Searches from all ``choices`` [B, N, E] of copies, as B * N rows."""
    num_choices, num_experts = choices.shape[1:]
    flat = choices.reshape(-1, num_experts)
    many, goals = np.repeat(units, num_choices, axis=0), np.repeat(goal, num_choices)
    rows = Rows.of(many, flat, core.deal(many // flat, flat, shape.num_gpus))
    core.refine(rows, goals, goals, effort)
    return rows


def improve(
    units: np.ndarray, slots: np.ndarray, shape: Shape, core: Core, effort: Effort, goal: np.ndarray
) -> np.ndarray:
    """``slots`` [B, P], without two copies of an expert on a GPU, searched further to ``goal`` [B]: [B, P] int32."""
    count = count_copies(slots, shape.num_experts)
    rows = Rows.of(units, count, slots.reshape(len(units), shape.num_gpus, -1))
    core.refine(rows, goal.astype(np.int32), goal.astype(np.int32), effort)
    return rows.slot.reshape(len(units), -1)


def lowest_top(units: np.ndarray, count: np.ndarray, shape: Shape) -> np.ndarray:
    """A load that the fullest GPU of no placement can be below, [B] float64; ``count`` makes the largest share least.

    The mean; the largest share; without redundancy, the most loaded expert beside the least loaded ones.
    """
    mean = units.sum(1, dtype=np.int64) / shape.num_gpus
    top = (units // count).max(1)
    if not shape.num_redundant:
        top = top + np.sort(units, axis=1)[:, : shape.slots_per_gpu - 1].sum(1, dtype=np.int64)
    return np.maximum(mean, top)


def tops(units: np.ndarray, slots: np.ndarray, shape: Shape) -> np.ndarray:
    """Load of the fullest GPU, [B] float64, under ``slots`` [B, P]."""
    return load_of_gpus(units, slots, count_copies(slots, shape.num_experts), shape.num_gpus).max(1)
