"""Compressor pooling and ring writes. Legend: K key rows, C closing rows, m tokens per window, R ring rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...attention.plan import AttentionPlan, LayerCache
from ...rope import RopeTable
from .jit import host, jit
from .norm_rope import inverse_rms, rotate_tail


@jit
def _store(ring, rows, keys):
    num_ring_rows = ring.shape[1]
    for i in range(rows.shape[0]):
        p = keys[0, i]
        if p >= keys[3, i] - num_ring_rows:
            ring[keys[1, i], p % num_ring_rows] = rows[i]


@jit
def _pool(raw, ring, first, keys, closing, page_table, ape, norm_weight, cos, sin, eps, ratio, overlap, entries):
    width = ape.shape[1]
    half = width // 2 if overlap else 0
    d = width - half
    num_rows = 2 * ratio if overlap else ratio
    c = np.empty((num_rows, d), np.float32)
    z = np.empty((num_rows, d), np.float32)
    pooled = np.empty(d, np.float32)
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
        for k in range(d):
            top = z[skipped, k]
            for j in range(skipped + 1, num_rows):
                top = max(top, z[j, k])
            total, value = np.float32(0), np.float32(0)
            for j in range(skipped, num_rows):
                weight = np.exp(z[j, k] - top)
                total += weight
                value += weight * c[j, k]
            pooled[k] = value / total
        norm = inverse_rms(pooled, eps)
        for k in range(d):
            pooled[k] = pooled[k] * norm * norm_weight[k]
        rotate_tail(pooled, cos[window * ratio], sin[window * ratio])
        per_page = entries.shape[1]
        entries[page_table[slot, window // per_page], window % per_page] = pooled


def bind_store_rows() -> Callable[..., None]:
    """See :func:`..compress.store_rows`."""

    def store_rows(
        window_rows: torch.Tensor, raw_rows: torch.Tensor | None, cache: LayerCache, plan: AttentionPlan
    ) -> None:
        _store(cache.host.window, host(window_rows), plan.host.keys)
        if raw_rows is not None:
            _store(cache.host.raw, host(raw_rows), plan.host.keys)

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
    """See :func:`..compress.pool_windows`."""
    weights = (ape.numpy(), norm_weight.numpy(), rope.cos.numpy(), rope.sin.numpy(), np.float32(eps), ratio, overlap)
    width = 2 * ape.shape[1]

    def pool_windows(raw: torch.Tensor, cache: LayerCache, plan: AttentionPlan) -> None:
        closing = plan.host.closing[ratio]
        if closing.shape[0]:
            first = raw.shape[1] - width if indexer else 0
            entries = cache.host.index_entries if indexer else cache.host.entries
            _pool(host(raw), cache.host.raw, first, plan.host.keys, closing, plan.host.page_table, *weights, entries)

    return pool_windows
