"""The inference form of ``draft_heads.py`` on host arrays, for steps that are all call overhead.

Shapes: B blocks, γ places, d hidden size, r Markov rank, V vocabulary. A place costs a few numpy calls; a vanilla
head over a small vocabulary becomes one table of biases. Same results as :func:`~.draft_heads.draw_block` up to
rounding. That cannot bias anything: whatever law a draft was drawn from is the law that is handed on.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from .draft_heads import ConfidenceHead, MarkovHead
from .kernels import Kernels
from .kernels.draft import MAX_TABLE_BYTES, MIN_TEMPERATURE


class HostDraftBlock(NamedTuple):
    """What the heads made of B blocks."""

    tokens: np.ndarray
    """[B, γ] int64."""
    probs: np.ndarray | torch.Tensor | None
    """[B, γ, V] float64, the laws the tokens were drawn from; ``None`` if all blocks are greedy. A tensor where they
    were drawn on a device, and stay there."""
    confidence_logits: np.ndarray | None
    """[B, γ], ``None`` without a confidence head."""
    lens: np.ndarray | None = None
    """[B] int64: how many of the tokens are proposed, decided by nothing behind the anchor; ``None`` for all."""


class HostHeads:
    """The weights of the heads as host arrays; made once, when a draft is loaded on a CPU. ``kernels`` may have a
    compiled form of the greedy loop."""

    def __init__(
        self,
        markov: MarkovHead | None,
        confidence: ConfidenceHead | None,
        max_table_bytes: int = MAX_TABLE_BYTES,
        kernels: Kernels | None = None,
    ) -> None:
        weights = {} if markov is None else {k: v.detach().float().cpu().numpy() for k, v in markov.weights.items()}
        self.kind = None if markov is None else markov.kind
        self.w1, self.w2 = weights.get("markov_w1.weight"), weights.get("markov_w2.weight")
        self.weights = weights
        self._max_table_bytes, self._kernels = max_table_bytes, kernels
        self._greedy = self._at_once = None  # the compiled loop, alone and together with the confidences
        if self.kind == "vanilla" and kernels is not None and kernels.backend == "numba":
            w1, w2 = torch.from_numpy(self.w1), torch.from_numpy(self.w2)
            self._greedy = kernels.bind("markov_greedy", w1=w1, w2=w2)
        self.confidence_weight = None if confidence is None else confidence.weight[0].detach().float().cpu().numpy()
        bias = None if confidence is None else confidence.bias
        self.confidence_bias = 0.0 if bias is None else float(bias)
        self._confidence_by_prev: np.ndarray | None = None

    @functools.cached_property
    def table(self) -> np.ndarray | None:
        """Every bias of a vanilla head over a small vocabulary, [V, V]."""
        if self.kind != "vanilla" or 4 * self.w1.shape[0] ** 2 > self._max_table_bytes:
            return None
        return self.w1 @ self.w2.T

    def draw_block(
        self,
        base_logits: np.ndarray,
        hidden: np.ndarray,
        anchors: np.ndarray,
        temperatures: np.ndarray | None = None,
        uniforms: np.ndarray | None = None,
    ) -> HostDraftBlock:
        """Choose the drafts of B blocks left to right.

        Args:
            base_logits: [B, γ, V] float32, row k for draft x_{k+1}; ``hidden`` [B, γ, d] the states the heads read.
            anchors: [B] int64, x_0.
            temperatures: [B] of the draft's law, 0 is greedy; ``None`` if all are.
            uniforms: [B, γ] float64 in [0, 1), the draft's noise; for the inverse CDF of softmax(logits / T).
        """
        if temperatures is None and self._greedy is not None:
            return self._draw_compiled(base_logits, hidden, anchors)
        num_blocks, gamma, vocab_size = base_logits.shape
        tokens = np.empty((num_blocks, gamma), dtype=np.int64)
        probs = None if temperatures is None else np.empty((num_blocks, gamma, vocab_size))
        prev, part = anchors, self._hidden_part(hidden)
        memory = np.zeros((num_blocks, 0 if self.w1 is None else self.w1.shape[1]), dtype=np.float32)
        for k in range(gamma):
            logits = base_logits[:, k]
            if self.table is not None:
                logits = logits + self.table[prev]
            elif self.kind is not None:
                feature, memory = self._feature(k, prev, part, memory)
                logits = logits + feature @ self.w2.T
            if probs is None:
                prev = logits.argmax(axis=1)
            else:
                prev = sample_rows(logits, temperatures, uniforms[:, k], probs[:, k])
            tokens[:, k] = prev
        return HostDraftBlock(tokens, probs, self.confidence(hidden, anchors, tokens))

    def _draw_compiled(self, base_logits: np.ndarray, hidden: np.ndarray, anchors: np.ndarray) -> HostDraftBlock:
        """Greedy drafts of a vanilla head, and their confidences, in as few calls as the kernels have."""
        if self._at_once is None and self.confidence_weight is not None:
            parts = {"markov": self._greedy, "weight": self.confidence_weight[: hidden.shape[2]]}
            parts |= {"bias": self.confidence_bias, "by_previous": self._by_previous(hidden.shape[2])}
            self._at_once = self._kernels.join("draft_heads", **parts)
        if self._at_once is not None:
            tokens, logits = self._at_once(base_logits, hidden, anchors)
            return HostDraftBlock(tokens, None, logits)
        tokens = self._greedy(torch.from_numpy(base_logits), torch.from_numpy(anchors)).numpy()
        return HostDraftBlock(tokens, None, self.confidence(hidden, anchors, tokens))

    def _hidden_part(self, hidden: np.ndarray) -> np.ndarray | None:
        hidden_size = hidden.shape[2]
        if self.kind == "gated":
            return hidden @ self.weights["gate_proj.weight"][:, :hidden_size].T + self.weights["gate_proj.bias"]
        if self.kind == "rnn":
            return hidden @ self.weights["joint_proj.weight"][:, -hidden_size:].T + self.weights["joint_proj.bias"]
        return None

    def _feature(
        self, k: int, prev: np.ndarray, part: np.ndarray | None, memory: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """f [B, r] of place ``k`` and the memory [B, r] behind it."""
        e = self.w1[prev]
        rank = e.shape[1]
        if self.kind == "gated":
            return _sigmoid(part[:, k] + e @ self.weights["gate_proj.weight"][:, -rank:].T) * e, memory
        if self.kind == "rnn":
            joint = self.weights["joint_proj.weight"]
            z = part[:, k] + np.concatenate([memory, e], axis=1) @ joint[:, : 2 * rank].T
            keep = _sigmoid(z[:, :rank])
            return np.tanh(z[:, 2 * rank :]), keep * memory + (1.0 - keep) * np.tanh(z[:, rank : 2 * rank])
        return e, memory

    def _by_previous(self, hidden_size: int) -> np.ndarray | None:
        """[V] what the token before a place adds to the confidence logit there; None where it is not read."""
        if self._confidence_by_prev is None and len(self.confidence_weight) > hidden_size:
            self._confidence_by_prev = self.w1 @ self.confidence_weight[hidden_size:]
        return self._confidence_by_prev

    def confidence(self, hidden: np.ndarray, anchors: np.ndarray, tokens: np.ndarray) -> np.ndarray | None:
        """The confidence logits [B, γ] of drafts ``tokens`` [B, γ] behind ``anchors`` [B]; None without a head."""
        if self.confidence_weight is None:
            return None
        z = hidden @ self.confidence_weight[: hidden.shape[2]] + self.confidence_bias
        by_previous = self._by_previous(hidden.shape[2])
        if by_previous is not None:
            z = z + by_previous[np.concatenate([anchors[:, None], tokens[:, :-1]], axis=1)]
        return z


def sample_rows(logits: np.ndarray, temperatures: np.ndarray, uniforms: np.ndarray, probs: np.ndarray) -> np.ndarray:
    """Tokens [B] at ``temperatures`` [B] by inverse CDF; their laws are written to ``probs`` [B, V] float64."""
    greedy = temperatures == 0
    scale = (1.0 / np.where(greedy, 1.0, np.maximum(temperatures, MIN_TEMPERATURE))).astype(logits.dtype)
    logits = logits - logits.max(axis=1, keepdims=True)
    logits *= scale[:, None]
    masses = np.exp(logits).astype(np.float64)
    if greedy.any():
        masses[greedy] = 0.0
        masses[greedy, logits[greedy].argmax(axis=1)] = 1.0
    cumulative = masses.cumsum(axis=1)
    total = cumulative[:, -1]
    np.divide(masses, total[:, None], out=probs)
    points = uniforms * total
    return np.array([row.searchsorted(point, side="right") for row, point in zip(cumulative, points)])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))
