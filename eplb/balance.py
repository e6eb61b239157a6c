"""Plans: loads in, placements out.

``plan`` is the library's own call; ``rebalance_experts`` has the signature and the shapes of the published balancer,
for engines that call that.

Shapes: L layers, E experts, P slots, G GPUs, K = P / G slots of a GPU, N nodes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .baseline import greedy_plan
from .cores import Core, load_core
from .flat import Aim, improve, place, tops
from .hierarchy import place_groups
from .placement import Placement, balance_of, count_copies, load_of_gpus, trivial_slots
from .rows import to_units
from .schedule import Effort
from .shape import Shape, check_load

# For layers where that is still below the greedy.
LONG = Effort(num_cycles=100, trade_every=1, patience=100)


class Rebalanced(NamedTuple):
    """``phy2log`` [L, P], ``log2phy`` [L, E, most copies] padded with -1, ``logcnt`` [L, E]."""

    phy2log: Any
    log2phy: Any
    logcnt: Any


def plan(
    load: np.ndarray,
    num_gpus: int,
    *,
    num_redundant: int = 0,
    num_nodes: int = 1,
    num_groups: int = 1,
    core: str = "auto",
    effort: Effort | None = None,
) -> Placement:
    """A placement of every layer's experts for ``load`` [L, E] (any unit, not negative).

    ``num_redundant`` slots beyond one per expert hold further copies; tokens of an expert are taken to be split evenly
    over them. With ``num_groups`` above 1 and several nodes, every group of experts stays on one node. No GPU holds
    two copies of an expert as long as the slots allow it, and no layer is less balanced than under the published
    greedy, unless that doubles copies on a GPU. A layer without any load gets experts in order. The result depends on
    the arguments alone, not on the core.

    Raises ``ValueError`` naming the numbers for sizes that cannot work and for loads that are not finite or negative.
    """
    load = check_load(load)
    shape = Shape(load.shape[1], load.shape[1] + num_redundant, num_gpus, num_nodes, num_groups)
    slots = trivial_slots(len(load), shape)
    loaded = np.flatnonzero(load.any(1))
    if loaded.size and not shape.num_forced_copies:
        slots[loaded] = _place(load[loaded], shape, load_core(core), effort or default_effort(shape))
    return Placement(slots, shape)


def default_effort(shape: Shape) -> Effort:
    """Small problems are searched longer: their search costs little and their optimum is hard to meet."""
    flat = shape.node_shape() if shape.hierarchical else shape
    cycles = min(max(16, 2**14 // (flat.slots_per_gpu * flat.num_slots)), 60)
    effort = Effort(num_cycles=cycles, patience=max(5, cycles // 4))
    if flat.num_slots < 128:
        return effort._replace(room=5)
    return effort._replace(room=30, most_again=32) if flat.slots_per_gpu > 3 else effort


def default_aim(shape: Shape) -> Aim:
    """Where a search stops.

    Many slots a GPU make the last step easy; with few, and a large problem, it would cost far more than it gives.
    """
    flat = shape.node_shape() if shape.hierarchical else shape
    if flat.num_slots < 128:
        return Aim(0.9999, 0.9999)
    if flat.slots_per_gpu > 5:
        return Aim(0.9995, 0.9985)
    return Aim(0.9985, 0.9965)


def _place(load: np.ndarray, shape: Shape, core: Core, effort: Effort) -> np.ndarray:
    units = to_units(load)
    if shape.hierarchical:
        slots = place_groups(units, shape, core, effort, default_aim(shape))
    else:
        slots = place(units, shape, core, effort, default_aim(shape))
    baseline = greedy_plan(load, shape, core.flat_greedy)
    worse = np.flatnonzero(_balance(load, slots, shape) < _balance(load, baseline, shape))
    if worse.size:
        slots[worse] = _no_worse(load[worse], units[worse], slots[worse], baseline[worse], shape, core)
    return slots


def _no_worse(
    load: np.ndarray, units: np.ndarray, slots: np.ndarray, baseline: np.ndarray, shape: Shape, core: Core
) -> np.ndarray:
    """For layers where the greedy did better: its placement where it has no second copies, or a longer search."""
    best = baseline.copy()
    again = np.flatnonzero(Placement(baseline, shape).num_duplicates > 0)
    best[again] = slots[again]
    if again.size and not shape.hierarchical:
        goal = tops(units[again], baseline[again], shape) - 2 * shape.slots_per_gpu
        further = improve(units[again], slots[again], shape, core, LONG, goal)
        better = _balance(load[again], further, shape) > _balance(load[again], slots[again], shape)
        best[again[better]] = further[better]
    return best


def _balance(load: np.ndarray, slots: np.ndarray, shape: Shape) -> np.ndarray:
    return balance_of(load_of_gpus(load, slots, count_copies(slots, shape.num_experts), shape.num_gpus))


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int | None, num_nodes: int, num_gpus: int
) -> Rebalanced:
    """The published balancer's call: ``weight`` [L, E] as a numpy array or a torch tensor, answers of the same kind.

    ``num_replicas`` is the number of slots, P. ``num_groups`` of ``None`` or 1 places globally. Answers are int64;
    slots of an expert in ``log2phy`` rise. Raises ``ValueError`` as ``plan``.
    """
    is_tensor = hasattr(weight, "detach")
    load = check_load(weight.detach().double().cpu().numpy() if is_tensor else weight, "weight")
    shape = Shape(load.shape[1], num_replicas, num_gpus, num_nodes, num_groups or 1)
    placement = plan(
        load, num_gpus, num_redundant=shape.num_redundant, num_nodes=num_nodes, num_groups=shape.num_groups
    )
    answers = (placement.slots.astype(np.int64), placement.experts_to_slots(), placement.counts)
    if is_tensor:
        import torch

        answers = tuple(torch.from_numpy(answer) for answer in answers)
    return Rebalanced(*answers)
