"""Index scores and selection. Legend: T query rows, H index heads, d their width, E entries, k selected entries.

Two kernels: scores of all visible entries, then an exact selection by radix: four passes over a row's scores, each
fixing eight more bits of the k-th largest one. Entries of equal scores are taken in order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ...attention.plan import AttentionPlan, LayerCache
from .jit import dot, launch, power

BLOCK_ENTRIES = 64
MOST_SCORES = 1 << 26  # float32 scores kept at a time; more queries go in turns


@triton.jit
def _scores(
    q, weights, weights_row, entries, positions, slots, page_table, max_pages, per_page, scores, num_entries, top_k,
    num_heads, width, scale, RATIO: tl.constexpr,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``scores`` [T, E] of a stretch of entries for one query; untouched where all that are visible are chosen."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    visible = (tl.load(positions + row) + 1) // RATIO
    if (visible <= top_k) | (first >= visible):
        return
    head, channel, entry = tl.arange(0, HEADS), tl.arange(0, WIDTH), first + tl.arange(0, BLOCK)
    page = tl.load(page_table + tl.load(slots + row) * max_pages + entry // per_page, mask=entry < visible, other=0).to(
        tl.int64
    )
    key = entries + (page * per_page + entry % per_page)[None, :] * width + channel[:, None]
    keys = tl.load(key, mask=(entry < visible)[None, :] & (channel < width)[:, None], other=0.0)
    at = q + (row * num_heads + head)[:, None] * width + channel[None, :]
    queries = tl.load(at, mask=(head < num_heads)[:, None] & (channel < width)[None, :], other=0.0)
    dots = dot(queries, keys.to(queries.dtype), tl.zeros((HEADS, BLOCK), dtype=tl.float32))
    weight = tl.load(weights + row * weights_row + head, mask=head < num_heads, other=0.0).to(tl.float32)
    total = tl.sum(weight[:, None] * tl.maximum(dots, 0.0), axis=0) * scale
    tl.store(scores + row * num_entries + entry, total, mask=entry < visible)


@triton.jit
def _ordered(scores):
    """Unsigned integers in the order of float32 ``scores``; both zeros are the same number."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _select(scores, positions, chosen, num_entries, num_selected, top_k, RATIO: tl.constexpr, BLOCK: tl.constexpr):
    """The ``top_k`` best entries of one query, in order of entries; -1 behind them."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    scores += row * num_entries
    chosen += row * num_selected
    visible = ((tl.load(positions + row) + 1) // RATIO).to(tl.int32)
    if visible <= top_k:
        for begin in range(0, num_selected, BLOCK):
            entry = begin + at
            tl.store(chosen + entry, tl.where(entry < visible, entry, -1).to(tl.int64), mask=entry < num_selected)
        return
    # ``least`` becomes the k-th largest key, ``missing`` how many of its equals are taken.
    least, missing, digit = tl.zeros((), dtype=tl.uint32), top_k, tl.arange(0, 256)
    for step in tl.static_range(4):
        counts = tl.zeros((256,), dtype=tl.int32)
        for begin in range(0, visible, BLOCK):
            entry = begin + at
            key = _ordered(tl.load(scores + entry, mask=entry < visible, other=0.0))
            alike = (entry < visible) & ((key >> (24 - 8 * step) >> 8) == (least >> (24 - 8 * step) >> 8))
            counts += tl.histogram(((key >> (24 - 8 * step)) & 255).to(tl.int32), 256, mask=alike)
        above = tl.sum(counts) - tl.cumsum(counts, 0)  # keys with a higher digit
        found = tl.max(tl.where(above + counts >= missing, digit, 0))
        missing -= tl.sum(tl.where(digit == found, above, 0))
        least |= found.to(tl.uint32) << (24 - 8 * step)
    taken = tl.zeros((), dtype=tl.int32)
    for begin in range(0, visible, BLOCK):
        entry = begin + at
        key = _ordered(tl.load(scores + entry, mask=entry < visible, other=0.0))
        equal = (entry < visible) & (key == least)
        order = tl.cumsum(equal.to(tl.int32), 0)
        keep = ((entry < visible) & (key > least)) | (equal & (order <= missing))
        missing -= tl.minimum(tl.sum(equal.to(tl.int32)), missing)
        place = taken + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(chosen + place, entry.to(tl.int64), mask=keep)
        taken += tl.sum(keep.to(tl.int32))


def bind_select_entries(ratio: int, top_k: int, scale: float) -> Callable[..., torch.Tensor]:
    """See :func:`..sparse_attention.select_entries`. The chosen entries are in their own order."""

    def select_entries(q: torch.Tensor, weights: torch.Tensor, cache: LayerCache, plan: AttentionPlan) -> torch.Tensor:
        (num_rows, num_heads, width), entries = q.shape, cache.index_entries
        q, num_entries = q.contiguous(), (plan.max_position + 1) // ratio
        num_selected = min(top_k, num_entries)
        chosen = torch.empty((num_rows, num_selected), dtype=torch.int64, device=q.device)
        if num_selected == 0:
            return chosen
        positions, slots = plan.queries.positions, plan.queries.slots
        num_scored = num_entries if num_entries > top_k else 0
        rows_at_once = max(MOST_SCORES // max(num_scored, 1), 1)
        scores = torch.empty((min(num_rows, rows_at_once), num_scored), dtype=torch.float32, device=q.device)
        for first in range(0, num_rows, rows_at_once):
            part = slice(first, min(first + rows_at_once, num_rows))
            count = part.stop - part.start
            launch(
                _scores, (count, triton.cdiv(num_scored, BLOCK_ENTRIES)),
                q[part], weights[part], weights.stride(0), entries, positions[part], slots[part],
                plan.page_table, plan.page_table.shape[1], entries.shape[1], scores, num_entries, top_k,
                num_heads, width, scale, RATIO=ratio, HEADS=power(num_heads, 16), WIDTH=power(width, 16),
                BLOCK=BLOCK_ENTRIES, num_warps=4, num_stages=1,
            )  # fmt: skip
            launch(
                _select, (count,), scores, positions[part], chosen[part], num_entries, num_selected, top_k,
                RATIO=ratio, BLOCK=min(power(max(num_scored, num_selected), 16), 1024), num_warps=4,
            )  # fmt: skip
        return chosen

    return select_entries
