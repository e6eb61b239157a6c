"""The draft seam: what the engine needs of a draft.

Legend: R requests, γ drafts a block, T rows of a target step, V vocabulary.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch

from ...layers.draft_heads_host import HostDraftBlock
from ...layers.kernels import Kernels
from ...layers.moe import MoE
from ...layers.params import ParamSource
from ...parallel.groups import Groups
from ..balance.placement import PlacedExperts
from ..cache import Cache
from ..model_config import Config
from ..models.base import Model, TapKind
from ..spec.tree import DraftTree
from ..step import Step
from .growth import TreeShape


class DraftRequests(NamedTuple):
    """The requests to draft for: their cache ``slots``, the positions ``starts`` of their anchors, and the ``anchors``
    themselves (the last token of each, which the target has not seen yet). One entry a request, known on every rank.

    ``others``: how many requests every row owner of the tp group drafts for in this step, in order; this rank's own
    number included.
    """

    slots: list[int]
    starts: list[int]
    anchors: list[int]
    others: tuple[int, ...]


class DraftNoise(NamedTuple):
    """How drafts are drawn: ``temperatures`` [R] float64 of the requests (0 is greedy) and ``uniforms`` [R, γ] in
    [0, 1); both None where all are greedy. The draft's law needs no other filter: verification is exact for any law."""

    temperatures: np.ndarray | None
    uniforms: np.ndarray | None


class DraftRoom(NamedTuple):
    """How much a draft must be able to hold: requests, tokens of one request, and rows that may be stored and taken
    back before the rows of a window before them are read: those of two blocks. ``experts``: where its experts are.
    ``tree``: what it proposes, if not one draft behind the other."""

    num_slots: int
    max_context: int
    max_verify: int
    experts: PlacedExperts | None = None
    tree: TreeShape | None = None


class DraftElsewhere(NamedTuple):
    """The draft as an earlier pipeline stage knows it: it lives on the last stage, and its blocks are this long."""

    gamma: int
    tree: TreeShape | None = None
    caches: tuple[Cache, ...] = ()
    expert_layers: tuple[MoE, ...] = ()

    def settle(self) -> None:
        """Nothing is kept here."""


class Drafter(Protocol):
    """Proposes tokens and learns from what the target computed.

    State is a function of (slot, position), as in the target's cache: whatever was rejected is overwritten before it is
    read, so nothing has to be undone. Every call is made on every rank of the draft's groups, in the same order.
    """

    gamma: int
    """Tokens of a block, or of a tree's longest path; 0 for a draft that proposes nothing."""

    tree: TreeShape | None
    """The trees it proposes; None for a draft that proposes blocks."""

    caches: tuple[Cache, ...]
    """The rings by slot and position that hold all it knows of a request; restored where a prefix is reused."""

    expert_layers: tuple[MoE, ...]
    """Its own layers with experts, in order."""

    resumes: ClassVar[bool]
    """Whether ``caches`` are all that a request needs which goes on behind a stored prefix."""

    grows_trees: ClassVar[bool]
    """Whether it can propose trees."""

    tap_kind: ClassVar[TapKind]
    """What it reads of the layers that :meth:`tap_layers` names."""

    @classmethod
    def tap_layers(cls, config: Config) -> tuple[int, ...]:
        """The target layers whose output this draft reads; ``ValueError`` if the checkpoint has no such draft."""
        ...

    @classmethod
    def max_gamma(cls, config: Config) -> int:
        """The longest block this draft can propose."""
        ...

    @classmethod
    def default_gamma(cls, config: Config) -> int:
        """The block it proposes unless the user says."""
        ...

    @classmethod
    def block_length(cls, config: Config, gamma: int | None) -> int:
        """``gamma``, or the usual block; ``ValueError`` naming both numbers if the draft proposes no such block."""
        ...

    @classmethod
    def has_confidence(cls, config: Config) -> bool:
        """Whether its blocks come with confidences, which verification may be trimmed by."""
        ...

    @classmethod
    def load(
        cls,
        config: Config,
        source: ParamSource,
        target: Model,
        groups: Groups,
        kernels: Kernels,
        room: DraftRoom,
        gamma: int | None,
    ) -> Drafter:
        """Build the draft. ``gamma`` None is the default; ``ValueError`` if it is above :meth:`max_gamma`."""
        ...

    def observe(self, taps: torch.Tensor, step: Step) -> None:
        """Take in the ``taps`` [T, ...] of a target ``step``; rejected rows do no harm. Collective."""
        ...

    def settle(self) -> None:
        """Bring ``caches`` up to date with all that was observed: before they are copied, or copied into."""
        ...

    def propose(
        self, requests: DraftRequests, noise: DraftNoise | None
    ) -> HostDraftBlock | tuple[DraftTree, ...] | None:
        """Draft a block for each request, or a tree, if that is its shape. Collective; ``noise`` is None on ranks that
        do not decide, which get None."""
        ...


class PlainDraft:
    """What most drafts answer to :class:`Drafter`: nothing is tapped, no confidences, no experts, and blocks of any
    length up to ``longest``."""

    tap_kind: TapKind = "mean"
    tree: TreeShape | None = None
    caches: tuple[Cache, ...] = ()
    expert_layers: tuple[MoE, ...] = ()
    resumes = grows_trees = False
    longest: ClassVar[int]
    usual: ClassVar[int | None] = None
    """The block it proposes unless the user says; None for the longest."""

    def settle(self) -> None:
        """Nothing is put off."""

    @classmethod
    def tap_layers(cls, config: Any) -> tuple[int, ...]:
        """None."""
        return ()

    @classmethod
    def max_gamma(cls, config: Any) -> int:
        """See :meth:`Drafter.max_gamma`."""
        return cls.longest

    @classmethod
    def default_gamma(cls, config: Any) -> int:
        """See :meth:`Drafter.default_gamma`."""
        return cls.max_gamma(config) if cls.usual is None else cls.usual

    @classmethod
    def has_confidence(cls, config: Any) -> bool:
        """None."""
        return False

    @classmethod
    def block_length(cls, config: Any, gamma: int | None) -> int:
        """See :meth:`Drafter.block_length`."""
        most = cls.max_gamma(config)
        if gamma is not None and not 1 <= gamma <= most:
            raise ValueError(f"--gamma is {gamma}, but the draft proposes blocks of 1 to {most} tokens")
        return cls.default_gamma(config) if gamma is None else gamma
