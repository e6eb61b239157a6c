"""The Markov step of a draft block in plain torch. Legend: B blocks, γ places, r Markov rank, V vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .rejection import draw

MIN_TEMPERATURE = 1e-30
"""Below it the law is the same, all mass on the highest logit, but its reciprocal overflows float32."""

MAX_TABLE_BYTES = 32 << 20
"""The largest table of all biases [V, V] that is made; beyond it, reading its rows is no faster than the product."""


class Drawn(NamedTuple):
    """``tokens`` int64 [B, γ] and ``probs`` float64 [B, γ, V], the laws they were drawn from."""

    tokens: torch.Tensor
    probs: torch.Tensor


def markov_greedy(base_logits: torch.Tensor, anchors: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """Drafts int64 [B, γ], left to right: each the largest of ``base_logits`` [B, γ, V] plus the bias ``w2 w1[prev]``
    of the token before it, in float32. ``anchors`` int64 [B], ``w1`` and ``w2`` [V, r]. Of equals the lower id wins."""
    prev, tokens = anchors, []
    for k in range(base_logits.shape[1]):
        prev = (base_logits[:, k].float() + w1[prev].float() @ w2.float().T).argmax(dim=1)
        tokens.append(prev)
    return torch.stack(tokens, dim=1)


def markov_sample(
    base_logits: torch.Tensor,
    anchors: torch.Tensor,
    temperatures: torch.Tensor,
    uniforms: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
) -> Drawn:
    """Drafts drawn left to right from softmax((base + bias) / T), with the logits of :func:`markov_greedy`.

    ``temperatures`` float64 [B], 0 is greedy; ``uniforms`` float64 [B, γ] in [0, 1), for the inverse CDF. Exponentials
    are float32, sums and laws float64.
    """
    greedy = (temperatures == 0).unsqueeze(1)
    scale = 1.0 / torch.where(greedy, 1.0, temperatures.clamp_min(MIN_TEMPERATURE).unsqueeze(1))
    prev, tokens, laws = anchors, [], []
    for k in range(base_logits.shape[1]):
        logits = base_logits[:, k].float() + w1[prev].float() @ w2.float().T
        masses = ((logits - logits.amax(1, keepdim=True)) * scale.float()).exp().double()
        one_point = torch.zeros_like(masses).scatter_(1, logits.argmax(dim=1, keepdim=True), 1.0)
        masses = torch.where(greedy, one_point, masses)
        prev = draw(masses, uniforms[:, k])
        tokens.append(prev)
        laws.append(masses / masses.sum(1, keepdim=True))
    return Drawn(torch.stack(tokens, dim=1), torch.stack(laws, dim=1))
