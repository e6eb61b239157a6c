"""Grouped-query attention of a block of drafted positions over keys that are injected from outside.

Legend: K context rows, T block rows, D hidden width, H and H_k query and key heads on this rank, d head width.

Context rows give keys and values only, straight from what is injected; they are stored in pages by position. Block rows
give queries, keys and values and see the whole context and the whole block; theirs are not stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...comm.collectives import Pending
from ...parallel.groups import Group
from ..kernels import Kernels
from ..linear import MergedLinear
from ..params import Scope
from ..probe import Probe
from ..rope import RopeTable, rotate_halves
from ..stages import Point, Stages
from .dense import CacheShape, attend, read_tokens, store_tokens, visible
from .gqa import GQASizes, GQAttention
from .plan import AttentionPlan, LayerCache


class InjectedSizes(GQASizes):
    """As :class:`.gqa.GQASizes`. A window bounds what is seen; every position is kept."""

    kind = "injected"

    def cache(self, num_ranks: int) -> CacheShape:
        """What a rank of ``num_ranks`` keeps."""
        return CacheShape(entry_width=2 * max(self.num_kv_heads // num_ranks, 1) * self.head_dim)


class InjectedAttention(GQAttention):
    """One attention layer, cut by heads over ``group``."""

    def __init__(
        self, source: Scope, sizes: InjectedSizes, rope: RopeTable, group: Group, kernels: Kernels, layer: int
    ) -> None:
        super().__init__(source, sizes, rope, group, kernels, layer)
        self._kv = MergedLinear(source, self._qkv.parts[1:], kernels)

    def inject(self, context: torch.Tensor, cache: LayerCache, plan: AttentionPlan) -> None:
        """Keep the keys and values of ``context`` [K, D], the plan's key rows."""
        k, v = self._kv(context).chunk(2, dim=-1)
        k = k.unflatten(-1, (-1, self.sizes.head_dim))
        if self._norms is not None:
            k = self._norms[1](k.flatten(0, 1)).view(k.shape)
        at = plan.keys.positions
        k = rotate_halves(k, self._rope.cos[at].unsqueeze(1), self._rope.sin[at].unsqueeze(1))
        store_tokens(torch.cat((k.flatten(1), v), dim=1), cache.entries, plan)

    def stages(
        self,
        x: torch.Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        start_sum: Callable[[torch.Tensor], Pending],
        probe: Probe,
    ) -> Stages[torch.Tensor]:
        """See :meth:`..Attention.stages`; ``x`` [T, D] are normed block rows."""
        q, rows = self.project(x, plan.queries.positions)
        yield Point.PREPARED
        o, window = torch.empty_like(q), self.sizes.window
        for run in plan.runs:
            kv = torch.cat((read_tokens(cache.entries, run, run.first, plan), rows[run.keys]))
            k, v = kv.unflatten(1, (2, -1, self.sizes.head_dim)).unbind(1)
            seen = visible(run, plan, 0, window)
            o[run.queries] = attend(q[run.queries], k, v, seen, self.sizes.head_dim**-0.5)
        pending = start_sum(self._out.partial(o.flatten(1)))
        yield Point.SUMMING
        out = pending.wait()
        probe("attention_out", self._layer, out)
        return out
