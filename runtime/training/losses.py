"""Losses of draft training: DSpark (three terms), DFlash, EAGLE-3 (training-time test) and MTP.

Shapes: B sequences, A anchors a sequence, γ places, S tokens, V vocabulary. Targets are given as the target model's
logits; gradients flow into the draft's logits and confidences only. Computed in float32 at least.

Weighted means over places are sums over a sum of weights. Under data parallelism the sum of weights is the whole
batch's: add up :attr:`DSparkSums.weight` over the ranks and pass it to :meth:`DSparkSums.loss`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

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


def eagle3_sums(
    draft_logits: Tensor, target_logits: Tensor, valid: Tensor, decay: float = 0.8
) -> tuple[Tensor, Tensor]:
    """EAGLE-3: place i of an anchor was drafted after i runs on the draft's own output; soft cross-entropy of each.

    Args:
        draft_logits, target_logits: [A, γ, V] for the same token.
        valid: [A, γ] bool, whether a place has something to learn.

    Returns the sum over all anchors and places, place i weighted ``decay`` ** i, and the sums of the places [γ].
    """
    wide = torch.promote_types(draft_logits.dtype, torch.float32)
    law = target_logits.detach().to(wide).softmax(-1)
    places = (-(law * draft_logits.to(wide).log_softmax(-1)).sum(-1) * valid).sum(0)
    scale = decay ** torch.arange(len(places), device=places.device, dtype=wide)
    return (scale * places).sum(), places
