"""Compressor pooling and ring writes. Legend: K key rows, C closing rows, m tokens per window, R ring rows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from ...attention.plan import AttentionPlan, LayerCache
from ...rope import RopeTable
from .. import compress as plain
from ..packed_keys import is_packed
from .exp import exp_below
from .jit import address, floats, jit
from .norm_rope import inverse_rms, rotate_tail


@jit
def store_in_ring(rows_at, keys, ring):
    num_ring_rows, width = ring.shape[1:]
    rows = floats(rows_at, (keys.shape[1], width))
    for i in range(rows.shape[0]):
        p = keys[0, i]
        if p >= keys[3, i] - num_ring_rows:
            to = ring[keys[1, i], p % num_ring_rows]
            for j in range(width):
                to[j] = rows[i, j]


@jit
def _softmax_sum(z, c, first, scratch):
    """The sum of the rows of ``c`` from ``first`` on, weighted for each channel by the softmax of ``z``.

    All [rows, d]; ``scratch`` is [3, d], and its last row the result.
    """
    num_rows, d = z.shape
    top, total, value = scratch[0], scratch[1], scratch[2]
    for k in range(d):
        top[k], total[k], value[k] = z[first, k], 0, 0
    for j in range(first + 1, num_rows):
        for k in range(d):
            top[k] = max(top[k], z[j, k])
    for j in range(first, num_rows):
        for k in range(d):
            weight = exp_below(z[j, k] - top[k])
            total[k] += weight
            value[k] += weight * c[j, k]
    for k in range(d):
        value[k] /= total[k]


@jit
def _pool(raw_at, ring, first, keys, closing, page_table, ape, norm_weight, cos, sin, eps, ratio, overlap, entries):
    raw = floats(raw_at, (keys.shape[1], ring.shape[2]))
    width = ape.shape[1]
    half = width // 2 if overlap else 0
    d = width - half
    num_rows = 2 * ratio if overlap else ratio
    c = np.empty((num_rows, d), np.float32)
    z = np.empty((num_rows, d), np.float32)
    scratch = np.empty((3, d), np.float32)
    for at in closing:
        p, slot, start = keys[0, at], keys[1, at], keys[2, at]
        window = p // ratio
        skipped = ratio if overlap and window == 0 else 0
        for j in range(skipped, num_rows):
            q = p - (num_rows - 1) + j
            row = raw[at - (p - q)] if q >= start else ring[slot, q % ring.shape[1]]
            part = half if j >= num_rows - ratio else 0
            bias = ape[j % ratio]
            for k in range(d):
                c[j, k] = row[first + part + k]
                z[j, k] = row[first + width + part + k] + bias[part + k]
        _softmax_sum(z, c, skipped, scratch)
        pooled = entries[page_table[slot, window // entries.shape[1]], window % entries.shape[1]]
        norm = inverse_rms(scratch[2], eps)
        for k in range(d):
            pooled[k] = scratch[2, k] * norm * norm_weight[k]
        rotate_tail(pooled, cos[window * ratio], sin[window * ratio])


def bind_store_rows() -> Callable[..., None]:
    """See :func:`..compress.store_rows`; packed rows are left to it."""

    def store_rows(
        window_rows: torch.Tensor, raw_rows: torch.Tensor | None, cache: LayerCache, plan: AttentionPlan
    ) -> None:
        if is_packed(cache.window):
            plain.store_rows(window_rows, raw_rows, cache, plan)
            return
        window_rows = window_rows.contiguous()
        store_in_ring(address(window_rows), plan.host.keys, cache.host.window)
        if raw_rows is not None:
            raw_rows = raw_rows.contiguous()
            store_in_ring(address(raw_rows), plan.host.keys, cache.host.raw)

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
    """See :func:`..compress.pool_windows`, to which packed entries are left."""
    sizes = {"eps": eps, "ratio": ratio, "overlap": overlap, "indexer": indexer}
    pool_packed = functools.partial(plain.pool_windows, ape=ape, norm_weight=norm_weight, rope=rope, **sizes)
    weights = (ape.numpy(), norm_weight.numpy(), rope.cos.numpy(), rope.sin.numpy(), np.float32(eps), ratio, overlap)
    width = 2 * ape.shape[1]

    def pool_windows(raw: torch.Tensor, cache: LayerCache, plan: AttentionPlan) -> None:
        closing = plan.host.closing[ratio]
        if is_packed(cache.entries) and not indexer:
            pool_packed(raw, cache, plan)
        elif closing.shape[0]:
            first = raw.shape[1] - width if indexer else 0
            entries = cache.host.index_entries if indexer else cache.host.entries
            raw = raw.contiguous()
            _pool(address(raw), cache.host.raw, first, plan.host.keys, closing, plan.host.page_table, *weights, entries)

    return pool_windows
