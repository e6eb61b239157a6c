"""No draft: plain decoding is speculation with blocks of nothing."""

from __future__ import annotations

import torch

from ...layers.draft_heads_host import HostDraftBlock
from ...layers.kernels import Kernels
from ...layers.params import ParamSource
from ...parallel.groups import Groups
from ..model_config import Config
from ..models.base import Model
from ..step import Step
from .base import DraftNoise, DraftRequests, DraftRoom, PlainDraft


class NoDraft(PlainDraft):
    """See :class:`.base.Drafter`."""

    gamma = longest = usual = 0
    resumes = True

    @classmethod
    def block_length(cls, config: Config, gamma: int | None) -> int:
        """0; ``ValueError`` when more is asked for."""
        if gamma:
            raise ValueError(f"--gamma is {gamma}, but there is no draft; choose a draft or leave --gamma out")
        return 0

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
        """See :meth:`.base.Drafter.load`."""
        return cls()

    def observe(self, taps: torch.Tensor, step: Step) -> None:
        """Nothing to learn."""

    def propose(self, requests: DraftRequests, noise: DraftNoise | None) -> HostDraftBlock | None:
        """Nothing to propose; the engine does not ask."""
        return None
