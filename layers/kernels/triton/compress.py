"""Compressor pooling and ring writes. Legend: K key rows, m tokens per window, d entry width, R ring rows.

A closing row of -1 is padding, and so is a key row whose request ends more than R rows behind it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ...attention.plan import AttentionPlan, LayerCache
from ...rope import RopeTable
from ..packed_keys import is_packed
from .jit import launch, load_angles, narrow, power, rotate_pairs
from .linear import with_inner_contiguous
from .packed_keys import store_packed

TILE_ROWS = 8  # tokens of a window that are pooled at a time


@triton.jit
def _store(rows, rows_stride, ring, positions, slots, ends, num_ring_rows, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + row)
    kept = (column < width) & (position >= tl.load(ends + row) - num_ring_rows)
    values = tl.load(rows + row * rows_stride + column, mask=kept)
    to = (tl.load(slots + row) * num_ring_rows + position % num_ring_rows) * width
    tl.store(ring + to + column, values.to(ring.dtype.element_ty), mask=kept)


@triton.jit
def _pool(
    raw, raw_row, ring, num_ring_rows, ring_width, first_column, closing, positions, slots, starts,
    page_table, max_pages, ape, norm_weight, cos, sin, num_pairs, eps, entries, per_page,
    RATIO: tl.constexpr, OVERLAP: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PACKED: tl.constexpr, ROTARY: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """The entry of one closing row: an online softmax over its window's tokens for each channel, norm, rotation."""
    at = tl.load(closing + tl.program_id(0))
    if at < 0:
        return
    position, slot, start = tl.load(positions + at), tl.load(slots + at), tl.load(starts + at)
    channel = tl.arange(0, BLOCK) - SHIFT
    inside = (channel >= 0) & (channel < WIDTH)
    half: tl.constexpr = WIDTH if OVERLAP else 0
    both: tl.constexpr = WIDTH + half
    num_tokens: tl.constexpr = RATIO + (RATIO if OVERLAP else 0)
    top = tl.full((BLOCK,), -3.0e38, dtype=tl.float32)
    total, pooled = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, num_tokens, TILE):
        token = begin + tl.arange(0, TILE)
        p = position - (num_tokens - 1) + token
        exists = (token < num_tokens) & (p >= 0)
        here = tl.maximum(at - (position - p), 0)
        place = (slot * num_ring_rows + tl.maximum(p, 0) % num_ring_rows) * ring_width
        source = tl.where(p >= start, raw + here * raw_row, ring + place)
        # Tokens of the window before contribute the first half of their columns, those of this window the second.
        column = tl.where(token >= num_tokens - RATIO, half, 0)[:, None] + channel[None, :]
        mask = exists[:, None] & inside[None, :]
        c = tl.load(source[:, None] + first_column + column, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(source[:, None] + first_column + both + column, mask=mask, other=0.0).to(tl.float32)
        z += tl.load(ape + (token % RATIO)[:, None] * both + column, mask=mask, other=0.0)
        z = tl.where(mask, z, -3.0e38)
        higher = tl.maximum(top, tl.max(z, axis=0))
        weight = tl.where(mask, tl.exp(z - higher[None, :]), 0.0)
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weight, axis=0)
        pooled = pooled * shrink + tl.sum(weight * c, axis=0)
        top = higher
    pooled /= tl.where(inside, total, 1.0)
    pooled *= tl.rsqrt(tl.sum(pooled * pooled) / WIDTH + eps)
    pooled *= tl.load(norm_weight + channel, mask=inside, other=0.0)
    entry = position // RATIO
    pair, first = tl.arange(0, BLOCK // 2)[None, :], (WIDTH + SHIFT) // 2 - num_pairs
    turned = rotate_pairs(
        pooled[None, :],
        load_angles(cos, entry * RATIO, pair, first, num_pairs, 1.0),
        load_angles(sin, entry * RATIO, pair, first, num_pairs, 0.0),
    )
    page = tl.load(page_table + slot * max_pages + entry // per_page).to(tl.int64)
    to = entries + (page * per_page + entry % per_page) * ROW
    if PACKED:
        store_packed(to, tl.reshape(turned, (BLOCK,)), WIDTH, ROTARY, BLOCK)
    else:
        tl.store(to + channel[None, :], narrow(turned, entries.dtype.element_ty), mask=inside[None, :])


def bind_store_rows() -> Callable[..., None]:
    """See :func:`..compress.store_rows`."""

    def store_rows(
        window_rows: torch.Tensor, raw_rows: torch.Tensor | None, cache: LayerCache, plan: AttentionPlan
    ) -> None:
        for ring, rows in ((cache.window, window_rows), (cache.raw, raw_rows)):
            if rows is None:
                continue
            rows, keys, (_, num_ring_rows, width) = with_inner_contiguous(rows), plan.keys, ring.shape
            block = min(power(width), 1024)
            launch(
                _store, (rows.shape[0], triton.cdiv(width, block)),
                rows, rows.stride(0), ring, keys.positions, keys.slots, keys.ends, num_ring_rows, width,
                BLOCK=block, num_warps=4,
            )  # fmt: skip

    return store_rows


def bind_pool_windows(
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    rope: RopeTable,
    eps: float,
    ratio: int,
    overlap: bool,
    indexer: bool,
) -> Callable[[torch.Tensor, LayerCache, AttentionPlan], None]:
    """See :func:`..compress.pool_windows`."""
    width = ape.shape[1] // 2 if overlap else ape.shape[1]
    block = power(width + width % 2, 2)

    def pool_windows(raw: torch.Tensor, cache: LayerCache, plan: AttentionPlan) -> None:
        keys, closing = plan.keys, plan.closing[ratio]
        entries = cache.index_entries if indexer else cache.entries
        raw = with_inner_contiguous(raw)
        assert not is_packed(entries) or width % 2 == 0, f"packed entries have an even width, not {width}"
        launch(
            _pool, (closing.shape[0],),
            raw, raw.stride(0), cache.raw, cache.raw.shape[1], cache.raw.shape[2],
            raw.shape[1] - 2 * ape.shape[1] if indexer else 0,
            closing, keys.positions, keys.slots, keys.starts, plan.page_table, plan.page_table.shape[1],
            ape, norm_weight, rope.cos, rope.sin, rope.cos.shape[1], eps, entries, entries.shape[1],
            RATIO=ratio, OVERLAP=overlap, WIDTH=width, SHIFT=width % 2, BLOCK=block,
            TILE=min(power(2 * ratio if overlap else ratio), TILE_ROWS),
            PACKED=is_packed(entries), ROTARY=2 * rope.cos.shape[1], ROW=entries.shape[2], num_warps=4, num_stages=3,
        )  # fmt: skip

    return pool_windows
