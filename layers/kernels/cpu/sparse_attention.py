"""Index scores, selection and sparse attention. Legend: T query rows, K key rows, H heads, d head width, k selected."""

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
from .softmax import softmax_lanes
from .threads import rows_to_share, share, shared, use_threads

# At most so many rows of a request share the keys that are gathered for them.
MOST_SHARING = 8


@jit
def _precedes(score, entry, other_score, other_entry):
    """Whether the first of two entries is the worse: lower score, or later of equal scores."""
    return score < other_score or (score == other_score and entry > other_entry)


@jit
def _sift(scores, chosen, size):
    """Restore the heap whose root is the worst chosen entry after its root was replaced."""
    at = 0
    while True:
        worst, left = at, 2 * at + 1
        for child in range(left, min(left + 2, size)):
            if _precedes(scores[child], chosen[child], scores[worst], chosen[worst]):
                worst = child
        if worst == at:
            return
        scores[at], scores[worst] = scores[worst], scores[at]
        chosen[at], chosen[worst] = chosen[worst], chosen[at]
        at = worst


@jit
def _climb(scores, chosen, at):
    """Restore the heap after an entry was appended at ``at``."""
    while at > 0:
        parent = (at - 1) // 2
        if not _precedes(scores[at], chosen[at], scores[parent], chosen[parent]):
            return
        scores[at], scores[parent] = scores[parent], scores[at]
        chosen[at], chosen[parent] = chosen[parent], chosen[at]
        at = parent


@jit
def _run_length(queries, i, last):
    """How many rows from ``i`` on, before ``last``, are neighbours: of one request in one step, at consecutive
    positions."""
    n = 1
    while n < MOST_SHARING and i + n < last:
        same = queries[1, i + n] == queries[1, i] and queries[2, i + n] == queries[2, i]
        if not same or queries[0, i + n] != queries[0, i] + n:
            break
        n += 1
    return n


@jit
def _choose(scores, visible, best, chosen):
    """The entries of the highest of ``visible`` scores, as many as fit in ``chosen`` [k]; ``best`` [k] is scratch."""
    num_selected = chosen.shape[0]
    for t in range(visible):
        if t < num_selected:
            best[t], chosen[t] = scores[t], t
            _climb(best, chosen, t)
        elif scores[t] > best[0]:
            best[0], chosen[0] = scores[t], t
            _sift(best, chosen, num_selected)


@jit
def _entry_scores(dots, first, weights, visible, scale, scores):
    """``scores`` of the first ``visible`` entries for one query, whose heads' products with them are ``dots`` [entries,
    ..] from column ``first`` on, and ``weights`` [H]."""
    for t in range(visible):
        scores[t] = 0
    for h in range(weights.shape[0]):
        for t in range(visible):
            scores[t] += weights[h] * max(dots[t, first + h], np.float32(0))
    for t in range(visible):
        scores[t] *= scale


@jit
def _across(rows, factor, columns):
    """``columns`` [d, >= R] of ``rows`` [R, d] times ``factor``; what lies behind column R is left alone."""
    for r in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            columns[j, r] = rows[r, j] * factor


@jit
def _entry_dots(columns, pool, pages, num_entries, dots):
    """``dots`` [entries, C] of the first ``num_entries`` entries of a request with ``columns`` [d, C]."""
    (per_page, d), width = pool.shape[1:], columns.shape[1]
    for first in range(0, num_entries, per_page):
        count, page_at = min(per_page, num_entries - first), pool[pages[first // per_page]].ctypes.data
        part_product(page_at, d, 1, spot(columns, 0, 0), width, spot(dots, first, 0), width, count, d, width)


@jit
def _select(first, last, q_at, weights_at, num_heads, pool, queries, page_table, ratio, scale, most, chosen):
    """Of the rows from ``first`` to before ``last``. The queries of a run lie side by side in the vector registers."""
    (num_rows, num_selected), d = chosen.shape, pool.shape[2]
    q, weights = floats(q_at, (num_rows * num_heads, d)), floats(weights_at, (num_rows, num_heads))
    best, scores = np.empty(num_selected, np.float32), np.empty(most, np.float32)
    width = in_vectors(min(MOST_SHARING, last - first) * num_heads)
    columns, dots = np.zeros((d, width), np.float32), np.empty((most, width), np.float32)
    i = first
    while i < last:
        run, slot = _run_length(queries, i, last), queries[1, i]
        most_visible = (queries[0, i + run - 1] + 1) // ratio
        if most_visible > num_selected:
            _across(q[i * num_heads : (i + run) * num_heads], np.float32(1), columns)
            _entry_dots(columns, pool, page_table[slot], most_visible, dots)
        for r in range(i, i + run):
            visible = (queries[0, r] + 1) // ratio
            if visible <= num_selected:
                for t in range(num_selected):
                    chosen[r, t] = t if t < visible else -1
            else:
                _entry_scores(dots, (r - i) * num_heads, weights[r], visible, scale, scores)
                _choose(scores, visible, best, chosen[r])
        i += run


@shared
def _select_shared(num_parts, q_at, weights_at, num_heads, pool, queries, page_table, ratio, scale, most, chosen):
    for part in prange(num_parts):
        first, last = share(chosen.shape[0], part, num_parts)
        _select(first, last, q_at, weights_at, num_heads, pool, queries, page_table, ratio, scale, most, chosen)


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
        run = _run_length(queries, i, last)
        p, slot, start, at = queries[0, i], queries[1, i], queries[2, i], queries[4, i]
        pages, lowest = page_table[slot], max(0, start - window if block else p - window + 1)
        highest = queries[3, i] if block else p + run
        _keep_window(ring[slot], lowest, start, keys, at - (p - start), highest, seen)
        for r in range(run):
            _across(q[i + r], scale, columns[:, r * width :])
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


def bind_select_entries(ratio: int, top_k: int, scale: float) -> Callable[..., torch.Tensor]:
    """See :func:`..sparse_attention.select_entries`."""
    factor, threads = np.float32(scale), use_threads()

    def select_entries(q: torch.Tensor, weights: torch.Tensor, cache: LayerCache, plan: AttentionPlan) -> torch.Tensor:
        q, weights = q.contiguous(), weights.contiguous()
        (num_rows, num_heads, d), most, steps = q.shape, (plan.max_position + 1) // ratio, plan.host
        chosen = np.empty((num_rows, min(top_k, most)), np.int64)
        given = (address(q), address(weights), num_heads, cache.host.index_entries, steps.queries, steps.page_table)
        if num_rows < rows_to_share(num_heads * d * most, threads):
            _select(0, num_rows, *given, ratio, factor, most, chosen)
        else:
            _select_shared(threads, *given, ratio, factor, most, chosen)
        return torch.from_numpy(chosen)

    return select_entries


def bind_attend(
    sinks: torch.Tensor, window: int, ratio: int, rope: RopeTable, scale: float
) -> Callable[..., torch.Tensor]:
    """See :func:`..sparse_attention.attend`, to which packed keys are left."""
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
