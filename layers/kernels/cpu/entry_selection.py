"""Index scores and selection of entries. Legend: T query rows, H index heads, d their width, k selected, n entries of a
page."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import prange

from ...attention.plan import AttentionPlan, LayerCache
from .jit import address, floats, jit
from .product import in_vectors, part_product, spot
from .runs import MOST_SHARING, across, run_length
from .threads import rows_to_share, share, shared, use_threads


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
def _add_up(dots, first, weights, scale, scores):
    """``scores`` of the first entries of a page for one query, whose heads' products with them are ``dots`` [n, ..]
    from column ``first`` on, and ``weights`` [H]."""
    for t in range(scores.shape[0]):
        total = np.float32(0)
        for h in range(weights.shape[0]):
            total += weights[h] * max(dots[t, first + h], np.float32(0))
        scores[t] = total * scale


@jit
def _score_run(columns, weights, pool, pages, visible, scale, dots, scores):
    """``scores`` [rows, >= visible] of the entries that each row of a run sees, ``visible`` [rows], page by page. Its
    queries are ``columns`` [d, C], H of them a row, with ``weights`` [rows, H]; ``dots`` [n, C] is scratch."""
    (per_page, d), width, most = pool.shape[1:], columns.shape[1], visible[-1]
    used = in_vectors(weights.size)
    for at in range(0, most, per_page):
        page_at, count = spot(pool[pages[at // per_page]], 0, 0), min(per_page, most - at)
        part_product(page_at, d, 1, spot(columns, 0, 0), width, spot(dots, 0, 0), width, count, d, used)
        for r in range(weights.shape[0]):
            stop = max(at, min(at + count, visible[r]))
            _add_up(dots, r * weights.shape[1], weights[r], scale, scores[r, at:stop])


@jit
def _select(first, last, q_at, weights_at, num_heads, pool, queries, page_table, ratio, scale, most, chosen):
    """Of the rows from ``first`` to before ``last``. The queries of a run lie side by side in the vector registers."""
    (num_rows, num_selected), (per_page, d) = chosen.shape, pool.shape[1:]
    q, weights = floats(q_at, (num_rows * num_heads, d)), floats(weights_at, (num_rows, num_heads))
    sharing = min(MOST_SHARING, last - first)
    width = in_vectors(sharing * num_heads)
    columns, dots = np.zeros((d, width), np.float32), np.empty((per_page, width), np.float32)
    best, scores = np.empty(num_selected, np.float32), np.empty((sharing, most), np.float32)
    i = first
    while i < last:
        run, slot = run_length(queries, i, last), queries[1, i]
        visible = (queries[0, i : i + run] + 1) // ratio
        if visible[-1] > num_selected:
            across(q[i * num_heads : (i + run) * num_heads], np.float32(1), columns)
            _score_run(columns, weights[i : i + run], pool, page_table[slot], visible, scale, dots, scores)
        for r in range(run):
            if visible[r] <= num_selected:
                for t in range(num_selected):
                    chosen[i + r, t] = t if t < visible[r] else -1
            else:
                _choose(scores[r], visible[r], best, chosen[i + r])
        i += run


@shared
def _select_shared(num_parts, q_at, weights_at, num_heads, pool, queries, page_table, ratio, scale, most, chosen):
    for part in prange(num_parts):
        first, last = share(chosen.shape[0], part, num_parts)
        _select(first, last, q_at, weights_at, num_heads, pool, queries, page_table, ratio, scale, most, chosen)


def bind_select_entries(ratio: int, top_k: int, scale: float) -> Callable[..., torch.Tensor]:
    """See :func:`..sparse_attention.select_entries`. The pool's pages are C-contiguous."""
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
