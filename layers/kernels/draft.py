"""The greedy Markov step of a draft block in plain torch. Legend: B blocks, γ places, r Markov rank, V vocabulary."""

from __future__ import annotations

import torch


def markov_greedy(base_logits: torch.Tensor, anchors: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Drafts int64 [B, γ], left to right: each the largest of ``base_logits`` [B, γ, V] plus the bias ``w2 w1[prev]``
    of the token before it, in float32. ``anchors`` int64 [B], ``w1`` and ``w2`` [V, r]. Of equals the lower id wins."""
    prev, tokens = anchors, []
    for k in range(base_logits.shape[1]):
        prev = (base_logits[:, k].float() + w1[prev].float() @ w2.float().T).argmax(dim=1)
        tokens.append(prev)
    return torch.stack(tokens, dim=1)
