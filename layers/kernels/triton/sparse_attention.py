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
from ..packed_keys import is_packed
from .jit import NUM_SMS, dot, launch, load_angles, narrow, power, rotate_pairs
from .packed_keys import load_packed

BLOCK_HEADS, BLOCK_KEYS = 32, 32
PACKED_HEADS = 16  # with packed keys, more would not fit in registers
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
def _load_keys(
    source, seen, channel, dtype: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Keys [n, channels] in ``dtype`` that begin at ``source`` [n]; zeros unless ``seen``."""
    if PACKED:
        return load_packed(source, seen, dtype, WIDTH, ROTARY, channel.shape[0])
    inside = seen[:, None] & ((channel >= 0) & (channel < WIDTH))[None, :]
    return tl.load(source[:, None] + channel[None, :], mask=inside, other=0.0).to(dtype)


@triton.jit
def _window_keys(
    keys, ring, num_ring_rows, p, seen, slot, start, step_row, channel, dtype: tl.constexpr,
    ROW: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """The keys at positions ``p`` of a row's request: from ``start`` on the step's, before it those of the ring."""
    new = seen & (p >= start)
    in_step = tl.where(new, step_row + p, 0) * ROW
    in_ring = (slot * num_ring_rows + p % num_ring_rows) * ROW
    if keys.dtype == ring.dtype:
        source = tl.where(new, keys + in_step, ring + in_ring)
        return _load_keys(source, seen, channel, dtype, WIDTH, PACKED, ROTARY)
    old = _load_keys(ring + in_ring, seen & (p < start), channel, dtype, WIDTH, PACKED, ROTARY)
    return tl.where(new[:, None], _load_keys(keys + in_step, new, channel, dtype, WIDTH, PACKED, ROTARY), old)


@triton.jit
def _attend(
    q, keys, ring, num_ring_rows, entries, per_page, page_table, max_pages, selected, num_selected,
    positions, slots, starts, ends, places, sinks, cos, sin, num_pairs, out, parts, stats,
    num_rows, num_heads, window, scale, num_slices,
    RATIO: tl.constexpr, SELECTED: tl.constexpr, BLOCK_WISE: tl.constexpr, SLICED: tl.constexpr,
    ROW: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, ROTARY: tl.constexpr, SHIFT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of heads of one row over one slice of its keys. ``ROW``: items of a row of keys."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    channel, step = tl.arange(0, BLOCK) - SHIFT, tl.arange(0, BLOCK_KEYS)
    inside = (head < num_heads)[:, None] & ((channel >= 0) & (channel < WIDTH))[None, :]
    position, slot, start = tl.load(positions + row), tl.load(slots + row), tl.load(starts + row)
    at = q + (row * num_heads + head)[:, None] * WIDTH + channel[None, :]
    queries = tl.load(at, mask=inside, other=0.0)
    top = tl.full((BLOCK_HEADS,), LOWEST, dtype=tl.float32)
    total = tl.zeros((BLOCK_HEADS,), dtype=tl.float32)
    mixed = tl.zeros((BLOCK_HEADS, BLOCK), dtype=tl.float32)

    # The keys of the window, at positions low .. high, are the row's first tiles.
    low = tl.maximum((start if BLOCK_WISE else position + 1) - window, 0)
    high = tl.load(ends + row) - 1 if BLOCK_WISE else position
    num_tiles = tl.cdiv(high + 1 - low, BLOCK_KEYS)
    num_entries = num_selected
    if RATIO > 0 and not SELECTED:
        num_entries = ((position + 1) // RATIO).to(tl.int32)
    num_entry_tiles = tl.cdiv(num_entries, BLOCK_KEYS) if RATIO > 0 else 0
    per_slice = tl.cdiv(num_tiles + num_entry_tiles, num_slices)
    first, last = part * per_slice, tl.minimum((part + 1) * per_slice, num_tiles + num_entry_tiles)
    step_row = tl.load(places + row) - position
    for tile in range(first, tl.minimum(last, num_tiles)):
        p = low + tile * BLOCK_KEYS + step
        tile_keys = _window_keys(
            keys, ring, num_ring_rows, p, p <= high, slot, start, step_row, channel, queries.dtype,
            ROW, WIDTH, PACKED, ROTARY,
        )  # fmt: skip
        top, total, mixed = _attend_tile(queries, tile_keys, p <= high, scale, top, total, mixed)
    if RATIO > 0:
        for tile in range(tl.maximum(first, num_tiles), last):
            number = (tile - num_tiles) * BLOCK_KEYS + step
            entry = number.to(tl.int64)
            if SELECTED:
                entry = tl.load(selected + row * num_selected + number, mask=number < num_entries, other=-1)
            seen = (number < num_entries) & (entry >= 0)
            entry = tl.where(seen, entry, 0)
            page = tl.load(page_table + slot * max_pages + entry // per_page).to(tl.int64)
            source = entries + (page * per_page + entry % per_page) * ROW
            tile_keys = _load_keys(source, seen, channel, queries.dtype, WIDTH, PACKED, ROTARY)
            top, total, mixed = _attend_tile(queries, tile_keys, seen, scale, top, total, mixed)
    if SLICED:
        to = (part * num_rows + row) * num_heads + head
        tl.store(stats + 2 * to, top, mask=head < num_heads)
        tl.store(stats + 2 * to + 1, total, mask=head < num_heads)
        tl.store(parts + to[:, None] * WIDTH + channel[None, :], mixed, mask=inside)
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
        shift, num_pairs, packed = width % 2, rope.cos.shape[1], is_packed(keys)
        assert not (packed and shift), f"packed keys have an even width, not {width}"
        block_heads = min(power(num_heads, 16), PACKED_HEADS if packed else BLOCK_HEADS)
        block = power(width + shift, 16)
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
            RATIO=ratio, SELECTED=chosen, BLOCK_WISE=plan.bidirectional, SLICED=slices > 1,
            ROW=keys.shape[1], WIDTH=width, PACKED=packed, ROTARY=2 * num_pairs, SHIFT=shift,
            BLOCK_HEADS=block_heads, BLOCK_KEYS=BLOCK_KEYS, BLOCK=block, num_warps=8, num_stages=2,
        )  # fmt: skip
        if slices > 1:
            launch(
                _merge, (num_rows, num_heads), parts, stats, rows.positions, sinks, rope.cos, rope.sin, num_pairs, out,
                num_rows, num_heads, slices, WIDTH=width, SHIFT=shift, BLOCK=block, num_warps=4,
            )  # fmt: skip
        return out

    return attend
