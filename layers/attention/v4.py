"""DeepSeek-V4 attention of all kinds: sliding window, CSA (compressed, with an indexer), HCA (heavily compressed).

Legend: T rows, D hidden width, H heads on this rank, d head width, w window, m tokens per compressed entry.

One key head, shared by all queries, which is also the value. Queries are cut over the attention group by heads; keys,
compressors and the indexer are computed on every rank of the group. Since keys are rotated, the output carries their
rotation and is turned back at the query's position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from ...comm.collectives import Pending
from ...parallel.groups import Group
from ..kernels import Bound, Kernels
from ..kernels.packed_keys import is_packed, packed_width
from ..kernels.projection import ProjectionSizes
from ..linear import GroupedColumnParallelLinear, Part, RowParallelLinear, divide, merged_weight, shard
from ..params import Scope
from ..probe import Probe
from ..rope import RopeTable
from ..stages import Point, Stages
from .plan import AttentionPlan, LayerCache


class V4AttentionSizes(NamedTuple):
    """Sizes of one attention layer. ``ratio`` is m, 0 for the sliding kind."""

    kind: Literal["sliding", "csa", "hca"]
    ratio: int
    hidden_size: int
    num_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    norm_eps: float
    rope_dim: int

    def keys_read(self, context: int) -> int:
        """Keys that a token behind ``context`` positions attends to, compressed entries included."""
        num_entries = context // self.ratio if self.ratio else 0
        seen = min(num_entries, self.index_topk) if self.kind == "csa" else num_entries
        return seen + min(context, self.window)

    def operations(self, context: int) -> int:
        """Multiplications and additions that depend on the context, of one token behind ``context`` positions."""
        index = (
            2 * self.index_num_heads * (self.index_head_dim + 1) * (context // self.ratio) if self.kind == "csa" else 0
        )
        return index + 4 * self.num_heads * self.head_dim * self.keys_read(context)

    @property
    def ring_width(self) -> int:
        """Columns of a row of the sliding ring."""
        return self.head_dim

    @property
    def packed_row(self) -> int:
        """Bytes of a key, sliding or compressed, in 8-bit floats."""
        return packed_width(self.head_dim, self.rope_dim)

    @property
    def entry_width(self) -> int:
        """Columns of a compressed entry."""
        return self.head_dim if self.ratio else 0

    @property
    def index_width(self) -> int:
        """Columns of an entry of the indexer."""
        return self.index_head_dim if self.kind == "csa" else 0

    @property
    def index_ratio(self) -> int:
        """Tokens per entry of the indexer."""
        return self.ratio

    @property
    def raw_width(self) -> int:
        """Columns of a row of compressor inputs: values and gates, of the main compressor and then of the indexer's."""
        return {"sliding": 0, "hca": 2 * self.head_dim, "csa": 4 * (self.head_dim + self.index_head_dim)}[self.kind]

    @property
    def raw_span(self) -> int:
        """How many rows back, itself included, the entry that a token closes reaches."""
        return {"sliding": 0, "hca": self.ratio, "csa": 2 * self.ratio}[self.kind]


class Indexer:
    """Chooses the compressed entries that each query of a CSA layer sees (the lightning indexer)."""

    def __init__(self, source: Scope, sizes: V4AttentionSizes, rope: RopeTable, kernels: Kernels) -> None:
        self._pool = _bind_pool(source.scope("compressor"), sizes, rope, kernels, indexer=True)
        scale = (sizes.index_head_dim * sizes.index_num_heads) ** -0.5
        self._select = kernels.bind("select_entries", ratio=sizes.ratio, top_k=sizes.index_topk, scale=scale)

    def __call__(
        self, q: torch.Tensor, weights: torch.Tensor, raw: torch.Tensor, cache: LayerCache, plan: AttentionPlan
    ) -> torch.Tensor:
        """Rotated ``q`` [T, heads, d_index], ``weights`` [T, heads]; chosen entries int64 [T, k], -1 where there are
        fewer."""
        self._pool(raw, cache, plan)
        return self._select(q, weights, cache, plan)


def _bind_pool(source: Scope, sizes: V4AttentionSizes, rope: RopeTable, kernels: Kernels, indexer: bool):
    return kernels.bind(
        "pool_windows",
        ape=source.take("ape", dtype=torch.float32),
        norm_weight=source.take("norm.weight", dtype=torch.float32),
        rope=rope,
        eps=sizes.norm_eps,
        ratio=sizes.ratio,
        overlap=sizes.kind == "csa",
        indexer=indexer,
    )


