"""Norms with rotation. Legend: T rows, H heads, d head width, r rotary width (the tail of a head)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...attention.plan import AttentionPlan
from ...rope import RopeTable
from .jit import address, floats, jit


@jit
def inverse_rms(x, eps):
    """``1 / sqrt(mean(x^2) + eps)`` of one row."""
    total = np.float32(0)
    for j in range(x.shape[0]):
        total += x[j] * x[j]
    return np.float32(1) / np.sqrt(total / np.float32(x.shape[0]) + eps)


@jit
def rotate_tail(x, cos, sin):
    """Rotate the trailing pairs of one row ``x`` [d] in place by the angles of ``cos`` and ``sin`` [r / 2]."""
    first = x.shape[0] - 2 * cos.shape[0]
    for j in range(cos.shape[0]):
        even, odd = x[first + 2 * j], x[first + 2 * j + 1]
        x[first + 2 * j] = even * cos[j] - odd * sin[j]
        x[first + 2 * j + 1] = even * sin[j] + odd * cos[j]


@jit
def norm_rows(x_at, weight, eps, out):
    x = floats(x_at, out.shape)
    for i in range(x.shape[0]):
        scale = inverse_rms(x[i], eps)
        for j in range(x.shape[1]):
            out[i, j] = x[i, j] * scale * weight[j]


@jit
def _heads(q_at, positions, cos, sin, normalise, eps, out):
    q = floats(q_at, out.shape)
    for i in range(q.shape[0]):
        p = positions[i]
        for h in range(q.shape[1]):
            scale = inverse_rms(q[i, h], eps) if normalise else np.float32(1)
            for j in range(q.shape[2]):
                out[i, h, j] = q[i, h, j] * scale
            rotate_tail(out[i, h], cos[p], sin[p])


@jit
def key_rows(kv_at, positions, weight, cos, sin, eps, out):
    kv = floats(kv_at, out.shape)
    for i in range(kv.shape[0]):
        scale = inverse_rms(kv[i], eps)
        for j in range(kv.shape[1]):
            out[i, j] = kv[i, j] * scale * weight[j]
        rotate_tail(out[i], cos[positions[i]], sin[positions[i]])


def bind_rms_norm(weight: torch.Tensor, eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..norm_rope.rms_norm`."""
    packed, small = weight.numpy(), np.float32(eps)

    def rms_norm(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = np.empty(x.shape, np.float32)
        norm_rows(address(x), packed, small, out)
        return torch.from_numpy(out)

    rms_norm.weights = (packed, small)
    return rms_norm


def _bind_heads(rope: RopeTable, eps: float, normalise: bool) -> Callable[[torch.Tensor, AttentionPlan], torch.Tensor]:
    cos, sin, small = rope.cos.numpy(), rope.sin.numpy(), np.float32(eps)

    def heads(q: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        q = q.contiguous()
        out = np.empty(q.shape, np.float32)
        _heads(address(q), plan.host.queries[0], cos, sin, normalise, small, out)
        return torch.from_numpy(out)

    return heads


def bind_head_norm_rope(rope: RopeTable, eps: float) -> Callable[[torch.Tensor, AttentionPlan], torch.Tensor]:
    """See :func:`..norm_rope.head_norm_rope`."""
    return _bind_heads(rope, eps, True)


def bind_head_rope(rope: RopeTable) -> Callable[[torch.Tensor, AttentionPlan], torch.Tensor]:
    """See :func:`..norm_rope.head_rope`."""
    return _bind_heads(rope, 0.0, False)


def bind_key_norm_rope(
    weight: torch.Tensor, rope: RopeTable, eps: float
) -> Callable[[torch.Tensor, AttentionPlan], torch.Tensor]:
    """See :func:`..norm_rope.key_norm_rope`."""
    packed, cos, sin, small = weight.numpy(), rope.cos.numpy(), rope.sin.numpy(), np.float32(eps)

    def key_norm_rope(kv: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        kv = kv.contiguous()
        out = np.empty(kv.shape, np.float32)
        key_rows(address(kv), plan.host.queries[0], packed, cos, sin, small, out)
        return torch.from_numpy(out)

    key_norm_rope.weights = (packed, cos, sin, small)
    return key_norm_rope
