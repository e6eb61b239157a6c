"""Norms with rotation in plain torch. Legend: T rows, H heads, d head width."""

from __future__ import annotations

import torch

from ..attention.plan import AttentionPlan
from ..rope import RopeTable, rotate
from .hyper_connection import weighted_norm


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of ``x`` [T, width] with a float32 ``weight`` [width]; result in ``x``'s dtype."""
    return weighted_norm(x, weight, eps)


def head_norm_rope(q: torch.Tensor, plan: AttentionPlan, rope: RopeTable, eps: float) -> torch.Tensor:
    """``q`` [T, H, d], each head RMS-normalised without weight, then its tail rotated at the queries' positions."""
    wide = q.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return rotate(
        wide, rope.cos[plan.queries.positions].unsqueeze(1), rope.sin[plan.queries.positions].unsqueeze(1)
    ).to(q.dtype)


def head_rope(q: torch.Tensor, plan: AttentionPlan, rope: RopeTable) -> torch.Tensor:
    """``q`` [T, H, d] with the tail of each head rotated at the queries' positions."""
    return rotate(q, rope.cos[plan.queries.positions].unsqueeze(1), rope.sin[plan.queries.positions].unsqueeze(1))


def key_norm_rope(
    kv: torch.Tensor, plan: AttentionPlan, weight: torch.Tensor, rope: RopeTable, eps: float
) -> torch.Tensor:
    """``kv`` [T, d]: RMSNorm with ``weight`` [d], then the tail rotated at the queries' positions."""
    return rotate(weighted_norm(kv, weight, eps), rope.cos[plan.queries.positions], rope.sin[plan.queries.positions])
