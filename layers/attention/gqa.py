"""Attention with keys and values per head: MHA, GQA and MQA, over all positions or a sliding window.

Legend: T query rows, K key rows of the step, D hidden width, H and H_k query and key heads on this rank, d head width.

Query heads are cut over the group; key heads too, as long as there are enough, else neighbouring ranks hold the same
one. A cached row is the rotated keys of this rank's heads and then their values, so with one key head (MQA) it is 2 d
numbers on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...comm.collectives import Pending
from ...parallel.groups import Group
from ..kernels import Kernels
from ..linear import QKVParallelLinear, RowParallelLinear
from ..params import Scope
from ..probe import Probe
from ..rope import RopeTable, rotate_halves
from ..stages import Point, Stages
from .dense import CacheShape, attend, attend_around, read_ring, read_tokens, store_tokens, visible
from .plan import AttentionPlan, LayerCache
from .ring import Blocks


class GQASizes(NamedTuple):
    """Sizes of one layer. ``window`` positions are seen, 0 for all. ``qk_norm``: queries and keys are normalised per
    head before they are rotated."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    window: int = 0
    qk_norm: bool = False

    kind = "gqa"

    @property
    def label(self) -> str:
        """What the kind is called by its number of key heads."""
        name = {1: "mqa", self.num_heads: "mha"}.get(self.num_kv_heads, "gqa")
        return f"sliding {name}" if self.window else name

    def cache(self, num_ranks: int) -> CacheShape:
        """What a rank of ``num_ranks`` keeps."""
        heads = max(self.num_kv_heads // num_ranks, 1)
        width = 2 * heads * self.head_dim
        return CacheShape(window=self.window, ring_width=width) if self.window else CacheShape(entry_width=width)

    @property
    def rope_dim(self) -> int:
        """Rotated channels."""
        return self.head_dim

    def keys_read(self, context: int) -> int:
        """Keys that a token behind ``context`` positions attends to."""
        return min(context, self.window) if self.window else context

    def operations(self, context: int) -> int:
        """Multiplications and additions of scores and weighted sums, of one token behind ``context`` positions."""
        return 4 * self.num_heads * self.head_dim * self.keys_read(context)

    def problems(self, num_ranks: int) -> list[str]:
        """What keeps the heads from being cut over ``num_ranks`` ranks."""
        found = []
        if self.num_heads % num_ranks:
            found.append(f"num_attention_heads = {self.num_heads} is not divisible by attn_tp = {num_ranks}")
        if max(num_ranks, self.num_kv_heads) % min(num_ranks, self.num_kv_heads):
            found.append(f"num_key_value_heads = {self.num_kv_heads} and attn_tp = {num_ranks} do not divide")
        return found


class Projected(NamedTuple):
    """Queries ``q`` [T, H, d], rotated, and ``rows`` for the cache [T, 2 H_k d]."""

    q: torch.Tensor
    rows: torch.Tensor


class GQAttention:
    """One attention layer, cut by heads over ``group``."""

    def __init__(
        self, source: Scope, sizes: GQASizes, rope: RopeTable, group: Group, kernels: Kernels, layer: int
    ) -> None:
        self.sizes, self._rope, self._layer = sizes, rope, layer
        names = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
        self._qkv = QKVParallelLinear(
            source, names, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, group, kernels
        )
        self._norms = None
        if sizes.qk_norm:
            weights = (source.take(f"{name}.weight", dtype=torch.float32) for name in ("q_norm", "k_norm"))
            self._norms = tuple(kernels.bind("rms_norm", weight=weight, eps=sizes.norm_eps) for weight in weights)
        self._store_ring = kernels.bind("store_rows")
        self._blocks = Blocks.bind(kernels, sizes.head_dim**-0.5)
        self._out = RowParallelLinear(source, "o_proj.weight", sizes.num_heads * sizes.head_dim, group, kernels)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projected:
        """From normed rows ``x`` [T, D] at ``positions`` [T]."""
        q, k, v = self._qkv.split(self._qkv(x))
        q, k = (part.unflatten(-1, (-1, self.sizes.head_dim)) for part in (q, k))
        if self._norms is not None:
            q, k = (norm(part.flatten(0, 1)).view(part.shape) for norm, part in zip(self._norms, (q, k)))
        cos, sin = self._rope.cos[positions].unsqueeze(1), self._rope.sin[positions].unsqueeze(1)
        return Projected(rotate_halves(q, cos, sin), torch.cat((rotate_halves(k, cos, sin).flatten(1), v), dim=1))

    def store(self, rows: torch.Tensor, cache: LayerCache, plan: AttentionPlan) -> None:
        """Keep the step's key rows [K, 2 H_k d]. Of a ring, after everything has been read."""
        if self.sizes.window:
            self._store_ring(rows, None, cache, plan)
        else:
            store_tokens(rows, cache.entries, plan)

    def stages(
        self,
        x: torch.Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        start_sum: Callable[[torch.Tensor], Pending],
        probe: Probe,
    ) -> Stages[torch.Tensor]:
        """See :meth:`..Attention.stages`."""
        q, rows = self.project(x, plan.queries.positions)
        yield Point.PREPARED
        if plan.ring is None:
            o = self._over_cache(q, plan.gather(rows), cache, plan)
        else:
            o = attend_around(q, self._keys_and_values, rows, cache.entries, plan, self._blocks)
        pending = start_sum(self._out.partial(o.flatten(1)))
        yield Point.SUMMING
        out = pending.wait()
        probe("attention_out", self._layer, out)
        return out

    def _keys_and_values(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [L, H_k, d] of stored rows [L, 2 H_k d]."""
        return rows.unflatten(1, (2, -1, self.sizes.head_dim)).unbind(1)

    def _over_cache(self, q: torch.Tensor, rows: torch.Tensor, cache: LayerCache, plan: AttentionPlan) -> torch.Tensor:
        """Attention [T, H, d] of ``q`` run by run; the step's key rows [K, 2 H_k d] are stored."""
        window = self.sizes.window
        if not window:
            self.store(rows, cache, plan)
        o = torch.empty_like(q)
        for run in plan.runs:
            if window:
                kv, begin = read_ring(rows, cache, run, window)
            else:
                kv, begin = read_tokens(cache.entries, run, run.limit, plan), 0
            k, v = self._keys_and_values(kv)
            is_causal = run.is_prefix and (not window or run.limit <= window)
            seen = None if is_causal else visible(run, plan, begin, window)
            o[run.queries] = attend(q[run.queries], k, v, seen, self.sizes.head_dim**-0.5, is_causal)
        if window:
            self.store(rows, cache, plan)
        return o
