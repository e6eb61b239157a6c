"""Where the training blocks of a sequence lie: anchors, labels, positions and what each row sees.

Shapes: B sequences of S tokens, A anchors a sequence, γ places. An anchor at i starts the block of rows [x_i, mask ×
(γ - 1)] at positions i..i+γ-1, whose row k learns x_{i+1+k}. Source: paper section 4 and DeepSpec's data pipeline.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class BlockGeometry(NamedTuple):
    """The rows of the blocks of B sequences."""

    positions: Tensor
    """[B, A, γ] int64, may run past the sequence's end."""
    label_index: Tensor
    """[B, A, γ] int64, the token a row learns; clamped to the last token where there is none."""
    valid: Tensor
    """[B, A, γ] bool: the block is used, the label exists, and every label up to it is in the loss mask."""


def anchor_candidates(loss_mask: Tensor) -> Tensor:
    """[B, S - 1] bool: positions i with i and i + 1 in ``loss_mask`` [B, S]."""
    inside = loss_mask > 0
    return inside[:, :-1] & inside[:, 1:]


def sample_anchors(loss_mask: Tensor, num_anchors: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw up to ``num_anchors`` candidates a sequence without replacement: anchors [B, A] rising, used [B, A] bool.

    Sequences with fewer candidates than others fill up with anchor 0, not used. A is the most any sequence has.
    """
    candidates = anchor_candidates(loss_mask)
    keys = torch.rand(candidates.shape, generator=generator, device=candidates.device)
    counts = candidates.sum(1)
    width = min(num_anchors, int(counts.max())) if counts.numel() else 0
    order = torch.where(candidates, keys, 2.0).argsort(dim=1)[:, :width]
    used = torch.arange(width, device=counts.device) < counts[:, None]
    last = candidates.shape[1]
    anchors = torch.where(used, order, last).sort(dim=1).values
    return torch.where(used, anchors, 0), used


def block_geometry(anchors: Tensor, used: Tensor, loss_mask: Tensor, gamma: int) -> BlockGeometry:
    """Positions, labels and validity of blocks of ``gamma`` rows at ``anchors`` [B, A] (``used`` [B, A] bool)."""
    num_tokens = loss_mask.shape[1]
    positions = anchors[:, :, None] + torch.arange(gamma, device=anchors.device)
    labels = positions + 1
    label_index = labels.clamp(max=num_tokens - 1)
    inside = (loss_mask > 0).gather(1, label_index.flatten(1)).view_as(label_index)
    valid = (inside & (labels < num_tokens) & used[:, :, None]).cumprod(2).bool()
    return BlockGeometry(positions, label_index, valid)
