"""What no placement can beat, why, and how much redundancy a wanted balance takes.

Three arguments bound the fullest GPU from below, whatever the copies and wherever they lie (even split over copies):

*share*: the copies at hand make the largest load per copy only so small.

*company*: take any load z up to T / K. A GPU within T that holds one share above T - (K-1) z has K-1 other slots below
z in the mean. So over all slots, what shares exceed T - (K-1) z by must not be more than what others fall short of z
by: hot copies need enough cold ones beside them. Copies are free, so for each expert the best number of copies counts,
with a price on slots (a Lagrangian bound, which holds for every price).

*groups*: with groups pinned to nodes, the fullest node of the most even grouping.

Loads of a layer are divided by the mean of a GPU, so a bound is a number above 1 and the best balance its inverse.

Shapes: L layers, E experts, G GPUs, K slots of a GPU, P = G * K.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .balance import plan
from .hierarchy import even_groupings
from .plain.copies import spread_copies
from .shape import Shape, check_load

# How finely the *company* argument is tried: levels of z, prices of a slot, halvings of the interval.
LEVELS, PRICES, HALVINGS = 20, 9, 12
# A bound that lowers the best balance by less than this is not worth a reason of its own.
SLIGHT = 0.0005


class Bound(NamedTuple):
    """The best balance that any placement of a layer could have, and what stands in the way of a better one.

    ``reason`` is ``none``, ``hot expert`` (one copy without redundancy, or a copy on every GPU), ``slots`` (too few),
    ``company`` or ``groups``; ``expert`` the expert concerned or -1; ``detail`` a sentence with the numbers.
    """

    balance: float
    reason: str
    expert: int
    detail: str


def upper_bounds(load: np.ndarray, shape: Shape) -> list[Bound]:
    """One :class:`Bound` a layer for ``load`` [L, E]. Raises ``ValueError`` as ``plan``."""
    load = check_load(load)
    if load.shape[1] != shape.num_experts:
        raise ValueError(f"loads of {load.shape[1]} experts do not fit a deployment of {shape.num_experts}")
    return [_bound(row, shape) for row in load]


def _bound(load: np.ndarray, shape: Shape) -> Bound:
    if not load.any() or shape.num_forced_copies:
        return Bound(1.0, "none", -1, "nothing prevents an even load")
    load = load * (shape.num_gpus / load.sum())
    if shape.hierarchical:
        return _grouped(load, shape)
    return _flat(load, shape)


def _flat(load: np.ndarray, shape: Shape) -> Bound:
    share = _share(load, shape)
    top = _company(load, 1 / share.balance, shape)
    if top * share.balance < 1 + SLIGHT:
        return share
    if share.balance < 1:
        return share._replace(balance=1 / top, detail=share.detail + "; and every GPU must fill all its slots")
    expert = int(load.argmax())
    detail = (
        f"every GPU must fill its {shape.slots_per_gpu} slots, and too few experts are cold enough to stand beside the "
        f"hot ones (expert {expert}: {load[expert]:.2f} times the mean load of a GPU)"
    )
    return Bound(1 / top, "company", expert, detail)


def _share(load: np.ndarray, shape: Shape) -> Bound:
    count = spread_copies(load[None], shape.num_slots, shape.num_gpus)[0]
    expert = int((load / count).argmax())
    share, copies = float(load[expert] / count[expert]), int(count[expert])
    if share <= 1:
        return Bound(1.0, "none", -1, "nothing prevents an even load")
    hot = f"expert {expert} carries {load[expert]:.2f} times the mean load of a GPU"
    if copies == shape.num_gpus:
        return Bound(1 / share, "hot expert", expert, f"{hot}, and has a copy on every GPU already")
    left = shape.num_redundant
    detail = f"{hot}; {left} redundant slots leave it at most {copies} {'copy' if copies == 1 else 'copies'}"
    return Bound(1 / share, "slots" if left else "hot expert", expert, detail)


def _company(load: np.ndarray, low: float, shape: Shape) -> float:
    """A load that the fullest GPU must have by the *company* argument, or ``low`` where that proves no more."""
    if _fits_company(load, low * (1 + SLIGHT), shape):
        return low
    high = low * 1.5
    while not _fits_company(load, high, shape):
        low, high = high, high * 1.5
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits_company(load, middle, shape) else (middle, high)
    return low


def _fits_company(load: np.ndarray, top: float, shape: Shape) -> bool:
    """Whether the *company* argument leaves room for a fullest GPU of ``top``."""
    others = shape.slots_per_gpu - 1
    if not others:
        return True
    cold = (np.arange(1, LEVELS + 1) / LEVELS * (top / shape.slots_per_gpu))[:, None]
    hot = top - others * cold
    price = cold + (hot - cold) * np.linspace(0, 1, PRICES)
    most = float(shape.num_gpus)
    until_hot = np.clip(np.floor(load / hot), 1, most)
    from_cold = np.clip(np.ceil(load / cold), 1, most)
    best = np.full((LEVELS, PRICES, len(load)), np.inf)
    # The cost of an expert is piecewise linear in its copies, so its least value is at an end of a piece.
    for copies in (
        np.ones_like(until_hot),
        until_hot,
        np.minimum(until_hot + 1, most),
        np.maximum(from_cold - 1, 1),
        from_cold,
        np.full_like(until_hot, most),
    ):
        excess = np.maximum(load - copies * hot, 0) - np.maximum(copies * cold - load, 0)
        np.minimum(best, excess[:, None] + price[:, :, None] * copies[:, None], out=best)
    # A thousand-millionth is far above the rounding of these sums and far below anything that matters.
    return bool((best.sum(2) - price * shape.num_slots).max() <= 1e-9 * shape.num_gpus)


def _grouped(load: np.ndarray, shape: Shape) -> Bound:
    groups = load.reshape(shape.num_groups, -1).sum(1)
    fullest = even_groupings(groups, shape.num_nodes)
    node = fullest / shape.gpus_per_node
    whole = _flat(load, Shape(shape.num_experts, shape.num_slots, shape.num_gpus))
    if 1 / node >= whole.balance - 1e-12:
        return whole
    detail = (
        f"{shape.num_groups} groups over {shape.num_nodes} nodes leave the fullest node at least {node:.3f} times the "
        f"mean load of a node; redundancy does not help, placing without groups would"
    )
    return Bound(1 / node, "groups", -1, detail)


class Redundancy(NamedTuple):
    """Redundant slots for a wanted balance of every layer: fewer than ``proven`` cannot reach it; ``found`` does.

    ``found`` is ``None`` where no redundancy that was tried reached it, with ``best`` the worst layer's balance then.
    """

    wanted: float
    proven: int | None
    found: int | None
    best: float


def smallest_redundancy(
    load: np.ndarray, shape: Shape, wanted: float, most_slots_per_gpu: int = 32, core: str = "auto"
) -> Redundancy:
    """How many redundant slots let every layer reach the balance ``wanted``, in steps of one slot on every GPU.

    Tries slots per GPU from the fewest that hold all experts, up to ``most_slots_per_gpu`` more than that.
    """
    load = check_load(load)
    if not 0 < wanted <= 1:
        raise ValueError(f"a wanted balance must lie above 0 and at most at 1, not {wanted}")
    fewest = -(-shape.num_experts // shape.num_gpus)
    proven, best = None, 0.0
    for slots_per_gpu in range(fewest, fewest + most_slots_per_gpu + 1):
        redundant = slots_per_gpu * shape.num_gpus - shape.num_experts
        trial = Shape(
            shape.num_experts, shape.num_experts + redundant, shape.num_gpus, shape.num_nodes, shape.num_groups
        )
        if trial.num_forced_copies:
            break
        if min(bound.balance for bound in upper_bounds(load, trial)) < wanted:
            continue
        proven = redundant if proven is None else proven
        placement = plan(
            load,
            shape.num_gpus,
            num_redundant=redundant,
            num_nodes=shape.num_nodes,
            num_groups=shape.num_groups,
            core=core,
        )
        reached = float(placement.balance(load).min())
        best = max(best, reached)
        if reached >= wanted:
            return Redundancy(wanted, proven, redundant, reached)
    return Redundancy(wanted, proven, None, best)