class V4Attention:
    """One attention layer, cut by heads and output groups over ``group``."""

    def __init__(
        self, source: Scope, sizes: V4AttentionSizes, rope: RopeTable, group: Group, kernels: Kernels, layer: int
    ) -> None:
        self.sizes, self._layer = sizes, layer
        self._num_heads = divide("number of attention heads", sizes.num_heads, group)
        self._project = self._bind_project(source, rope, group, kernels)
        self._store = kernels.bind("store_rows")
        self._pack = kernels.bind("pack_keys", rotary=sizes.rope_dim)
        if sizes.kind != "sliding":
            self._pool = _bind_pool(source.scope("compressor"), sizes, rope, kernels, indexer=False)
        if sizes.kind == "csa":
            self._indexer = Indexer(source.scope("indexer"), sizes, rope, kernels)
        first = group.rank * self._num_heads
        sinks = source.take("attn_sink", start=first, stop=first + self._num_heads, dtype=torch.float32)
        scale = sizes.head_dim**-0.5
        self._attend = kernels.bind(
            "attend", sinks=sinks, window=sizes.window, ratio=sizes.ratio, rope=rope, scale=scale
        )
        self._out_a = GroupedColumnParallelLinear(
            source, "wo_a.weight", sizes.o_groups, sizes.o_lora_rank, group, kernels
        )
        self._out_b = RowParallelLinear(source, "wo_b.weight", sizes.o_groups * sizes.o_lora_rank, group, kernels)

    def _bind_project(self, source: Scope, rope: RopeTable, group: Group, kernels: Kernels):
        sizes = self.sizes
        q_parts = [shard("wq_b.weight", "query features", sizes.num_heads * sizes.head_dim, group)]
        index_num_heads = 0
        if sizes.kind == "csa":
            index_num_heads = sizes.index_num_heads
            q_parts.append(Part("indexer.wq_b.weight", 0, index_num_heads * sizes.index_head_dim))
        return kernels.bind(
            "project",
            weight_in=merged_weight(source, self._input_parts(sizes)),
            weight_q=merged_weight(source, q_parts),
            latent_norm=source.take("q_norm.weight", dtype=torch.float32),
            key_norm=source.take("kv_norm.weight", dtype=torch.float32),
            sizes=ProjectionSizes(
                sizes.q_lora_rank,
                sizes.head_dim,
                sizes.raw_width,
                self._num_heads,
                index_num_heads,
                sizes.index_head_dim,
            ),
            rope=rope,
            eps=sizes.norm_eps,
        )

    @staticmethod
    def _input_parts(sizes: V4AttentionSizes) -> list[Part]:
        """Everything that reads the layer's input, as one product; the order of the columns is that of the cache."""
        parts = [Part("wq_a.weight", 0, sizes.q_lora_rank), Part("wkv.weight", 0, sizes.head_dim)]
        if sizes.kind != "sliding":
            width = sizes.head_dim * (2 if sizes.kind == "csa" else 1)
            parts += [Part("compressor.wkv.weight", 0, width), Part("compressor.wgate.weight", 0, width)]
        if sizes.kind == "csa":
            width = 2 * sizes.index_head_dim
            parts += [
                Part("indexer.compressor.wkv.weight", 0, width),
                Part("indexer.compressor.wgate.weight", 0, width),
                Part("indexer.weights_proj.weight", 0, sizes.index_num_heads),
            ]
        return parts

    @property
    def bound(self) -> dict[str, Bound]:
        """The operations of a sliding layer, for :meth:`.Kernels.join`."""
        out_a, out_b = self._out_a.bound, self._out_b.partial
        return {"project": self._project, "attend": self._attend, "out_a": out_a, "out_b": out_b}

    def stages(
        self,
        x: torch.Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        start_sum: Callable[[torch.Tensor], Pending],
        probe: Probe,
    ) -> Stages[torch.Tensor]:
        """The layer on normed rows ``x`` [T, D]; returns what ``start_sum`` makes of this rank's summand [T, D]: the
        sum over the group, of all rows or some. Collective. Reads the cache and then stores the step's rows in it."""
        sizes = self.sizes
        q, keys, raw, index_q, index_weights = self._project(x, plan)
        yield Point.PREPARED
        keys = plan.gather(self._pack(keys) if is_packed(cache.window) else keys)
        raw = plan.gather(raw) if sizes.ratio else None
        selected = None
        if sizes.kind == "csa":
            selected = self._indexer(index_q, index_weights, raw, cache, plan)
            probe("selected", self._layer, selected)
        if sizes.ratio:
            self._pool(raw, cache, plan)
        o = self._attend(q, keys, cache, selected, plan)
        self._store(keys, raw, cache, plan)
        o = self._out_a(o.flatten(1).unflatten(1, (self._out_a.num_groups, -1)))
        pending = start_sum(self._out_b.partial(o))
        yield Point.SUMMING
        out = pending.wait()
        probe("attention_out", self._layer, out)
        return out
