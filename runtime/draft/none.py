"""No draft: plain decoding is speculation with blocks of nothing."""

from __future__ import annotations

import torch

from ...layers.draft_heads_host import HostDraftBlock
from ...layers.kernels import Kernels
from ...layers.params import ParamSource
from ...parallel.groups import Groups
from ..model_config import Config
from ..models.base import Model, TapKind
from ..step import Step
from .base import DraftNoise, DraftRequests, DraftRoom


class NoDraft:
    """See :class:`.base.Drafter`."""

    gamma = 0
    caches = ()
    expert_layers = ()
    tap_kind: TapKind = "mean"
    resumes = True

    @classmethod
    def tap_layers(cls, config: Config) -> tuple[int, ...]:
        """None."""
        return ()

    @classmethod
    def max_gamma(cls, config: Config) -> int:
        """0."""
        return 0

    @classmethod
    def default_gamma(cls, config: Config) -> int:
        """0."""
        return 0

    @classmethod
    def has_confidence(cls, config: Config) -> bool:
        """There is nothing to be confident of."""
        return False

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
    ) -> NoDraft:
        """Raises ``ValueError`` when blocks of more than nothing are asked for."""
        if gamma:
            raise ValueError(f"--gamma is {gamma}, but there is no draft; choose a draft or leave --gamma out")
        return cls()

    def observe(self, taps: torch.Tensor, step: Step) -> None:
        """Nothing to learn."""

    def propose(self, requests: DraftRequests, noise: DraftNoise | None) -> HostDraftBlock | None:
        """Nothing to propose; the engine does not ask."""
        return None
