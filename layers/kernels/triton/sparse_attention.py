"""Sparse attention. Legend: T query rows, K key rows, H heads, d head width, S slices of a row's keys.

A program keeps a tile of heads of one query row and walks over the row's keys: those of its window, from the step or
the ring, then its compressed entries. All heads share the keys, which are the values too, so a tile of keys is read
once for both products. With few rows the keys are cut into S slices whose partial results are merged by their
log-sum-exps in a second kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ...attention.plan import AttentionPlan, LayerCache
from ...rope import RopeTable
from .jit import NUM_SMS, dot, launch, load_angles, narrow, power, rotate_pairs

BLOCK_HEADS, BLOCK_KEYS = 32, 32
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _attend_tile(queries, keys, seen, scale, top, total, mixed):
    """One step of the online softmax: ``queries`` [heads, d], ``keys`` [n, d], of which ``seen`` [n] count."""
    logits = dot(queries, tl.trans(keys), tl.zeros((queries.shape[0], keys.shape[0]), dtype=tl.float32)) * scale
    logits = tl.where(seen[None, :], logits, LOWEST)
    higher = tl.maximum(top, tl.max(logits, axis=1))
    probs = tl.where(seen[None, :], tl.exp(logits - higher[:, None]), 0.0)
    shrink = tl.exp(top - higher)
    total = total * shrink + tl.sum(probs, axis=1)
    return higher, total, dot(narrow(probs, keys.dtype), keys, mixed * shrink[:, None])


@triton.jit
def _finish(
    mixed, top, total, sinks, cos, sin, position, out, row, head, channel, num_heads, num_pairs,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Divide by the softmax's sum, to which the sink adds, undo the rotation, and store [heads, d]."""
    sink = tl.load(sinks + head, mask=head < num_heads, other=0.0)
    higher = tl.maximum(top, sink)
    shrink = tl.exp(top - higher)
    mixed *= (shrink / (total * shrink + tl.exp(sink - higher)))[:, None]
    pair, first = tl.arange(0, channel.shape[0] // 2)[None, :], (WIDTH + SHIFT) // 2 - num_pairs
    turned = rotate_pairs(
        mixed,
        load_angles(cos, position, pair, first, num_pairs, 1.0),
        -load_angles(sin, position, pair, first, num_pairs, 0.0),
    )
    inside = (head < num_heads)[:, None] & ((channel >= 0) & (channel < WIDTH))[None, :]
    to = out + (row * num_heads + head)[:, None] * WIDTH + channel[None, :]
    tl.store(to, narrow(turned, out.dtype.element_ty), mask=inside)


@triton.jit
def _attend(
    q, keys, ring, num_ring_rows, entries, per_page, page_table, max_pages, selected, num_selected,
    positions, slots, starts, ends, places, sinks, cos, sin, num_pairs, out, parts, stats,
    num_rows, num_heads, window, scale, num_slices,
    RATIO: tl.constexpr, SELECTED: tl.constexpr, BLOCK_WISE: tl.constexpr, SLICED: tl.constexpr,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of heads of one row over one slice of its keys."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    channel = tl.arange(0, BLOCK) - SHIFT
    wide = ((channel >= 0) & (channel < WIDTH))[None, :]
    position, slot, start = tl.load(positions + row), tl.load(slots + row), tl.load(starts + row)
    at = q + (row * num_heads + head)[:, None] * WIDTH + channel[None, :]
    queries = tl.load(at, mask=(head < num_heads)[:, None] & wide, other=0.0)
    top = tl.full((BLOCK_HEADS,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK_HEADS,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_HEADS, BLOCK), dtype=tl.float32)

    # The keys of the window, at positions low .. high, are the row's first tiles.
    if BLOCK_WISE:
        low, high = tl.maximum(start - window, 0), tl.load(ends + row) - 1
    else:
        low, high = tl.maximum(position - window + 1, 0), position
    num_tiles = tl.cdiv(high + 1 - low, BLOCK_KEYS)
    num_entries = num_selected
    if RATIO > 0 and not SELECTED:
        num_entries = ((position + 1) // RATIO).to(tl.int32)
    num_entry_tiles = tl.cdiv(num_entries, BLOCK_KEYS) if RATIO > 0 else 0
    per_slice = tl.cdiv(num_tiles + num_entry_tiles, num_slices)
    first, last = part * per_slice, tl.minimum((part + 1) * per_slice, num_tiles + num_entry_tiles)
    step_row = tl.load(places + row) - position
    for tile in range(first, tl.minimum(last, num_tiles)):
        p = low + tile * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
        seen = p <= high
        in_step = tl.where(seen & (p >= start), step_row + p, 0) * WIDTH
        in_ring = (slot * num_ring_rows + p % num_ring_rows) * WIDTH
        mask = wide & seen[:, None]
        if keys.dtype == ring.dtype:
            source = tl.where(p >= start, keys + in_step, ring + in_ring)
            tile_keys = tl.load(source[:, None] + channel[None, :], mask=mask, other=0.0)
        else:  # the ring is narrower than the step's own rows
            new = mask & (p >= start)[:, None]
            old = tl.load((ring + in_ring)[:, None] + channel[None, :], mask=mask & ~new, other=0.0)
            tile_keys = tl.load((keys + in_step)[:, None] + channel[None, :], mask=new, other=0.0)
            tile_keys = tl.where(new, tile_keys, old.to(tile_keys.dtype))
        top, total, mixed = _attend_tile(queries, tile_keys, seen, scale, top, total, mixed)
    if RATIO > 0:
        for tile in range(tl.maximum(first, num_tiles), last):
            number = (tile - num_tiles) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
            seen, entry = number < num_entries, number.to(tl.int64)
            if SELECTED:
                entry = tl.load(selected + row * num_selected + number, mask=seen, other=-1)
                seen = entry >= 0
            entry = tl.where(seen, entry, 0)
            page = tl.load(page_table + slot * max_pages + entry // per_page).to(tl.int64)
            source = entries + (page * per_page + entry % per_page) * WIDTH
            tile_keys = tl.load(source[:, None] + channel[None, :], mask=wide & seen[:, None], other=0.0)
            tile_keys = tile_keys.to(queries.dtype)
            top, total, mixed = _attend_tile(queries, tile_keys, seen, scale, top, total, mixed)
    if SLICED:
        to = (part * num_rows + row) * num_heads + head
        tl.store(stats + 2 * to, top, mask=head < num_heads)
        tl.store(stats + 2 * to + 1, total, mask=head < num_heads)
        at = parts + to[:, None] * WIDTH + channel[None, :]
        tl.store(at, mixed, mask=(head < num_heads)[:, None] & wide)
    else:
        _finish(
            mixed, top, total, sinks, cos, sin, position, out, row, head, channel, num_heads, num_pairs, WIDTH, SHIFT
        )


@triton.jit
def _merge(
    parts, stats, positions, sinks, cos, sin, num_pairs, out, num_rows, num_heads, num_slices,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The slices of one head of one row, added up at their common scale, and finished."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) + tl.arange(0, 1)
    channel = tl.arange(0, BLOCK) - SHIFT
    wide = ((channel >= 0) & (channel < WIDTH))[None, :]
    top = tl.full((1,), LOWEST, dtype=tl.float32)
    total = tl.zeros((1,), dtype=tl.float32)
    mixed = tl.zeros((1, BLOCK), dtype=tl.float32)
    for part in range(num_slices):
        at = (part * num_rows + row) * num_heads + head
        own_top = tl.load(stats + 2 * at)
        higher = tl.maximum(top, own_top)
        shrink, own_shrink = tl.exp(top - higher), tl.exp(own_top - higher)
        total = total * shrink + tl.load(stats + 2 * at + 1) * own_shrink
        own = tl.load(parts + at[:, None] * WIDTH + channel[None, :], mask=wide, other=0.0)
        mixed = mixed * shrink[:, None] + own * own_shrink[:, None]
        top = higher
    position = tl.load(positions + row)
    _finish(mixed, top, total, sinks, cos, sin, position, out, row, head, channel, num_heads, num_pairs, WIDTH, SHIFT)


def bind_attend(
    sinks: torch.Tensor, window: int, ratio: int, rope: RopeTable, scale: float, row_by_row: bool = False
) -> Callable[..., torch.Tensor]:
    """See :func:`..sparse_attention.attend`."""

    def attend(
        q: torch.Tensor, keys: torch.Tensor, cache: LayerCache, selected: torch.Tensor | None, plan: AttentionPlan
    ) -> torch.Tensor:
        q, keys, rows = q.contiguous(), keys.contiguous(), plan.queries
        (num_rows, num_heads, width), out = q.shape, torch.empty_like(q)
        shift, num_pairs = width % 2, rope.cos.shape[1]
        block, block_heads = power(width + shift, 16), min(power(num_heads, 16), BLOCK_HEADS)
        tiles = (num_rows, triton.cdiv(num_heads, block_heads))
        slices = 4 if row_by_row else min(max(NUM_SMS // max(tiles[0] * tiles[1], 1), 1), 8)
        parts, stats = out, out
        if slices > 1:
            parts = torch.empty((slices, *q.shape), dtype=torch.float32, device=q.device)
            stats = torch.empty((slices, num_rows, num_heads, 2), dtype=torch.float32, device=q.device)
        chosen = selected is not None
        launch(
            _attend, (*tiles, slices),
            q, keys, cache.window, cache.window.shape[1], cache.entries, max(cache.entries.shape[1], 1),
            plan.page_table, plan.page_table.shape[1],
            selected.contiguous() if chosen else plan.page_table, selected.shape[1] if chosen else 0,
            *rows, sinks, rope.cos, rope.sin, num_pairs, out, parts, stats, num_rows, num_heads, window, scale, slices,
            RATIO=ratio, SELECTED=chosen, BLOCK_WISE=plan.bidirectional, SLICED=slices > 1, WIDTH=width, SHIFT=shift,
            BLOCK_HEADS=block_heads, BLOCK_KEYS=BLOCK_KEYS, BLOCK=block, num_warps=8, num_stages=2,
        )  # fmt: skip
        if slices > 1:
            launch(
                _merge, (num_rows, num_heads), parts, stats, rows.positions, sinks, rope.cos, rope.sin, num_pairs, out,
                num_rows, num_heads, slices, WIDTH=width, SHIFT=shift, BLOCK=block, num_warps=4,
            )  # fmt: skip
        return out

    return attend
