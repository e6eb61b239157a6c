"""Sparse attention. Legend: T query rows, K key rows, H heads, H' these in whole vectors, d head width, k selected."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import prange

from ...attention.plan import AttentionPlan, LayerCache
from ...rope import RopeTable
from .. import sparse_attention as plain
from ..packed_keys import is_packed
from .jit import address, floats, jit
from .norm_rope import rotate_tail
from .product import BYTES, LANES, in_vectors, part_product, spot
from .runs import MOST_SHARING, across, run_length
from .softmax import softmax_lanes
from .threads import rows_to_share, share, shared, use_threads


@jit
def _copy(from_at, to_at, count):
    """``count`` numbers from one address to another."""
    given, to = floats(from_at, (count,)), floats(to_at, (count,))
    for j in range(count):
        to[j] = given[j]


@jit
def _keep_window(ring, lowest, start, keys, at, highest, seen):
    """The keys at positions ``lowest`` to before ``highest`` into ``seen`` [n, d]: those before ``start`` from the
    ``ring`` [R, d] of their request, the others from the step's ``keys``, where row ``at`` is at position ``start``."""
    num_ring_rows, d = ring.shape
    stop = max(lowest, min(start, highest))
    begin, num_before = lowest % num_ring_rows, stop - lowest
    upper = min(num_before, num_ring_rows - begin)
    _copy(spot(ring, begin, 0), spot(seen, 0, 0), upper * d)
    _copy(spot(ring, 0, 0), spot(seen, upper, 0), (num_before - upper) * d)
    _copy(spot(keys, at + stop - start, 0), spot(seen, num_before, 0), (highest - stop) * d)


@jit
def _multiply(columns, first, count, seen, at, num_keys, logits):
    """``logits`` of ``num_keys`` of the keys ``seen``, from ``at`` on, with ``count`` of the ``columns`` [d, C] from
    ``first`` on, all at the same places of ``logits`` [keys, C]."""
    d, width = columns.shape
    part_product(spot(seen, at, 0), d, 1, spot(columns, 0, first), width, spot(logits, at, first), width, num_keys, d,
                 count)  # fmt: skip


@jit
def _attend_row(logits, at, seen, low, num_window, first, num_entries, sinks, mixed, inverse, out):
    """One row's ``out`` [H, d] from its ``logits`` with two stretches of the keys ``seen``: ``num_window`` from ``low``
    on, and ``num_entries`` from ``first`` on. Its heads are the columns from ``at`` on, in whole vectors, whose
    ``sinks`` are [1, H']; ``mixed`` [2 H, d] and ``inverse`` [1, H'] are scratch."""
    (num_heads, d), width, row = out.shape, logits.shape[1], BYTES * logits.shape[1]
    for h in range(0, sinks.shape[1], LANES):
        softmax_lanes(row, spot(logits, low, at + h), num_window, spot(logits, first, at + h), num_entries,
                      spot(sinks, 0, h), spot(inverse, 0, h))  # fmt: skip
    part_product(spot(logits, low, at), 1, width, spot(seen, low, 0), d, spot(mixed, 0, 0), d, num_heads, num_window, d)
    part_product(spot(logits, first, at), 1, width, spot(seen, first, 0), d, spot(mixed, num_heads, 0), d, num_heads,
                 num_entries, d)  # fmt: skip
    for h in range(num_heads):
        for j in range(d):
            out[h, j] = (mixed[h, j] + mixed[num_heads + h, j]) * inverse[0, h]


