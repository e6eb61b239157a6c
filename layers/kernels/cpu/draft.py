"""The Markov step of a draft block. Legend: B blocks, γ places, r Markov rank, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

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


def bind_markov_greedy(w1: torch.Tensor, w2: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """See :func:`..draft.markov_greedy`."""
    w1, w2 = w1.float(), w2.float()
    by_table = 4 * w1.shape[0] ** 2 <= MAX_TABLE_BYTES
    table = (w1 @ w2.T).numpy() if by_table else None
    embeddings, panels = w1.contiguous().numpy(), None if by_table else pack(w2.T)

    def markov_greedy(base_logits: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        base_logits, previous = base_logits.contiguous(), anchors.contiguous().numpy()
        tokens = np.empty(base_logits.shape[:2], np.int64)
        if by_table:
            _greedy_by_table(address(base_logits), previous, table, tokens)
        else:
            _greedy_by_product(address(base_logits), previous, embeddings, panels, tokens)
        return torch.from_numpy(tokens)

    return markov_greedy
