"""The two forwards of a DSpark draft all of whose rows stay on this rank, each as one compiled call.

A draft is a few layers over a handful of rows: call by call, the calls take longer than the numbers. The steps are
those of the kernels for single operations, in the same order, and so is every bit.

Legend: R requests, w rows of a block, T = R w, n streams, D hidden width, V vocabulary, K rows of a context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import prange

from ...attention.plan import LayerCache
from .. import Bound
from .compress import store_in_ring
from .hyper_connection import collapse_streams, read_streams, write_streams
from .jit import address, jit
from .linear import grouped_linear_rows, linear_rows
from .moe import add_experts, route_rows, swiglu_rows
from .norm_rope import key_rows, norm_rows
from .product import BYTES
from .projection import project_rows
from .sparse_attention import attend_rows
from .threads import rows_to_share, share, shared, use_threads


class Stage(NamedTuple):
    """The weights of each operation of a stage, as its own kernel takes them: a tuple each."""

    attn_hc: tuple
    project: tuple
    attend: tuple
    out_a: tuple
    out_b: tuple
    ffn_hc: tuple
    gate: tuple
    route: tuple
    experts: tuple
    shared_in: tuple
    swiglu: tuple
    shared_out: tuple


class Rows(NamedTuple):
    """What a stage keeps of every row: ``streams`` [T, n, D] before and behind it; how its sublayer in turn reads and
    writes them, ``x`` [T, D], ``post`` [T, n] and ``comb`` [T, n, n]; and what attends, ``q`` [T, H, d] and ``keys``
    [T, d]."""

    streams: np.ndarray
    x: np.ndarray
    post: np.ndarray
    comb: np.ndarray
    q: np.ndarray
    keys: np.ndarray


@jit
def _at(x, row):
    """Where row ``row`` of the C-contiguous ``x`` begins."""
    return x.ctypes.data + BYTES * row * (x.size // max(x.shape[0], 1))


@jit
def _before_attention(a, b, attn_hc, project, queries, given):
    """Rows ``a`` to before ``b`` up to their queries and keys."""
    rows = Rows(*given)
    read_streams(_at(rows.streams, a), *attn_hc, rows.x[a:b], rows.post[a:b], rows.comb[a:b])
    flat, cubic = np.empty((b - a, 0), np.float32), np.empty((b - a, 0, 0), np.float32)
    project_rows(_at(rows.x, a), queries[0, a:b], *project, rows.q[a:b], rows.keys[a:b], flat, cubic, flat)


@jit
def _attention(a, b, stage, queries, page_table, ring, entries, rows, between):
    """The same rows through attention; ``between`` [b - a, n, D] are their streams behind it."""
    seen, every = np.empty(rows.q.shape, np.float32), np.empty((0, 0), np.int64)
    attend_rows(a, b, _at(rows.q, 0), _at(rows.keys, 0), rows.keys.shape[0], ring, entries, every, True, queries,
                page_table, True, *stage.attend, seen)  # fmt: skip
    (heads, num_latents), (out, width) = stage.out_a, stage.out_b
    latents, y = np.empty((b - a, heads.shape[0] * num_latents), np.float32), np.empty((b - a, width), np.float32)
    grouped_linear_rows(_at(seen, a), heads, num_latents, latents)
    linear_rows(_at(latents, 0), out, y)
    write_streams(_at(rows.streams, a), _at(y, 0), _at(rows.post, a), _at(rows.comb, a), between)


@jit
def _mixture(x, stage, y):
    """``y`` [t, D] of normed rows ``x`` [t, D]: routed and shared experts."""
    num_rows = x.shape[0]
    (gate, num_experts), (route, top_k), (gate_up, num_inner) = stage.gate, stage.route, stage.shared_in
    logits, chosen = np.empty((num_rows, num_experts), np.float32), np.empty((num_rows, top_k), np.int64)
    weights, routed = np.empty((num_rows, top_k), np.float32), np.zeros(y.shape, np.float32)
    linear_rows(_at(x, 0), gate, logits)
    route_rows(_at(logits, 0), *route, chosen, weights)
    add_experts(_at(x, 0), chosen, _at(weights, 0), *stage.experts, routed)
    both, inner = np.empty((num_rows, num_inner), np.float32), np.empty((num_rows, num_inner // 2), np.float32)
    linear_rows(_at(x, 0), gate_up, both)
    swiglu_rows(_at(both, 0), *stage.swiglu, inner)
    linear_rows(_at(inner, 0), stage.shared_out[0], y)
    for i in range(num_rows):
        for j in range(y.shape[1]):
            y[i, j] += routed[i, j]


@jit
def _from_attention(a, b, weights, queries, page_table, ring, entries, given):
    """The same rows from attention on, to their streams behind the stage."""
    stage, rows = Stage(*weights), Rows(*given)
    between, y = np.empty((b - a, *rows.streams.shape[1:]), np.float32), np.empty((b - a, rows.x.shape[1]), np.float32)
    _attention(a, b, stage, queries, page_table, ring, entries, rows, between)
    read_streams(_at(between, 0), *stage.ffn_hc, rows.x[a:b], rows.post[a:b], rows.comb[a:b])
    _mixture(rows.x[a:b], stage, y)
    write_streams(_at(between, 0), _at(y, 0), _at(rows.post, a), _at(rows.comb, a), rows.streams[a:b])


@jit
def _rows_of(places, width, mask_id):
    """Token ids [T] and the rows int64 [5, T] of blocks, see :class:`...attention.plan.Rows`."""
    num_requests = places.shape[1]
    ids, rows = np.empty(num_requests * width, np.int64), np.empty((5, num_requests * width), np.int64)
    for r in range(num_requests):
        start = places[0, r]
        for k in range(width):
            i = r * width + k
            ids[i] = places[2, r] if k == 0 else mask_id
            rows[0, i], rows[1, i], rows[2, i] = start + k, places[1, r], start
            rows[3, i], rows[4, i] = start + width, i
    return ids, rows


@jit
def _begin(ids, embed, num_streams, num_heads, head_dim):
    """The rows of a block before its first stage."""
    num_rows, width = ids.shape[0], embed.shape[1]
    streams = np.empty((num_rows, num_streams, width), np.float32)
    for i in range(num_rows):
        for k in range(num_streams):
            streams[i, k] = embed[ids[i]]
    post = np.empty((num_rows, num_streams), np.float32)
    comb = np.empty((num_rows, num_streams, num_streams), np.float32)
    q, keys = np.empty((num_rows, num_heads, head_dim), np.float32), np.empty((num_rows, head_dim), np.float32)
    return Rows(streams, np.empty((num_rows, width), np.float32), post, comb, q, keys)


@jit
def _finish(a, b, streams, collapse, norm, head, hidden, logits):
    """The same rows behind the last stage: their one stream ``hidden`` [T, D], and ``logits`` [T, V]."""
    collapse_streams(_at(streams, a), *collapse, hidden[a:b])
    normed = np.empty((b - a, hidden.shape[1]), np.float32)
    norm_rows(_at(hidden, a), *norm, normed)
    linear_rows(_at(normed, 0), head, logits[a:b])


@jit
def _block(stages, caches, places, width, mask_id, page_table, embed, sizes, collapse, norm, head, hidden, logits):
    ids, queries = _rows_of(places, width, mask_id)
    rows, num_rows = _begin(ids, embed, *sizes), ids.shape[0]
    for s in range(len(stages)):
        ring, entries = caches[s]
        _before_attention(0, num_rows, stages[s].attn_hc, stages[s].project, queries, rows)
        _from_attention(0, num_rows, stages[s], queries, page_table, ring, entries, rows)
        store_in_ring(_at(rows.keys, 0), queries, ring)
    _finish(0, num_rows, rows.streams, collapse, norm, head, hidden, logits)


@shared
def _block_shared(
    num_parts, stages, caches, places, width, mask_id, page_table, embed, sizes, collapse, norm, head, hidden, logits
):
    """As :func:`_block`. Threads take in nothing nested and nothing named, so that is put together inside the loop."""
    ids, queries = _rows_of(places, width, mask_id)
    num_rows = ids.shape[0]
    streams, x, post, comb, q, keys = _begin(ids, embed, *sizes)
    for s in range(len(stages)):
        attn_hc, project, attend, out_a, out_b, ffn_hc, gate, (route, top_k), experts, into, swiglu, out = stages[s]
        ring, entries = caches[s]
        for part in prange(num_parts):
            a, b = share(num_rows, part, num_parts)
            rows = (streams, x, post, comb, q, keys)
            _before_attention(a, b, attn_hc, project, queries, rows)
        for part in prange(num_parts):
            a, b = share(num_rows, part, num_parts)
            rows, routing = (streams, x, post, comb, q, keys), (route, top_k)
            stage = (attn_hc, project, attend, out_a, out_b, ffn_hc, gate, routing, experts, into, swiglu, out)
            _from_attention(a, b, stage, queries, page_table, ring, entries, rows)
        store_in_ring(_at(keys, 0), queries, ring)
    for part in prange(num_parts):
        a, b = share(num_rows, part, num_parts)
        _finish(a, b, streams, collapse, norm, head, hidden, logits)


@jit
def _context(taps_at, project, norm, stages, rings, rows):
    (panels, width), num_rows = project, rows.shape[1]
    context, normed = np.empty((num_rows, width), np.float32), np.empty((num_rows, width), np.float32)
    linear_rows(taps_at, panels, context)
    norm_rows(_at(context, 0), *norm, normed)
    for s in range(len(stages)):
        (panels, head_dim), key = stages[s]
        raw, keys = np.empty((num_rows, head_dim), np.float32), np.empty((num_rows, head_dim), np.float32)
        linear_rows(_at(normed, 0), panels, raw)
        key_rows(_at(raw, 0), rows[0], *key, keys)
        store_in_ring(_at(keys, 0), rows, rings[s])


def _taken(operations: Mapping[str, Bound]) -> Stage:
    return Stage(**{name: operations[name].weights for name in Stage._fields})


def bind_draft_block(
    stages: Sequence[Mapping[str, Bound]],
    caches: Sequence[LayerCache],
    page_table: torch.Tensor,
    embed: torch.Tensor,
    num_streams: int,
    collapse: Bound,
    norm: Bound,
    head: Bound,
    vocab_size: int,
    width: int,
    mask_id: int,
) -> Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """``places`` int64 [3, R] -> states before the final ``norm`` [R, w, D] and logits [R, w, V], both in numpy.

    ``places``: position of the anchor, cache slot and anchor of each request, whose other ``width`` - 1 rows are
    ``mask_id``. ``stages``: the bound operations of each, by the names in :class:`Stage`: a sliding layer with a scored
    router and all experts; their keys are stored in ``caches``. ``embed`` [>= V, D], ``head`` gives V logits or more.
    """
    weights, table, (panels, num_logits) = tuple(map(_taken, stages)), embed.numpy(), head.weights
    num_heads, head_dim, window = len(weights[0].attend[0]), len(weights[0].project[5]), weights[0].attend[1]
    buffers = tuple([(cache.host.window, cache.host.entries) for cache in caches])
    rest = (
        width,
        mask_id,
        page_table.numpy(),
        table,
        (num_streams, num_heads, head_dim),
        collapse.weights,
        norm.weights,
        panels,
    )
    threads = use_threads()
    many = rows_to_share(4 * window * num_heads * head_dim, threads)  # what attention alone takes

    def draft_block(places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        num_rows = places.shape[1] * width
        hidden, logits = np.empty((num_rows, table.shape[1]), np.float32), np.empty((num_rows, num_logits), np.float32)
        if num_rows < many:
            _block(weights, buffers, places, *rest, hidden, logits)
        else:
            _block_shared(threads, weights, buffers, places, *rest, hidden, logits)
        return hidden.reshape(-1, width, table.shape[1]), logits.reshape(-1, width, num_logits)[:, :, :vocab_size]

    return draft_block


def bind_draft_context(
    project: Bound, norm: Bound, stages: Sequence[tuple[Bound, Bound]], caches: Sequence[LayerCache]
) -> Callable[[torch.Tensor, np.ndarray], None]:
    """``(taps [K, ...], rows int64 [5, K])``: the taps go through ``project`` and ``norm``, and then in each stage
    through a product and the key norm with rotation, and are stored."""
    weights = (project.weights, norm.weights, tuple([(linear.weights, key.weights) for linear, key in stages]))
    rings = tuple([cache.host.window for cache in caches])

    def draft_context(taps: torch.Tensor, rows: np.ndarray) -> None:
        taps = taps.contiguous()
        _context(address(taps), *weights, rings, rows)

    return draft_context
