"""N-gram lookup: what followed the latest tokens when they last stood in the text. No weights.

Legend: R requests, γ drafts a block, K rows of a target step.
"""

from __future__ import annotations

import numpy as np
import torch

from ...layers.draft_heads_host import HostDraftBlock
from ...layers.kernels import Kernels
from ...layers.params import ParamSource
from ...parallel.groups import Groups
from ..model_config import Config
from ..models.base import Model
from ..step import Step
from .base import DraftNoise, DraftRequests, DraftRoom, PlainDraft

MAX_NGRAM = 4
"""The longest ending of the text that is looked for; shorter ones, down to one token, come after it."""


class LookupDrafter(PlainDraft):
    """See :class:`.base.Drafter`. Knows the tokens of each slot; where they say nothing, nothing is proposed."""

    longest, usual = 32, 4

    def __init__(self, room: DraftRoom, gamma: int) -> None:
        self.gamma = gamma
        self._tokens = np.full((room.num_slots, room.max_context + 1), -1, np.int64)

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
    ) -> LookupDrafter:
        """See :meth:`.base.Drafter.load`."""
        return cls(room, cls.block_length(config, gamma))

    def observe(self, taps: torch.Tensor, step: Step) -> None:
        """See :meth:`.base.Drafter.observe`; only the step's tokens matter."""
        tokens, keys = step.plan.gather(step.tokens), step.plan.keys
        slots, positions = (x.cpu().numpy() for x in (keys.slots, keys.positions))
        self._tokens[slots, positions] = tokens.cpu().numpy()

    def propose(self, requests: DraftRequests, noise: DraftNoise | None) -> HostDraftBlock | None:
        """See :meth:`.base.Drafter.propose`."""
        if noise is None:
            return None
        drafts = np.zeros((len(requests.slots), self.gamma), np.int64)
        lens = np.zeros(len(requests.slots), np.int64)
        for r, (slot, start, anchor) in enumerate(zip(requests.slots, requests.starts, requests.anchors)):
            self._tokens[slot, start] = anchor
            found = continuation(self._tokens[slot, : start + 1], self.gamma)
            drafts[r, : len(found)], lens[r] = found, len(found)
        return HostDraftBlock(drafts, None, None, lens)


def continuation(text: np.ndarray, count: int) -> np.ndarray:
    """Up to ``count`` tokens that followed the latest earlier place of the longest ending of ``text`` [L]."""
    for size in range(min(MAX_NGRAM, len(text) - 1), 0, -1):
        ending, places = text[-size:], np.ones(len(text) - size, bool)
        for offset in range(size):
            places &= text[offset : len(text) - size + offset] == ending[offset]
        found = np.flatnonzero(places)
        if len(found):
            return text[found[-1] + size : found[-1] + size + count]
    return text[:0]
