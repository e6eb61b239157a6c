"""Norms with rotation. Legend: T rows, H heads, d head width, r rotary width (the tail of a head)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ...attention.plan import AttentionPlan
from ...rope import RopeTable
from .jit import launch, load_angles, narrow, power, rotate_pairs, warps_for
from .linear import with_inner_contiguous


@triton.jit
def _norm_rows(x, x_row, weight, out, width, eps, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    values = tl.load(x + row * x_row + at, mask=at < width, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values) / width + eps)
    values *= tl.load(weight + at, mask=at < width, other=0.0)
    tl.store(out + row * width + at, narrow(values, out.dtype.element_ty), mask=at < width)


@triton.jit
def _norm_rope(
    x, x_row, out, positions, weight, cos, sin, num_heads, num_pairs, eps,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """One head of one row. Channel c sits at place c + SHIFT, so that the pairs of the tail are pairs of places."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, BLOCK) - SHIFT
    inside = (channel >= 0) & (channel < WIDTH)
    values = tl.load(x + row * x_row + head * WIDTH + channel, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        values *= tl.rsqrt(tl.sum(values * values) / WIDTH + eps)
    if WEIGHTED:
        values *= tl.load(weight + channel, mask=inside, other=0.0)
    position = tl.load(positions + row)
    pair, first = tl.arange(0, BLOCK // 2)[None, :], (WIDTH + SHIFT) // 2 - num_pairs
    turned = rotate_pairs(
        values[None, :],
        load_angles(cos, position, pair, first, num_pairs, 1.0),
        load_angles(sin, position, pair, first, num_pairs, 0.0),
    )
    to = out + (row * num_heads + head) * WIDTH + channel[None, :]
    tl.store(to, narrow(turned, out.dtype.element_ty), mask=inside[None, :])


def norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of ``x`` [T, width], whose rows may be apart; contiguous result."""
    (num_rows, width), block = x.shape, power(x.shape[1])
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    x = with_inner_contiguous(x)
    launch(_norm_rows, (num_rows,), x, x.stride(0), weight, out, width, eps, BLOCK=block, num_warps=warps_for(block))
    return out


def rotated(
    x: torch.Tensor,
    num_heads: int,
    positions: torch.Tensor,
    rope: RopeTable,
    eps: float | None = None,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x`` [T, H d], whose rows may be apart, with each head normed (unless ``eps`` is None) and weighted (unless
    ``weight`` is None), then rotated at ``positions`` [T]; contiguous result [T, H, d]."""
    num_rows, width, num_pairs = x.shape[0], x.shape[1] // max(num_heads, 1), rope.cos.shape[1]
    out = torch.empty((num_rows, num_heads, width), dtype=x.dtype, device=x.device)
    x, shift = with_inner_contiguous(x), width % 2
    block = power(width + shift, 2)
    launch(
        _norm_rope, (num_rows, num_heads),
        x, x.stride(0), out, positions, x if weight is None else weight, rope.cos, rope.sin, num_heads, num_pairs,
        0.0 if eps is None else eps,
        WIDTH=width, SHIFT=shift, BLOCK=block, NORM=eps is not None, WEIGHTED=weight is not None,
        num_warps=warps_for(block),
    )  # fmt: skip
    return out


def bind_rms_norm(weight: torch.Tensor, eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..norm_rope.rms_norm`."""
    return lambda x: norm_rows(x, weight, eps)


def bind_head_norm_rope(rope: RopeTable, eps: float) -> Callable[[torch.Tensor, AttentionPlan], torch.Tensor]:
    """See :func:`..norm_rope.head_norm_rope`."""
    return lambda q, plan: rotated(q.flatten(1), q.shape[1], plan.queries.positions, rope, eps)


def bind_head_rope(rope: RopeTable) -> Callable[[torch.Tensor, AttentionPlan], torch.Tensor]:
    """See :func:`..norm_rope.head_rope`."""
    return lambda q, plan: rotated(q.flatten(1), q.shape[1], plan.queries.positions, rope)


def bind_key_norm_rope(
    weight: torch.Tensor, rope: RopeTable, eps: float
) -> Callable[[torch.Tensor, AttentionPlan], torch.Tensor]:
    """See :func:`..norm_rope.key_norm_rope`."""
    return lambda kv, plan: rotated(kv, 1, plan.queries.positions, rope, eps, weight).squeeze(1)
