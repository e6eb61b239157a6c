"""Index scores, selection and sparse attention in plain torch, in blocks of queries so that memory stays bounded.

Legend: T query rows, K key rows, H heads, d head width, w window, m tokens per entry, k selected entries.
"""

from __future__ import annotations

import torch

from ..attention.plan import AttentionPlan, LayerCache, Rows, entry_rows
from ..rope import RopeTable, rotate
from .packed_keys import is_packed, unpack_keys

BLOCK_ELEMENTS = 1 << 22  # gathered key elements at a time


def _blocks(num_rows: int, elements_per_row: int) -> list[slice]:
    size = max(1, BLOCK_ELEMENTS // max(elements_per_row, 1))
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _sliced(rows: Rows, part: slice) -> Rows:
    return Rows(*(field[part] for field in rows))


def select_entries(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: LayerCache,
    plan: AttentionPlan,
    ratio: int,
    top_k: int,
    scale: float,
) -> torch.Tensor:
    """The ``top_k`` visible entries of each query by index score; int64 [T, k], -1 where there are fewer.

    ``q`` [T, H, d] rotated index queries, ``weights`` [T, H]. The score of entry t is
    ``sum_h weights_h relu(q_h . entry_t) scale``; entries with t >= (p + 1) // m are not visible. Of equal scores the
    earlier entry wins. k is ``top_k``, or fewer when no query of the step sees that many.
    """
    num_entries = (plan.max_position + 1) // ratio
    num_selected = min(top_k, num_entries)
    chosen = torch.full((q.shape[0], num_selected), -1, dtype=torch.int64, device=q.device)
    if num_selected == 0:
        return chosen
    per_page, width = cache.index_entries.shape[1:]
    pool = cache.index_entries.view(-1, width)
    entries = torch.arange(num_entries, device=q.device)
    for part in _blocks(q.shape[0], num_entries * (q.shape[1] + q.shape[2])):
        rows = _sliced(plan.queries, part)
        keys = pool[entry_rows(plan.page_table, rows.slots.unsqueeze(1), entries.unsqueeze(0), per_page)].float()
        scores = torch.einsum("thd,ted->the", q[part].float(), keys).relu_()
        scores = torch.einsum("th,the->te", weights[part].float(), scores) * scale
        hidden = entries.unsqueeze(0) >= ((rows.positions + 1) // ratio).unsqueeze(1)
        order = scores.masked_fill(hidden, float("-inf")).sort(dim=-1, descending=True, stable=True)
        top = order.indices[:, :num_selected]
        chosen[part] = top.masked_fill(hidden.gather(1, top), -1)
    return chosen


def _window_keys(
    keys: torch.Tensor, ring: torch.Tensor, rows: Rows, window: int, bidirectional: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [T, w, d] at the positions that each row sees, and which of them exist [T, w]."""
    if bidirectional:
        first, last = rows.starts - window, rows.ends - 1
    else:
        first, last = rows.positions - (window - 1), rows.positions
    widest = int((last - first).max()) + 1
    positions = first.unsqueeze(1) + torch.arange(widest, device=keys.device)
    in_step = positions >= rows.starts.unsqueeze(1)
    here = rows.rows.unsqueeze(1) - (rows.positions.unsqueeze(1) - positions)
    step_rows = torch.where(in_step & (positions <= last.unsqueeze(1)), here, 0)
    from_ring = ring[rows.slots.unsqueeze(1), positions.clamp(min=0) % ring.shape[1]]
    exists = (positions >= 0) & (positions <= last.unsqueeze(1))
    return torch.where(in_step.unsqueeze(-1), keys[step_rows], from_ring), exists


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    cache: LayerCache,
    selected: torch.Tensor | None,
    plan: AttentionPlan,
    sinks: torch.Tensor,
    window: int,
    ratio: int,
    rope: RopeTable,
    scale: float,
) -> torch.Tensor:
    """Attention of ``q`` [T, H, d] over sliding keys and compressed entries, [T, H, d].

    One key head, which is also the value: ``keys`` [K, d] are the step's own, the cache holds earlier ones; they are
    packed (see :mod:`.packed_keys`) if the cache's are, so that a key is the same in the step and behind it. A query at
    position p sees p - window + 1 .. p (or its whole block, see ``AttentionPlan.bidirectional``), and with ``ratio``
    above 0 the entries in ``selected`` [T, k] (-1 is none), or all entries t < (p + 1) // ratio if ``selected`` is
    None. Each head's ``sinks`` [H] is one more logit without a value. The keys' rotation is undone on the output at the
    query's position.
    """
    out = torch.empty_like(q)
    num_entries = 0 if ratio == 0 else (plan.max_position + 1) // ratio if selected is None else selected.shape[1]
    for part in _blocks(q.shape[0], (window + num_entries) * (q.shape[2] + q.shape[1])):
        rows = _sliced(plan.queries, part)
        seen, visible = _window_keys(keys, cache.window, rows, window, plan.bidirectional)
        if num_entries:
            if selected is None:
                wanted = torch.arange(num_entries, device=q.device).unsqueeze(0)
                exists = wanted < ((rows.positions + 1) // ratio).unsqueeze(1)
                wanted = torch.where(exists, wanted, 0)
            else:
                exists = selected[part] >= 0
                wanted = selected[part].clamp(min=0)
            flat = entry_rows(plan.page_table, rows.slots.unsqueeze(1), wanted, cache.entries.shape[1])
            seen = torch.cat((seen, cache.entries.view(-1, cache.entries.shape[2])[flat]), dim=1)
            visible = torch.cat((visible, exists), dim=1)
        wide = unpack_keys(seen, q.shape[2], 2 * rope.cos.shape[1]) if is_packed(seen) else seen.float()
        wide = wide.masked_fill(~visible.unsqueeze(-1), 0.0)
        logits = torch.einsum("thd,tkd->thk", q[part].float(), wide) * scale
        logits = logits.masked_fill(~visible.unsqueeze(1), float("-inf"))
        sink = sinks.view(1, -1, 1).expand(logits.shape[0], -1, 1)
        probs = torch.cat((logits, sink), dim=-1).softmax(dim=-1)[..., :-1]
        mixed = torch.einsum("thk,tkd->thd", probs, wide)
        cos, sin = rope.cos[rows.positions].unsqueeze(1), rope.sin[rows.positions].unsqueeze(1)
        out[part] = rotate(mixed, cos, sin, inverse=True).to(q.dtype)
    return out
