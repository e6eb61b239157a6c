"""The heads of a draft block. Legend: B blocks, γ places, d hidden width, r Markov rank, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .. import Bound
from ..draft import MAX_TABLE_BYTES
from .jit import address, floats, jit, largest
from .packed import pack, packed_product


@jit
def _choose(base, bias, logits):
    """The first place of the largest of ``base + bias`` [V]."""
    for j in range(base.shape[0]):
        logits[j] = base[j] + bias[j]
    top = largest(logits)
    for j in range(base.shape[0]):
        if logits[j] == top:
            return j
    return 0


@jit
def _greedy_by_table(base_at, anchors, table, tokens):
    num_blocks, gamma = tokens.shape
    base, logits = floats(base_at, (num_blocks, gamma, table.shape[0])), np.empty(table.shape[0], np.float32)
    for b in range(num_blocks):
        prev = anchors[b]
        for k in range(gamma):
            prev = _choose(base[b, k], table[prev], logits)
            tokens[b, k] = prev


@jit
def _greedy_by_product(base_at, anchors, w1, w2, tokens):
    (num_blocks, gamma), vocab_size = tokens.shape, w1.shape[0]
    base, logits = floats(base_at, (num_blocks, gamma, vocab_size)), np.empty(vocab_size, np.float32)
    features, biases = np.empty((num_blocks, w1.shape[1]), np.float32), np.empty((num_blocks, vocab_size), np.float32)
    for k in range(gamma):
        for b in range(num_blocks):
            features[b] = w1[anchors[b] if k == 0 else tokens[b, k - 1]]
        packed_product(features, w2, biases)
        for b in range(num_blocks):
            tokens[b, k] = _choose(base[b, k], biases[b], logits)


@jit
def _confidence(hidden_at, anchors, tokens, weight, bias, by_previous, logits):
    (num_blocks, gamma), width = tokens.shape, weight.shape[0]
    hidden = floats(hidden_at, (num_blocks, gamma, width))
    for b in range(num_blocks):
        for k in range(gamma):
            total = np.float32(0)
            for j in range(width):
                total += hidden[b, k, j] * weight[j]
            previous = anchors[b] if k == 0 else tokens[b, k - 1]
            logits[b, k] = total + bias + by_previous[previous]


@jit
def _draft_by_table(base_at, hidden_at, anchors, table, confidence, tokens, logits):
    _greedy_by_table(base_at, anchors, table, tokens)
    _confidence(hidden_at, anchors, tokens, *confidence, logits)


@jit
def _draft_by_product(base_at, hidden_at, anchors, w1, w2, confidence, tokens, logits):
    _greedy_by_product(base_at, anchors, w1, w2, tokens)
    _confidence(hidden_at, anchors, tokens, *confidence, logits)


_BY_TABLE, _BY_PRODUCT = (_greedy_by_table, _draft_by_table), (_greedy_by_product, _draft_by_product)


def bind_markov_greedy(w1: torch.Tensor, w2: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """See :func:`..draft.markov_greedy`."""
    w1, w2 = w1.float(), w2.float()
    by_table = 4 * w1.shape[0] ** 2 <= MAX_TABLE_BYTES
    weights = ((w1 @ w2.T).numpy(),) if by_table else (w1.contiguous().numpy(), pack(w2.T))
    greedy, with_confidence = _BY_TABLE if by_table else _BY_PRODUCT

    def markov_greedy(base_logits: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        base_logits, previous = base_logits.contiguous(), anchors.contiguous().numpy()
        tokens = np.empty(base_logits.shape[:2], np.int64)
        greedy(address(base_logits), previous, *weights, tokens)
        return torch.from_numpy(tokens)

    markov_greedy.weights, markov_greedy.with_confidence = weights, with_confidence
    return markov_greedy


def bind_draft_heads(
    markov: Bound, weight: np.ndarray, bias: float, by_previous: np.ndarray | None
) -> Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """``(base_logits [B, γ, V], hidden [B, γ, d], anchors [B])`` -> drafts as of ``markov``, the bound
    ``markov_greedy``, and their confidence logits [B, γ], all in numpy: ``hidden`` times ``weight`` [d], plus ``bias``
    and what the token before the draft adds, if anything, ``by_previous`` [V]."""
    added = np.zeros(len(markov.weights[0]), np.float32) if by_previous is None else by_previous
    confidence = (np.ascontiguousarray(weight), np.float32(bias), np.ascontiguousarray(added))
    draft = markov.with_confidence

    def draft_heads(base_logits: np.ndarray, hidden: np.ndarray, anchors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        base_logits, hidden = np.ascontiguousarray(base_logits), np.ascontiguousarray(hidden)
        assert base_logits.dtype == hidden.dtype == np.float32, f"float32, not {base_logits.dtype} and {hidden.dtype}"
        tokens, logits = np.empty(base_logits.shape[:2], np.int64), np.empty(base_logits.shape[:2], np.float32)
        draft(base_logits.ctypes.data, hidden.ctypes.data, anchors, *markov.weights, confidence, tokens, logits)
        return tokens, logits

    return draft_heads