@jit
def _sizes(queries, window, ratio, num_selected, all_visible, block):
    """The most window keys and the most entries that a run of rows sees."""
    most_window, most_entries = window + MOST_SHARING - 1, 0 if all_visible else num_selected
    for i in range(queries.shape[1]):
        if block:
            most_window = max(most_window, window + queries[3, i] - queries[2, i])
        if ratio > 0 and all_visible:
            most_entries = max(most_entries, (queries[0, i] + 1) // ratio)
    return most_window, most_entries


@jit
def _keep_entries(entries, pages, count, seen, at):
    """The first ``count`` entries into ``seen`` from row ``at`` on."""
    per_page, d = entries.shape[1:]
    for t in range(0, count, per_page):
        page = entries[pages[t // per_page]]
        _copy(spot(page, 0, 0), spot(seen, at + t, 0), min(per_page, count - t) * d)


@jit
def _keep_selected(entries, pages, selected, seen, at):
    """The ``selected`` entries, as far as they are not -1, into ``seen`` from row ``at`` on; how many there are."""
    (per_page, d), count = entries.shape[1:], 0
    for k in range(selected.shape[0]):
        if selected[k] >= 0:
            t = selected[k]
            _copy(spot(entries[pages[t // per_page]], t % per_page, 0), spot(seen, at + count, 0), d)
            count += 1
    return count


@jit
def attend_rows(
    first, last, q_at, keys_at, num_step_keys, ring, entries, selected, all_visible, queries, page_table, block, sinks,
    window, ratio, cos, minus_sin, scale, out,
):  # fmt: skip
    """Of the rows from ``first`` to before ``last``."""
    num_heads, d = out.shape[1:]
    width, q, keys = in_vectors(num_heads), floats(q_at, out.shape), floats(keys_at, (num_step_keys, d))
    first_entry, most_entries = _sizes(queries, window, ratio, selected.shape[1], all_visible, block)
    # Keys of a run: those of its windows in order of positions, and from ``first_entry`` on entries. Its queries lie
    # side by side in the vector registers.
    seen, sharing = np.empty((first_entry + most_entries, d), np.float32), min(MOST_SHARING, last - first)
    columns = np.zeros((d, sharing * width), np.float32)
    logits, mixed = np.empty((len(seen), sharing * width), np.float32), np.empty((2 * num_heads, d), np.float32)
    padded, inverse = np.zeros((1, width), np.float32), np.empty((1, width), np.float32)
    padded[0, :num_heads] = sinks
    i = first
    while i < last:
        run = run_length(queries, i, last)
        p, slot, start, at = queries[0, i], queries[1, i], queries[2, i], queries[4, i]
        pages, lowest = page_table[slot], max(0, start - window if block else p - window + 1)
        highest = queries[3, i] if block else p + run
        _keep_window(ring[slot], lowest, start, keys, at - (p - start), highest, seen)
        for r in range(run):
            across(q[i + r], scale, columns[:, r * width :])
        _multiply(columns, 0, run * width, seen, 0, highest - lowest, logits)
        num_entries = 0
        if ratio > 0 and all_visible:
            _keep_entries(entries, pages, (p + run) // ratio, seen, first_entry)
            _multiply(columns, 0, run * width, seen, first_entry, (p + run) // ratio, logits)
        for r in range(i, i + run):
            p = queries[0, r]
            low = 0 if block else max(0, p - window + 1) - lowest
            num_window = queries[3, r] - lowest if block else p + 1 - lowest - low
            if ratio > 0 and all_visible:
                num_entries = (p + 1) // ratio
            elif ratio > 0:
                num_entries = _keep_selected(entries, pages, selected[r], seen, first_entry)
                _multiply(columns, (r - i) * width, width, seen, first_entry, num_entries, logits)
            _attend_row(
                logits, (r - i) * width, seen, low, num_window, first_entry, num_entries, padded, mixed, inverse, out[r]
            )
            for h in range(num_heads):
                rotate_tail(out[r, h], cos[p], minus_sin[p])
        i += run


@shared
def _attend_shared(
    num_parts, q_at, keys_at, num_step_keys, ring, entries, selected, all_visible, queries, page_table, block, sinks,
    window, ratio, cos, minus_sin, scale, out,
):  # fmt: skip
    for part in prange(num_parts):
        first, last = share(out.shape[0], part, num_parts)
        attend_rows(
            first, last, q_at, keys_at, num_step_keys, ring, entries, selected, all_visible, queries, page_table, block,
            sinks, window, ratio, cos, minus_sin, scale, out,
        )  # fmt: skip


def bind_attend(
    sinks: torch.Tensor, window: int, ratio: int, rope: RopeTable, scale: float
) -> Callable[..., torch.Tensor]:
    """See :func:`..sparse_attention.attend`, to which packed keys are left. Rings and pages are C-contiguous."""
    law = {"sinks": sinks, "window": window, "ratio": ratio, "rope": rope, "scale": scale}
    weights = (sinks.numpy(), window, ratio, rope.cos.numpy(), -rope.sin.numpy(), np.float32(scale))
    nothing, threads = np.empty((0, 0), np.int64), use_threads()

    def attend(
        q: torch.Tensor, keys: torch.Tensor, cache: LayerCache, selected: torch.Tensor | None, plan: AttentionPlan
    ) -> torch.Tensor:
        if is_packed(keys):
            return plain.attend(q, keys, cache, selected, plan, **law)
        q, keys = q.contiguous(), keys.contiguous()
        out = np.empty(q.shape, np.float32)
        buffers, steps = cache.host, plan.host
        picks = nothing if selected is None else selected.contiguous().numpy()
        given = (
            address(q),
            address(keys),
            keys.shape[0],
            buffers.window,
            buffers.entries,
            picks,
            selected is None,
            steps.queries,
            steps.page_table,
            plan.bidirectional,
            *weights,
            out,
        )
        # Each key is gathered, multiplied twice, and goes through an exponential function.
        if len(out) < rows_to_share(4 * window * q.shape[1] * q.shape[2], threads):
            attend_rows(0, len(out), *given)
        else:
            _attend_shared(threads, *given)
        return torch.from_numpy(out)

    attend.weights = weights
    return attend
