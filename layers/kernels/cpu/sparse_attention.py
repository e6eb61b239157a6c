"""Index scores, selection and sparse attention. Legend: T query rows, K key rows, H heads, d head width, k selected."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...attention.plan import AttentionPlan, LayerCache
from ...rope import RopeTable
from .jit import host, jit
from .norm_rope import rotate_tail


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
def _select(q, weights, pool, queries, page_table, ratio, scale, chosen):
    num_selected, per_page = chosen.shape[1], pool.shape[1]
    best = np.empty(num_selected, np.float32)
    for i in range(q.shape[0]):
        visible, slot = (queries[0, i] + 1) // ratio, queries[1, i]
        if visible <= num_selected:
            for t in range(visible):
                chosen[i, t] = t
            chosen[i, visible:] = -1
            continue
        for t in range(visible):
            key = pool[page_table[slot, t // per_page], t % per_page]
            score = np.float32(0)
            for h in range(q.shape[1]):
                dot = np.float32(0)
                for j in range(q.shape[2]):
                    dot += q[i, h, j] * key[j]
                if dot > 0:
                    score += weights[i, h] * dot
            score *= scale
            if t < num_selected:
                best[t], chosen[i, t] = score, t
                _climb(best, chosen[i], t)
            elif score > best[0]:
                best[0], chosen[i, 0] = score, t
                _sift(best, chosen[i], num_selected)


@jit
def _attend_row(q, columns, num_keys, sinks, scale, probs, out):
    """One query ``q`` [H, d] over ``columns`` [d, >= num_keys] (keys as columns, also the values)."""
    d = q.shape[1]
    for h in range(q.shape[0]):
        probs[:num_keys] = 0
        for j in range(d):
            x = q[h, j] * scale
            for k in range(num_keys):
                probs[k] += x * columns[j, k]
        top = sinks[h]
        for k in range(num_keys):
            top = max(top, probs[k])
        total = np.exp(sinks[h] - top)
        for k in range(num_keys):
            probs[k] = np.exp(probs[k] - top)
            total += probs[k]
        inverse = np.float32(1) / total
        for j in range(d):
            value = np.float32(0)
            for k in range(num_keys):
                value += probs[k] * columns[j, k]
            out[h, j] = value * inverse


@jit
def _attend(
    q,
    keys,
    ring,
    entries,
    selected,
    all_visible,
    queries,
    page_table,
    block,
    sinks,
    window,
    ratio,
    cos,
    minus_sin,
    scale,
    out,
):
    d, per_page = q.shape[2], entries.shape[1]
    most_entries, most_rows = 0, 0
    for i in range(q.shape[0]):
        if ratio > 0:
            most_entries = max(most_entries, (queries[0, i] + 1) // ratio if all_visible else selected.shape[1])
        if block:
            most_rows = max(most_rows, queries[3, i] - queries[2, i])
    most = window + most_rows + most_entries
    columns = np.empty((d, most), np.float32)
    probs = np.empty(most, np.float32)
    for i in range(q.shape[0]):
        p, slot, start, at = queries[0, i], queries[1, i], queries[2, i], queries[4, i]
        num_keys = 0
        first = start - window if block else p - window + 1
        last = queries[3, i] if block else p + 1
        for s in range(max(0, first), last):
            row = keys[at - (p - s)] if s >= start else ring[slot, s % ring.shape[1]]
            for j in range(d):
                columns[j, num_keys] = row[j]
            num_keys += 1
        if ratio > 0:
            for k in range((p + 1) // ratio if all_visible else selected.shape[1]):
                t = k if all_visible else selected[i, k]
                if t >= 0:
                    row = entries[page_table[slot, t // per_page], t % per_page]
                    for j in range(d):
                        columns[j, num_keys] = row[j]
                    num_keys += 1
        _attend_row(q[i], columns, num_keys, sinks, scale, probs, out[i])
        for h in range(q.shape[1]):
            rotate_tail(out[i, h], cos[p], minus_sin[p])


def bind_select_entries(ratio: int, top_k: int, scale: float) -> Callable[..., torch.Tensor]:
    """See :func:`..sparse_attention.select_entries`."""
    factor = np.float32(scale)

    def select_entries(q: torch.Tensor, weights: torch.Tensor, cache: LayerCache, plan: AttentionPlan) -> torch.Tensor:
        num_selected = min(top_k, (plan.max_position + 1) // ratio)
        chosen = np.empty((q.shape[0], num_selected), np.int64)
        pool = cache.host.index_entries
        _select(host(q), host(weights), pool, plan.host.queries, plan.host.page_table, ratio, factor, chosen)
        return torch.from_numpy(chosen)

    return select_entries


def bind_attend(
    sinks: torch.Tensor, window: int, ratio: int, rope: RopeTable, scale: float
) -> Callable[..., torch.Tensor]:
    """See :func:`..sparse_attention.attend`."""
    weights = (sinks.numpy(), window, ratio, rope.cos.numpy(), -rope.sin.numpy(), np.float32(scale))
    nothing = np.empty((0, 0), np.int64)

    def attend(
        q: torch.Tensor, keys: torch.Tensor, cache: LayerCache, selected: torch.Tensor | None, plan: AttentionPlan
    ) -> torch.Tensor:
        out = np.empty(q.shape, np.float32)
        buffers, steps = cache.host, plan.host
        picks = nothing if selected is None else host(selected)
        _attend(
            host(q),
            host(keys),
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
        return torch.from_numpy(out)

    return attend
