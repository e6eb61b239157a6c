"""Dense attention over one block of keys, and its merge with other blocks.

Legend: T query rows, K key rows, H query heads, G key heads, S = H / G, d key width, e value width.

The S heads that share a key head are rows of one product with it: a program keeps a tile of such pairs (row, head) and
walks over the keys that any of its rows sees. Keys may be wide (576 in latent attention), so scores are summed over
stretches of their width; only the result [pairs, e] stays in registers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ..block_attention import Attended
from .jit import dot, launch, narrow, power
from .linear import with_inner_contiguous

STRETCH = 128
WIDE = 256  # values from this width on leave room for small tiles only
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _attend_block(
    q, k, k_row, k_head, v, v_row, v_head, visible, out, lse,
    num_pairs, num_keys, num_groups, width, value_width, scale,
    SHARED: tl.constexpr, CAUSAL: tl.constexpr,
    PAIRS: tl.constexpr, KEYS: tl.constexpr, STRETCH: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """A tile of the pairs of one key head. Pair i is head i % S of row i // S."""
    group, pair = tl.program_id(1), tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    real, row = pair < num_pairs, pair // SHARED
    head = row * (num_groups * SHARED) + group * SHARED + pair % SHARED
    seen = tl.full((PAIRS,), num_keys, dtype=tl.int64)
    if CAUSAL:
        seen = tl.load(visible + row, mask=real, other=0)
    channel, value = tl.arange(0, STRETCH), tl.arange(0, VALUES)
    k += group * k_head
    v += group * v_head
    top = tl.full((PAIRS,), LOWEST, dtype=tl.float32)
    total, mixed = tl.zeros((PAIRS,), dtype=tl.float32), tl.zeros((PAIRS, VALUES), dtype=tl.float32)
    for begin in range(0, tl.max(tl.where(real, seen, 0)), KEYS):
        key = begin + tl.arange(0, KEYS).to(tl.int64)
        exists, scores = key < num_keys, tl.zeros((PAIRS, KEYS), dtype=tl.float32)
        for first in range(0, width, STRETCH):
            inside = first + channel < width
            at = q + head[:, None] * width + first + channel[None, :]
            queries = tl.load(at, mask=real[:, None] & inside[None, :], other=0.0)
            at = k + key[None, :] * k_row + first + channel[:, None]
            scores = dot(queries, tl.load(at, mask=exists[None, :] & inside[:, None], other=0.0), scores)
        shown = exists[None, :] & (key[None, :] < seen[:, None])
        scores = tl.where(shown, scores * scale, LOWEST)
        higher = tl.maximum(top, tl.max(scores, axis=1))
        probs, shrink = tl.where(shown, tl.exp(scores - higher[:, None]), 0.0), tl.exp(top - higher)
        at = v + key[:, None] * v_row + value[None, :]
        values = tl.load(at, mask=exists[:, None] & (value < value_width)[None, :], other=0.0)
        total = total * shrink + tl.sum(probs, axis=1)
        mixed = dot(narrow(probs, values.dtype), values, mixed * shrink[:, None])
        top = higher
    none = total == 0.0
    mixed /= tl.where(none, 1.0, total)[:, None]
    tl.store(lse + head, tl.where(none, float("-inf"), top + tl.log(tl.where(none, 1.0, total))), mask=real)
    to = out + head[:, None] * value_width + value[None, :]
    tl.store(to, mixed, mask=real[:, None] & (value < value_width)[None, :])


@triton.jit
def _merge(a, a_lse, b, b_lse, out, lse, value_width, VALUES: tl.constexpr):
    """One head of one row."""
    head, value = tl.program_id(0).to(tl.int64), tl.arange(0, VALUES)
    at, inside = head * value_width + value, value < value_width
    own, other = tl.load(a_lse + head), tl.load(b_lse + head)
    higher = tl.maximum(own, other)
    top = tl.where(higher == float("-inf"), 0.0, higher)
    own, other = tl.exp(own - top), tl.exp(other - top)
    total = own + other
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    mixed = tl.load(a + at, mask=inside, other=0.0) * own + tl.load(b + at, mask=inside, other=0.0) * other
    tl.store(out + at, mixed * share, mask=inside)
    tl.store(lse + head, tl.where(total == 0.0, float("-inf"), top + tl.log(tl.where(total == 0.0, 1.0, total))))


def bind_attend_block(
    scale: float,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Attended]:
    """See :func:`..block_attention.attend_block`."""

    def attend_block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None) -> Attended:
        q, k, v = q.contiguous(), with_inner_contiguous(k), with_inner_contiguous(v)
        (num_rows, num_heads, width), (num_keys, num_groups, value_width) = q.shape, v.shape
        shared, is_wide = num_heads // num_groups, value_width >= WIDE
        out = torch.empty((num_rows, num_heads, value_width), dtype=torch.float32, device=q.device)
        lse = torch.empty((num_rows, num_heads), dtype=torch.float32, device=q.device)
        num_pairs = num_rows * shared
        pairs = min(power(num_pairs, 16), 32 if is_wide else 64)
        launch(
            _attend_block, (triton.cdiv(num_pairs, pairs), num_groups),
            q, k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1), lse if visible is None else visible, out, lse,
            num_pairs, num_keys, num_groups, width, value_width, scale,
            SHARED=shared, CAUSAL=visible is not None, PAIRS=pairs, KEYS=32 if is_wide else 64,
            STRETCH=min(power(width, 16), STRETCH), VALUES=power(value_width, 16),
            num_warps=8 if is_wide else 4, num_stages=2,
        )  # fmt: skip
        return Attended(out, lse)

    return attend_block


def bind_merge() -> Callable[[Attended, Attended], Attended]:
    """See :func:`..block_attention.merge`."""

    def merge(a: Attended, b: Attended) -> Attended:
        (num_rows, num_heads, value_width), contiguous = a.out.shape, [x.contiguous() for x in (*a, *b)]
        out, lse = torch.empty_like(contiguous[0]), torch.empty_like(contiguous[1])
        launch(
            _merge, (num_rows * num_heads,), *contiguous, out, lse, value_width,
            VALUES=power(value_width), num_warps=1,
        )  # fmt: skip
        return Attended(out, lse)

    return merge
