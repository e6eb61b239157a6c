"""Losses of draft training: DSpark (three terms), DFlash, EAGLE-3 (training-time test) and MTP.

Shapes: B sequences, A anchors a sequence, γ places, S tokens, V vocabulary. Targets are given as the target model's
logits; gradients flow into the draft's logits and confidences only. Computed in float32 at least.

Weighted means over places are sums over a sum of weights. Under data parallelism the sum of weights is the whole
batch's: add up :attr:`DSparkSums.weight` over the ranks and pass it to :meth:`DSparkSums.loss`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

EPSILON = 1e-6
"""Added to the sum of weights, so that a batch without a valid place has loss 0."""


class LossWeights(NamedTuple):
    """Factors of the three DSpark terms; DFlash is (1, 0, 0)."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0


class DSparkSums(NamedTuple):
    """Sums over valid places, each weighted by its place; scalars."""

    ce: Tensor
    """Cross-entropy against the data's next tokens."""
    l1: Tensor
    """‖p_draft - p_target‖_1, twice the chance that the draft is rejected."""
    confidence: Tensor
    """Cross-entropy of the confidence against 1 - ½‖p_draft - p_target‖_1 (no gradient through the latter)."""
    weight: Tensor
    """The weights themselves."""

    def loss(self, factors: LossWeights, weight: Tensor | None = None) -> Tensor:
        """The training loss; ``weight`` replaces the sum of weights by one over all ranks.

        Then the ranks' losses, and their gradients, are to be added, not averaged.
        """
        total = factors.ce * self.ce + factors.l1 * self.l1 + factors.confidence * self.confidence
        return total / ((self.weight if weight is None else weight) + EPSILON)


def place_weights(valid: Tensor, decay_gamma: float) -> Tensor:
    """w_k = exp(-(k - 1) / ``decay_gamma``) where ``valid`` [.., γ] bool, else 0; float32.

    The paper writes γ for the decay; released configurations set it apart (``loss_decay_gamma``, 4.0).
    """
    places = torch.arange(valid.shape[-1], device=valid.device, dtype=torch.float32)
    return torch.exp(-places / decay_gamma) * valid


def dspark_sums(
    draft_logits: Tensor, target_logits: Tensor, labels: Tensor, confidence_logits: Tensor | None, weights: Tensor
) -> DSparkSums:
    """The three terms of DSpark's loss (paper section 4).

    Args:
        draft_logits, target_logits: [.., γ, V] for the same token; the draft's with the Markov bias, teacher-forced.
        labels: [.., γ] int64, the data's tokens (any valid id where the weight is 0).
        confidence_logits: [.., γ], or ``None`` for a draft without a confidence head.
        weights: [.., γ] from :func:`place_weights`.
    """
    wide = torch.promote_types(draft_logits.dtype, torch.float32)
    log_p = draft_logits.to(wide).log_softmax(-1)
    target = target_logits.detach().to(wide).softmax(-1)
    w = weights.to(wide)
    ce = -log_p.gather(-1, labels[..., None])[..., 0]
    l1 = (log_p.exp() - target).abs().sum(-1)
    confidence = w.new_zeros(())
    if confidence_logits is not None:
        acceptance = 1.0 - 0.5 * l1.detach()
        confidence = (
            w * binary_cross_entropy_with_logits(confidence_logits.to(wide), acceptance, reduction="none")
        ).sum()
    return DSparkSums((w * ce).sum(), (w * l1).sum(), confidence, w.sum())


def dflash_loss(draft_logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """DFlash: the weighted mean cross-entropy against the data's tokens; arguments as in :func:`dspark_sums`."""
    wide = torch.promote_types(draft_logits.dtype, torch.float32)
    flat = cross_entropy(draft_logits.flatten(0, -2).to(wide), labels.flatten(), reduction="none")
    w = weights.flatten().to(wide)
    return (w * flat).sum() / (w.sum() + EPSILON)


class Eagle3Loss(NamedTuple):
    """The loss of training-time test and its steps."""

    total: Tensor
    steps: Tensor
    """[steps] before the decay."""


def eagle3_loss(
    step_logits: Sequence[Tensor], target_logits: Tensor, loss_mask: Tensor, decay: float = 0.8
) -> Eagle3Loss:
    """EAGLE-3: at step i the draft has run i times on its own output; soft cross-entropy, weights ``decay`` ** i.

    Args:
        step_logits: per step [B, S, V]; row t of step i has seen tokens up to x_{t+1+i} and predicts x_{t+2+i}.
        target_logits: [B, S, V], row t for x_{t+1}; row t of step i learns row t + 1 + i, and nothing past the end.
        loss_mask: [B, S], read at t + i.

    Each step is a sum divided by B·S.
    """
    wide = torch.promote_types(target_logits.dtype, torch.float32)
    target = target_logits.detach().to(wide).softmax(-1)
    mask = loss_mask.to(wide)
    num_tokens = target.shape[1]
    steps = []
    for i, logits in enumerate(step_logits):
        reach = max(num_tokens - 1 - i, 0)
        log_q = logits[:, :reach].to(wide).log_softmax(-1)
        soft = -(target[:, num_tokens - reach :] * log_q).sum(-1)
        steps.append((soft * mask[:, num_tokens - 1 - reach : num_tokens - 1]).sum() / mask.numel())
    stacked = torch.stack(steps)
    scale = decay ** torch.arange(len(steps), device=stacked.device, dtype=wide)
    return Eagle3Loss((scale * stacked).sum(), stacked)


def mtp_loss(logits: Tensor, token_ids: Tensor, loss_mask: Tensor, depth: int = 1) -> Tensor:
    """Multi-token prediction: mean cross-entropy of row t's ``logits`` [B, S, V] against token x_{t+1+depth}.

    ``token_ids`` [B, S]; the mean is over rows whose token exists and is set in ``loss_mask`` [B, S] (0 if none is).
    """
    shift = 1 + depth
    wide = torch.promote_types(logits.dtype, torch.float32)
    labels, w = token_ids[:, shift:], loss_mask[:, shift:].to(wide)
    rows = logits[:, : labels.shape[1]].to(wide)
    each = cross_entropy(rows.flatten(0, 1), labels.flatten(), reduction="none").view_as(w)
    return (each * w).sum() / (w.sum() + EPSILON)
