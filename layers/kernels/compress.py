"""Compressor pooling and ring writes in plain torch.

Legend: K key rows of the step, C closing rows, m tokens per window, d entry width, S slots, R ring rows. A row of
compressor input is ``[c | z]`` (values, then gates), each d wide for HCA and 2 d wide (both halves) for CSA.
"""

from __future__ import annotations

import torch

from ..attention.plan import AttentionPlan, LayerCache, Rows, entry_rows
from ..rope import RopeTable, rotate
from .hyper_connection import weighted_norm
from .packed_keys import is_packed, pack_keys


def store_rows(
    window_rows: torch.Tensor, raw_rows: torch.Tensor | None, cache: LayerCache, plan: AttentionPlan
) -> None:
    """Write the step's keys [K, d] (packed, if the ring's are) and compressor inputs [K, width] (None: the layer has
    none) to the layer's rings.

    Each row goes to (slot, position % R).

    Of a request with more than R rows in the step only the last R are written. Must run after the readers of the
    step, because a long chunk overwrites rows that its own first queries still need.
    """
    keys = plan.keys
    pairs = [(cache.window, window_rows)] if raw_rows is None else [(cache.window, window_rows), (cache.raw, raw_rows)]
    for ring, rows in pairs:
        num_ring_rows = ring.shape[1]
        kept = (keys.positions >= keys.ends - num_ring_rows).nonzero().squeeze(1)
        ring[keys.slots[kept], keys.positions[kept] % num_ring_rows] = rows[kept]


def gather_rows(ring: torch.Tensor, rows: torch.Tensor, keys: Rows, at: torch.Tensor, positions: torch.Tensor):
    """Rows at ``positions`` [C, w] of the requests of key rows ``at`` [C]: from the step where it has them, else from
    the ring. Positions below zero give arbitrary rows."""
    slots, starts, here = keys.slots[at].unsqueeze(1), keys.starts[at].unsqueeze(1), keys.positions[at].unsqueeze(1)
    in_step = positions >= starts
    step_rows = torch.where(in_step, at.unsqueeze(1) - (here - positions), 0)
    from_ring = ring[slots, positions.clamp(min=0) % ring.shape[1]]
    return torch.where(in_step.unsqueeze(-1), rows[step_rows], from_ring)


def pool_windows(
    raw: torch.Tensor,
    cache: LayerCache,
    plan: AttentionPlan,
    ape: torch.Tensor,
    norm_weight: torch.Tensor,
    rope: RopeTable,
    eps: float,
    ratio: int,
    overlap: bool,
    indexer: bool,
) -> None:
    """Compute the entries of the windows that close in this step and write them to the cache's entry pool.

    ``raw`` [K, >= offset + 2 w] holds the step's compressor inputs: the main compressor's in the first columns, with
    ``indexer`` the second compressor's in the last. ``ape`` [m, w] is added to the gates by position in the window.
    Without ``overlap`` (HCA) w = d and entry t pools positions t m .. t m + m - 1. With it (CSA) w = 2 d and entry t
    pools the first half of window t - 1 together with the second half of window t; the first window has no predecessor.
    A closing row of -1 is padding. Softmax over the tokens of each channel in float32, RMSNorm, rotation at position
    t m. The entry is packed if the pool's are, see :mod:`.packed_keys`.
    """
    at = plan.closing[ratio]
    at = at[at >= 0]
    if at.numel() == 0:
        return
    keys, width = plan.keys, 2 * ape.shape[1]
    columns = slice(raw.shape[1] - width, raw.shape[1]) if indexer else slice(0, width)
    entries = cache.index_entries if indexer else cache.entries
    closed = keys.positions[at] // ratio
    num_rows = 2 * ratio if overlap else ratio
    offsets = torch.arange(num_rows, device=at.device) - (num_rows - 1)
    positions = keys.positions[at].unsqueeze(1) + offsets
    c, z = gather_rows(cache.raw[..., columns], raw[:, columns], keys, at, positions).float().chunk(2, dim=-1)
    z = z + ape.repeat(num_rows // ratio, 1)
    if overlap:
        half = c.shape[-1] // 2
        c = torch.cat((c[:, :ratio, :half], c[:, ratio:, half:]), dim=1)
        z = torch.cat((z[:, :ratio, :half], z[:, ratio:, half:]), dim=1)
    z = z.masked_fill((positions < 0).unsqueeze(-1), float("-inf"))
    pooled = (z.softmax(dim=1) * c.masked_fill((positions < 0).unsqueeze(-1), 0.0)).sum(dim=1)
    pooled = weighted_norm(pooled, norm_weight, eps)
    pooled = rotate(pooled, rope.cos[closed * ratio], rope.sin[closed * ratio])
    pooled = pack_keys(pooled, 2 * rope.cos.shape[1]) if is_packed(entries) else pooled.to(entries.dtype)
    to = entry_rows(plan.page_table, keys.slots[at], closed, entries.shape[1])
    entries.view(-1, entries.shape[-1])[to] = pooled
