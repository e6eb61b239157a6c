"""What drafts of one forward a token have in common: each is drawn before the next forward and told to all ranks.

Legend: R requests, γ drafts a block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...comm.collectives import broadcast
from ...layers.draft_heads_host import HostDraftBlock, HostHeads
from ...parallel.groups import Group
from .base import DraftNoise, DraftRequests

Advance = Callable[[int, torch.Tensor], torch.Tensor]
"""``advance(k, tokens [R])`` -> the logits [R, V] of draft k + 1 behind draft k (the anchor for k = 0). Collective."""


class Chain:
    """Draws the drafts of a block one after the other. ``group``: the ranks that must have the same tokens."""

    def __init__(self, gamma: int, group: Group, device: torch.device) -> None:
        self._gamma, self._group, self._device = gamma, group, device
        self._heads = HostHeads(None, None)

    def draw(self, requests: DraftRequests, noise: DraftNoise | None, advance: Advance) -> HostDraftBlock | None:
        """The block of each request. Collective; ``noise`` is None on ranks that do not decide, which get None."""
        tokens = torch.tensor(requests.anchors, dtype=torch.int64, device=self._device)
        drawn: list[HostDraftBlock] = []
        for k in range(self._gamma):
            logits = advance(k, tokens)
            if noise is not None:
                drawn.append(self._place(k, logits, noise))
                tokens = torch.from_numpy(drawn[k].tokens[:, 0]).to(self._device)
            if len(tokens) and k + 1 < self._gamma:
                tokens = broadcast(tokens, self._group)
        if noise is None:
            return None
        probs = None if noise.temperatures is None else np.concatenate([place.probs for place in drawn], axis=1)
        return HostDraftBlock(np.concatenate([place.tokens for place in drawn], axis=1), probs, None)

    def _place(self, k: int, logits: torch.Tensor, noise: DraftNoise) -> HostDraftBlock:
        base = logits.float().cpu().numpy()[:, None]
        uniforms = None if noise.uniforms is None else noise.uniforms[:, k : k + 1]
        nothing = np.empty((len(base), 1, 0), np.float32)
        return self._heads.draw_block(base, nothing, np.empty(len(base), np.int64), noise.temperatures, uniforms)


def rows_at(slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The fields of :class:`~dspark.layers.attention.plan.Rows` int64 [5, R], one row a request."""
    return np.stack((positions, slots, positions, positions + 1, np.arange(len(slots))))
