"""What the dense attention kinds share: keys in pages or in a ring, and softmax attention over them, run by run.

Legend: t query rows of a run, L keys it may see, H query heads, H_k key heads, d key width, e value width, c columns of
a cached row.

A token's row lies in the entry pool at its position (ratio 1), or in the sliding ring. The step's rows are stored in
the pool before anything is read, since a position is overwritten only by itself; a ring is read first, see
:func:`.plan.LayerCache`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ...comm.ring import Shards
from .plan import AttentionPlan, LayerCache, Run
from .ring import Blocks, ring_attention

FOLD_ROWS = 32
"""Up to so many query rows the heads that share a key head become rows of it, so that its keys are read once."""


class CacheShape(NamedTuple):
    """A :class:`.plan.CacheRows` of a kind that keeps a row a token: in pages, or in a ring for ``window`` > 0."""

    entry_width: int = 0
    index_width: int = 0
    window: int = 0
    ring_width: int = 0
    raw_span: int = 0
    raw_width: int = 0
    ratio: int = 1
    index_ratio: int = 1
    packed_row: int = 0


def store_tokens(rows: torch.Tensor, pool: torch.Tensor, plan: AttentionPlan) -> None:
    """Write the step's key rows [K, c] to the entry ``pool`` [pages, tokens of a page, c]."""
    pool.flatten(0, 1)[plan.token_rows] = rows


def read_tokens(pool: torch.Tensor, run: Run, limit: int, plan: AttentionPlan) -> torch.Tensor:
    """The stored rows [limit, c] of the request of ``run`` at positions 0 .. limit - 1; a view, where its pages are
    known on the host to follow one another."""
    per_page = pool.shape[1]
    num_pages = -(-limit // per_page)
    if plan.host is not None and num_pages:
        held = plan.host.page_table[run.slot, :num_pages]
        if bool((held == held[0] + np.arange(num_pages)).all()):
            return pool[int(held[0]) : int(held[0]) + num_pages].flatten(0, 1)[:limit]
    pages = plan.page_table[run.slot, :num_pages].long()
    return pool[pages].flatten(0, 1)[:limit]


def read_ring(rows: torch.Tensor, cache: LayerCache, run: Run, window: int) -> tuple[torch.Tensor, int]:
    """The rows [L, c] of the request of ``run`` that its queries may see, and the position of the first: those before
    the step from the ring, then those of the step, ``rows`` [K, c]."""
    begin = max(run.first - window + 1, 0)
    if begin == run.first:
        return rows[run.keys], begin
    at = torch.arange(begin, run.first, device=rows.device) % cache.window.shape[1]
    return torch.cat((cache.window[run.slot, at], rows[run.keys])), begin


def attend_around(
    q: torch.Tensor,
    shards: Callable[[torch.Tensor], Shards],
    rows: torch.Tensor,
    pool: torch.Tensor,
    plan: AttentionPlan,
    blocks: Blocks,
    value_dim: int = 0,
) -> torch.Tensor:
    """Attention of ``q`` [T, H, d] over the keys of all ranks, which pass by and are stored in ``pool``; [T, H, e].
    Collective over ``plan.ring.group``.

    ``shards`` gives the keys (and values) of stored rows [L, c]; ``rows`` [T, c] are those of this rank's tokens. For
    ``value_dim`` and ``blocks`` see :func:`.ring.ring_attention`.
    """
    ring = plan.ring

    def keep(rank: int, passing: Shards) -> None:
        pool.flatten(0, 1)[ring.token_rows[rank]] = torch.cat([x.flatten(1) for x in passing], dim=1)

    past = [() if run is None else shards(read_tokens(pool, run, run.limit, plan)) for run in ring.past]
    own = shards(rows)
    values = own[1] if len(own) > 1 else None
    options = {"value_dim": value_dim, "past": past, "keep": keep}
    return ring_attention(q, own[0], values, ring.plan, ring.group, blocks, **options)


def visible(run: Run, plan: AttentionPlan, begin: int, window: int = 0) -> torch.Tensor | None:
    """Which of the keys at ``begin`` .. ``run.limit`` - 1 the run's rows see, bool [t, L]; None for all.

    A row sees no position behind its own, or every one if the plan is bidirectional, and with ``window`` > 0 only the
    latest ``window`` positions; a node of a tree sees what was there before it and its own branch.
    """
    if run.branches is not None:
        before = run.branches.new_ones(run.branches.shape[0], run.first - begin)
        return torch.cat((before, run.branches), dim=1)
    num_rows, last = run.queries.stop - run.queries.start, run.limit - 1
    if (plan.bidirectional or num_rows == 1) and (not window or last - begin < window):
        return None
    here = plan.queries.positions[run.queries].unsqueeze(1)
    keys = torch.arange(begin, run.limit, device=here.device)
    if plan.bidirectional:
        return keys > here - window
    seen = keys <= here
    return seen & (keys > here - window) if window else seen


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    is_causal: bool = False,
) -> torch.Tensor:
    """Softmax attention of ``q`` [t, H, d] over ``k`` [L, H_k, d] and ``v`` [L, H_k, e]; [t, H, e].

    ``seen`` bool [t, L], see :func:`visible`. ``is_causal``: t = L and row i sees keys 0 .. i, whatever ``seen`` is.
    """
    num_rows, num_heads, _ = q.shape
    num_keys, num_kv_heads, _ = k.shape
    k, v = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
    if is_causal or num_rows > FOLD_ROWS or num_heads == num_kv_heads:
        o = scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            k,
            v,
            None if is_causal else seen,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=num_heads != num_kv_heads,
        )
        return o.squeeze(0).transpose(0, 1)
    shared = num_heads // num_kv_heads
    folded = q.unflatten(1, (num_kv_heads, shared)).permute(1, 2, 0, 3).flatten(1, 2)
    if seen is not None:
        seen = seen.expand(shared, num_rows, num_keys).flatten(0, 1)
    o = scaled_dot_product_attention(folded.unsqueeze(0), k, v, seen, scale=scale).squeeze(0)
    return o.unflatten(1, (shared, num_rows)).permute(2, 0, 1, 3).flatten(1, 2)
