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
from .exp import exp_below
from .jit import address, floats, jit, largest
from .norm_rope import rotate_tail
from .product import BYTES, part_product, spot
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
def _entry_scores(q_at, weights, columns, visible, scale, dots, scores):
    """``scores`` of the first ``visible`` entries, which are ``columns`` [d, >= visible], for one query [H, d]."""
    num_heads, d, most = weights.shape[0], columns.shape[0], columns.shape[1]
    part_product(q_at, d, columns.ctypes.data, most, dots.ctypes.data, most, num_heads, d, visible)
    for t in range(visible):
        scores[t] = 0
    for h in range(num_heads):
        for t in range(visible):
            scores[t] += weights[h] * max(dots[h, t], np.float32(0))
    for t in range(visible):
        scores[t] *= scale


@jit
def _select(first, last, q_at, weights_at, num_heads, pool, queries, page_table, ratio, scale, most, chosen):
    """Of the rows from ``first`` to before ``last``."""
    (num_rows, num_selected), (per_page, d) = chosen.shape, pool.shape[1:]
    weights = floats(weights_at, (num_rows, num_heads))
    best, scores = np.empty(num_selected, np.float32), np.empty(most, np.float32)
    columns, dots = np.empty((d, most), np.float32), np.empty((num_heads, most), np.float32)
    i = first
    while i < last:
        run, slot = _run_length(queries, i, last), queries[1, i]
        most_visible = (queries[0, i + run - 1] + 1) // ratio
        if most_visible > num_selected:
            for t in range(most_visible):
                key = pool[page_table[slot, t // per_page], t % per_page]
                for j in range(d):
                    columns[j, t] = key[j]
        for r in range(i, i + run):
            visible = (queries[0, r] + 1) // ratio
            if visible <= num_selected:
                for t in range(num_selected):
                    chosen[r, t] = t if t < visible else -1
            else:
                at = q_at + BYTES * r * num_heads * d
                _entry_scores(at, weights[r], columns, visible, scale, dots, scores)
                _choose(scores, visible, best, chosen[r])
        i += run


@shared
def _select_shared(num_parts, q_at, weights_at, num_heads, pool, queries, page_table, ratio, scale, most, chosen):
    for part in prange(num_parts):
        first, last = share(chosen.shape[0], part, num_parts)
        _select(first, last, q_at, weights_at, num_heads, pool, queries, page_table, ratio, scale, most, chosen)


@jit
def _keep(row, at, seen, columns):
    """Put a key down as number ``at`` of ``seen`` [n, d] and of ``columns`` [d, n]."""
    for j in range(row.shape[0]):
        seen[at, j] = row[j]
        columns[j, at] = row[j]


@jit
def _softmax(logits, sink):
    """``e^(logits - top)`` in place, and one over their sum with the sink's share."""
    top = max(sink, largest(logits))
    total = exp_below(sink - top)
    for k in range(logits.shape[0]):
        logits[k] = exp_below(logits[k] - top)
        total += logits[k]
    return np.float32(1) / total


@jit
def _attend_row(q, seen, columns, low, num_window, first, num_entries, sinks, probs, mixed, inverse, out):
    """One scaled query ``q`` [H, d] over two stretches of keys: ``num_window`` from ``low`` on, and ``num_entries``
    from ``first`` on. ``probs`` [H, >= number of keys] ``mixed`` [2 H, d], ``inverse`` [H] are scratch."""
    (num_heads, d), most, num_probs = q.shape, columns.shape[1], probs.shape[1]
    q_at, probs_at, entry_probs_at = spot(q, 0, 0), spot(probs, 0, 0), spot(probs, 0, num_window)
    low_at, first_at = spot(columns, 0, low), spot(columns, 0, first)
    part_product(q_at, d, low_at, most, probs_at, num_probs, num_heads, d, num_window)
    part_product(q_at, d, first_at, most, entry_probs_at, num_probs, num_heads, d, num_entries)
    for h in range(num_heads):
        inverse[h] = _softmax(probs[h, : num_window + num_entries], sinks[h])
    low_at, first_at = spot(seen, low, 0), spot(seen, first, 0)
    part_product(probs_at, num_probs, low_at, d, spot(mixed, 0, 0), d, num_heads, num_window, d)
    part_product(entry_probs_at, num_probs, first_at, d, spot(mixed, num_heads, 0), d, num_heads, num_entries, d)
    for h in range(num_heads):
        for j in range(d):
            out[h, j] = (mixed[h, j] + mixed[num_heads + h, j]) * inverse[h]


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
def _keep_entry(entries, page_table, slot, t, at, seen, columns):
    per_page = entries.shape[1]
    _keep(entries[page_table[slot, t // per_page], t % per_page], at, seen, columns)


@jit
def attend_rows(
    first, last, q_at, keys_at, num_step_keys, ring, entries, selected, all_visible, queries, page_table, block, sinks,
    window, ratio, cos, minus_sin, scale, out,
):  # fmt: skip
    """Of the rows from ``first`` to before ``last``."""
    num_heads, d = out.shape[1:]
    q, keys = floats(q_at, out.shape), floats(keys_at, (num_step_keys, d))
    first_entry, most_entries = _sizes(queries, window, ratio, selected.shape[1], all_visible, block)
    most = first_entry + most_entries
    # Keys of a run: those of its windows in order of positions, and from ``first_entry`` on entries.
    seen, columns = np.empty((most, d), np.float32), np.empty((d, most), np.float32)
    probs, mixed = np.empty((num_heads, most), np.float32), np.empty((2 * num_heads, d), np.float32)
    scaled, inverse = np.empty((num_heads, d), np.float32), np.empty(num_heads, np.float32)
    i = first
    while i < last:
        run = _run_length(queries, i, last)
        p, slot, start, at = queries[0, i], queries[1, i], queries[2, i], queries[4, i]
        lowest = max(0, start - window if block else p - window + 1)
        for s in range(lowest, queries[3, i] if block else p + run):
            _keep(keys[at - (p - s)] if s >= start else ring[slot, s % ring.shape[1]], s - lowest, seen, columns)
        num_entries = 0
        if ratio > 0 and all_visible:
            for t in range((p + run) // ratio):
                _keep_entry(entries, page_table, slot, t, first_entry + t, seen, columns)
        for r in range(i, i + run):
            p = queries[0, r]
            low = 0 if block else max(0, p - window + 1) - lowest
            num_window = queries[3, r] - lowest if block else p + 1 - lowest - low
            if ratio > 0 and all_visible:
                num_entries = (p + 1) // ratio
            elif ratio > 0:
                num_entries = 0
                for k in range(selected.shape[1]):
                    if selected[r, k] >= 0:
                        at_entry = first_entry + num_entries
                        _keep_entry(entries, page_table, slot, selected[r, k], at_entry, seen, columns)
                        num_entries += 1
            for h in range(num_heads):
                for j in range(d):
                    scaled[h, j] = q[r, h, j] * scale
            _attend_row(
                scaled, seen, columns, low, num_window, first_entry, num_entries, sinks, probs, mixed, inverse, out[r]
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
