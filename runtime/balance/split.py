"""Which copy of an expert a pick goes to while requests run, beyond taking copies in turn: the splits of ``eplb``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...eplb.dispatch import ReplicaSplit
from ...eplb.placement import Placement
from ...eplb.shape import Shape
from ...layers.expert_slots import CopyRule


class Nearest:
    """Always the copy nearest to this rank: its own, else one on its node, else any. Nothing is agreed on."""

    needs_tokens = False

    def __init__(self, slots: Sequence[int], shape: Shape, rank: int) -> None:
        self._slots = _split(slots, shape).nearest()[rank]

    def __call__(self, experts: np.ndarray, tokens: np.ndarray, rank: int) -> np.ndarray:
        """See :class:`CopyRule`."""
        return self._slots[experts]


class Weighted:
    """Such that the ranks' experts get as nearly alike as the copies allow, in every forward anew."""

    needs_tokens = True

    def __init__(self, slots: Sequence[int], shape: Shape, rank: int) -> None:
        self._split = _split(slots, shape)

    def __call__(self, experts: np.ndarray, tokens: np.ndarray, rank: int) -> np.ndarray:
        """See :class:`CopyRule`."""
        return self._split.assign(experts, tokens[:rank].sum(0), self._split.weighted(tokens.sum(0)))


def copy_rule(split: str, slots: Sequence[int], shape: Shape, rank: int) -> CopyRule | None:
    """How picks of a layer with these ``slots`` choose copies on ``rank`` of moe_ep; None: in turn.

    ``split``: a value of ``--replica-split``.
    """
    kind = {"even": None, "nearest": Nearest, "weighted": Weighted}[split]
    return None if kind is None else kind(slots, shape, rank)


def _split(slots: Sequence[int], shape: Shape) -> ReplicaSplit:
    return ReplicaSplit(Placement(np.array([slots]), shape), 0, "auto")
