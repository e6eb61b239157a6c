"""Re-planning from the live placement: as few moved experts as it takes, under hard budgets.

Each layer is improved one change at a time from where it is. A change is a swap of two slots' experts or a new expert
in one slot; its price is the number of (GPU, expert) pairs it adds that the live placement does not have, since only
those must be transferred. Two things are improved:

1. *Copies* follow the load: an expert whose share has grown well above what the best copies would give gets a copy from
   one that can spare it. This helps the next window more than this one, because large shares make large surprises.
2. *Loads*: the fullest GPU takes the change that lowers the squared excess of all GPUs the most per moved expert.

A budget is spent over the layers where it lowers the sum of the fullest GPUs the most.

Shapes: L layers, E experts, G GPUs, K slots of a GPU, P = G * K.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .live_layer import Change, LiveLayer
from .placement import Placement
from .shape import check_load

MOST_STEPS = 4000
# Shares may exceed the largest share of the best copies by this factor before copies are moved for them.
UNEVEN = 1.05


class Replan(NamedTuple):
    """A placement near the live one; ``moved`` [L] counts the (GPU, expert) pairs that it adds in each layer."""

    placement: Placement
    moved: np.ndarray


class Step(NamedTuple):
    """A change of one layer, the experts moved up to here, the load of the fullest GPU then (mean of a GPU = 1)."""

    change: Change
    moved: int
    top: float


class Path(NamedTuple):
    """The improvement of one layer: its total load, the fullest GPU before, and the steps."""

    total: float
    start: float
    steps: list[Step]

    def moved(self, length: int) -> int:
        """Experts moved after so many steps."""
        return self.steps[length - 1].moved if length else 0

    def top(self, length: int) -> float:
        """The fullest GPU after so many steps."""
        return self.steps[length - 1].top if length else self.start


def replan(
    load: np.ndarray,
    current: Placement,
    *,
    target: float = 0.98,
    max_moves: int | None = None,
    max_bytes: int | None = None,
    expert_bytes: int | None = None,
) -> Replan:
    """Improve ``current`` for ``load`` [L, E] until every layer has the balance ``target`` or no change helps.

    Never moves more than ``max_moves`` experts in all layers together, nor more than ``max_bytes`` at ``expert_bytes``
    each. Groups stay on their nodes. Layers that reach ``target`` already and layers without load stay as they are.
    Raises ``ValueError`` for loads that do not fit the map and for a byte budget without the size of an expert.
    """
    load = check_load(load)
    if load.shape != current.counts.shape:
        raise ValueError(f"loads of {list(load.shape)} do not fit a map of {list(current.counts.shape)}")
    if not 0 < target <= 1:
        raise ValueError(f"a target balance must lie above 0 and at most at 1, not {target}")
    current.check_groups()
    budget = budget_of(max_moves, max_bytes, expert_bytes)
    paths = [improvement(row, current, layer, target, with_copies=True) for layer, row in enumerate(load)]
    if budget is not None and sum(path.moved(len(path.steps)) for path in paths) > budget:
        # Too little for everything: then what helps now comes first, without the copies that pay later.
        paths = [improvement(row, current, layer, target, with_copies=False) for layer, row in enumerate(load)]
    lengths = spend(paths, budget)
    slots, moved = current.slots.copy(), np.zeros(len(load), np.int64)
    for layer, (path, length) in enumerate(zip(paths, lengths)):
        for step in path.steps[:length]:
            for place, expert in step.change:
                slots[layer, place] = expert
        moved[layer] = path.moved(length)
    assert budget is None or moved.sum() <= budget, (moved.sum(), budget)
    return Replan(Placement(slots, current.shape), moved)


def budget_of(max_moves: int | None, max_bytes: int | None, expert_bytes: int | None) -> int | None:
    """Experts that may be moved, or ``None`` without a limit. Raises ``ValueError`` for limits that mean nothing."""
    limits = []
    for name, value in (("max_moves", max_moves), ("max_bytes", max_bytes)):
        if value is not None and value < 0:
            raise ValueError(f"{name} is {value}; it must be at least 0")
    if max_moves is not None:
        limits.append(int(max_moves))
    if max_bytes is not None:
        if expert_bytes is None or expert_bytes < 1:
            raise ValueError(f"a budget of {max_bytes} bytes needs the size of an expert in bytes, not {expert_bytes}")
        limits.append(int(max_bytes) // int(expert_bytes))
    return min(limits) if limits else None


def improvement(load: np.ndarray, current: Placement, layer: int, target: float, with_copies: bool) -> Path:
    """The steps from the live placement of one ``layer`` to the balance ``target``, or until nothing helps."""
    total = float(load.sum())
    if total == 0:
        return Path(0.0, 0.0, [])
    state = LiveLayer(load * (current.shape.num_gpus / total), current, layer)
    path = Path(total, state.top, [])
    if state.top <= 1 / target:
        return path
    while with_copies and len(path.steps) < state.shape.num_slots:
        change = state.evener_copies(UNEVEN)
        if change is None:
            break
        state.apply(change)
        path.steps.append(Step(change, state.moved, state.top))
    for _ in range(MOST_STEPS):
        change = state.lighter_top() if state.top > 1 / target else None
        if change is None:
            break
        state.apply(change)
        path.steps.append(Step(change, state.moved, state.top))
    return path


def spend(paths: list[Path], budget: int | None) -> list[int]:
    """How many steps of each path to take within ``budget`` moved experts in all."""
    if budget is None:
        return [len(path.steps) for path in paths]
    lengths = [0] * len(paths)
    while True:
        worth, chosen = 0.0, None
        for n, path in enumerate(paths):
            start = lengths[n]
            for end in range(start + 1, len(path.steps) + 1):
                price = path.moved(end) - path.moved(start)
                gain = (path.top(start) - path.top(end)) * path.total
                if price <= budget and gain > worth * max(price, 0.5):
                    worth, chosen = gain / max(price, 0.5), (n, end, price)
        if chosen is None:
            return lengths
        lengths[chosen[0]] = chosen[1]
        budget -= chosen[2]
