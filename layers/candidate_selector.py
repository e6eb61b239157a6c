"""The selector of a DFlash 2 draft: of the best tokens of each place it chooses those that follow one another.

Legend: B blocks, γ places, K candidates of a place, d hidden size, r rank, V vocabulary.

Candidate b behind token a scores U(b) + <A[a] * (H h), C[b]>, with the place's own logit U and state h. Places are
drawn left to right, each behind the token drawn before it (the anchor at the first), so the law of a token is that of
K scores: nothing looks ahead. ``A`` and ``C`` are the predecessor and successor codebooks [V, r], ``H`` [r, d].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from .draft_heads_host import HostDraftBlock, sample_rows
from .params import Scope


class SelectorSizes(NamedTuple):
    """``top_k`` candidates a place. Logits are multiplied by ``multiplier`` and then, if ``softcap`` is not 0, bent to
    ``softcap`` tanh(logits / softcap)."""

    rank: int
    top_k: int
    multiplier: float = 1.0
    softcap: float = 0.0


class Candidates(NamedTuple):
    """``ids`` int64 [B, γ, K], their logits ``unary`` [B, γ, K], and ``features`` H h [B, γ, r]."""

    ids: np.ndarray
    unary: np.ndarray
    features: np.ndarray


class Codebooks(NamedTuple):
    """``predecessor`` and ``successor`` [V, r]."""

    predecessor: np.ndarray
    successor: np.ndarray

    def scores(self, found: Candidates, place: int, previous: np.ndarray) -> np.ndarray:
        """The scores [B, K] of the candidates of ``place`` behind tokens ``previous`` [B]."""
        bent = self.predecessor[previous] * found.features[:, place]
        return found.unary[:, place] + np.einsum("br,bkr->bk", bent, self.successor[found.ids[:, place]])

    def walk(
        self, found: Candidates, anchors: np.ndarray, temperatures: np.ndarray | None, uniforms: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens int64 [B, γ] behind ``anchors`` [B], and the laws float64 [B, γ, K] they were drawn from by inverse
        CDF of ``uniforms`` [B, γ]; 0 is greedy among ``temperatures`` [B], and so are all if there are none."""
        tokens = np.empty(found.ids.shape[:2], np.int64)
        laws = None if temperatures is None else np.empty(found.ids.shape)
        previous = anchors
        for k in range(tokens.shape[1]):
            scores = self.scores(found, k, previous)
            if laws is None:
                chosen = scores.argmax(axis=1)
            else:
                chosen = sample_rows(scores, temperatures, uniforms[:, k], laws[:, k])
            previous = tokens[:, k] = np.take_along_axis(found.ids[:, k], chosen[:, None], axis=1)[:, 0]
        return tokens, laws


class CandidateSelector:
    """The selector's weights, codebooks on the host."""

    def __init__(self, source: Scope, sizes: SelectorSizes) -> None:
        self._sizes = sizes
        self._project = source.take("hidden_projection.weight", dtype=torch.float32).t().contiguous()
        names = ("predecessor_codebook", "successor_codebook")
        self._codebooks = Codebooks(*(source.take(name, dtype=torch.float32).cpu().numpy() for name in names))

    def candidates(self, hidden: torch.Tensor, logits: torch.Tensor) -> Candidates:
        """From states ``hidden`` [B, γ, d] and ``logits`` [B, γ, V]; the best come first."""
        unary, ids = logits.float().topk(self._sizes.top_k, dim=-1)
        unary = unary * self._sizes.multiplier
        if self._sizes.softcap:
            unary = self._sizes.softcap * torch.tanh(unary / self._sizes.softcap)
        return Candidates(*(x.cpu().numpy() for x in (ids, unary, hidden.float() @ self._project)))

    def draw_block(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        anchors: np.ndarray,
        temperatures: np.ndarray | None,
        uniforms: np.ndarray | None,
    ) -> HostDraftBlock:
        """The drafts of B blocks, see :class:`Codebooks`."""
        found = self.candidates(hidden, logits)
        tokens, laws = self._codebooks.walk(found, anchors, temperatures, uniforms)
        probs = None
        if laws is not None:
            probs = np.zeros(logits.shape)
            np.put_along_axis(probs, found.ids, laws, axis=2)
        return HostDraftBlock(tokens, probs, None)
