"""Pages of a draft that keeps something for every token: as many for each request slot as a context may need."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...comm.dispatch import Exchange, StepRows
from ...layers.attention.plan import AttentionPlan, CacheRows, entry_rows
from ...parallel.groups import Groups
from ..cache import Cache, CacheLayout
from ..models.base import STANDARD
from ..models.staged import dispatcher_for


def own_pages(
    shapes: Sequence[CacheRows], num_slots: int, max_context: int, device: torch.device, dtype: torch.dtype
) -> Cache:
    """A cache in which every slot has its pages for good; slots are the target's."""
    layout = CacheLayout(tuple(shapes), 1, dtype.itemsize)
    pages = layout.pages_for(max_context)
    cache = Cache(layout, num_slots, num_slots * pages, max_context, device, dtype)
    for slot in range(num_slots):
        assert cache.acquire() == slot and cache.reserve(slot, max_context)
    return cache


def lone_exchange(groups: Groups, num_rows: int, dtype: torch.dtype, device: torch.device) -> Exchange:
    """For ``num_rows`` rows of layers without experts: sums over attn_tp, and nothing between attention ranks."""
    dispatcher = dispatcher_for(None, STANDARD, groups, dtype, device)
    return Exchange(groups, dispatcher, StepRows((num_rows,) * groups.attn_rows.size, has_prefill=False))


def own_plan(plan: AttentionPlan, cache: Cache) -> AttentionPlan:
    """The key rows of a target's ``plan`` in the draft's own ``cache``."""
    keys = plan.keys
    at = entry_rows(cache.page_table, keys.slots, keys.positions, cache.layout.page_tokens)
    host = plan.host and plan.host._replace(page_table=cache.page_table.numpy())
    return plan.of_keys()._replace(page_table=cache.page_table, token_rows=at, host=host)
