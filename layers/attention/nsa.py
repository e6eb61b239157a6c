"""Native sparse attention: every query sees summaries of all blocks, the tokens of the blocks that matter most, and a
sliding window, and a learned gate weighs the three.

Legend: T query rows, t query rows of a run at positions p, L its keys, D hidden width, H and H_k query and key heads on
this rank, g query heads that share a key head, d head width, C summaries that a run may see, N selected blocks of it.

Summary i stands for the tokens i s .. i s + l - 1 (``kernel_stride`` s, ``kernel_size`` l); a query sees it once all of
them lie at or before its own. How a query's attention spreads over summaries says which blocks of ``block_size`` tokens
matter: a block's weight is the sum over the strides in it of the weights of the summaries that cover the stride, summed
over the g heads, which therefore choose the same blocks. The first and the latest blocks are always among them.
(arXiv 2502.11089, sections 3.2 and 3.3; all three parts share keys and values, as published models do.)

The cache holds a token's rotated keys and its values, and the summaries in a pool of their own, each at the stride that
completes it, so that it lies in the page of its last token and pages can be shared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from ...comm.collectives import Pending, all_gather
from ...parallel.groups import Group
from ..kernels import Kernels
from ..linear import ColumnParallelLinear
from ..params import Scope
from ..probe import Probe
from ..rope import RopeTable, rotate_halves
from ..stages import Point, Stages
from .dense import CacheShape, attend, read_tokens, store_tokens, visible
from .gqa import GQAttention
from .plan import AttentionPlan, LayerCache, Run, entry_rows

Compression = Literal["mean", "linear"]
GATHER_ROWS = 8
"""Up to so many query rows of a run gather the tokens of the blocks they chose; more mask all tokens."""


class NSASizes(NamedTuple):
    """Sizes of one layer. ``block_counts`` blocks of ``block_size`` tokens are selected, the first ``init_blocks`` and
    the latest ``local_blocks`` among them. ``window`` positions are seen besides, 0 for none. ``compression``: a
    summary is the mean of its rotated keys and values, or learned products of them: of unrotated keys with an embedding
    of their place, rotated as the first token is."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kernel_size: int
    kernel_stride: int
    block_size: int
    block_counts: int
    window: int
    init_blocks: int = 1
    local_blocks: int = 2
    compression: Compression = "mean"

    kind = "nsa"
    qk_norm = False

    @property
    def label(self) -> str:
        """What the kind is called."""
        return self.kind

    @property
    def rope_dim(self) -> int:
        """Rotated channels."""
        return self.head_dim

    def cache(self, num_ranks: int) -> CacheShape:
        """What a rank of ``num_ranks`` keeps."""
        width = 2 * max(self.num_kv_heads // num_ranks, 1) * self.head_dim
        return CacheShape(entry_width=width, index_width=width, index_ratio=self.kernel_stride)

    def num_summaries(self, context: int) -> int:
        """How many summaries ``context`` tokens complete."""
        return max(context // self.kernel_stride - self.kernel_size // self.kernel_stride + 1, 0)

    def keys_read(self, context: int) -> int:
        """Keys that a query behind ``context`` positions reads, summaries included; no key twice of one part."""
        selected = min(context, self.block_counts * self.block_size)
        return self.num_summaries(context) + selected + min(context, self.window)

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


class NSAttention(GQAttention):
    """One attention layer, cut by heads over ``group``. Ranks that hold the same key head choose blocks together, from
    weights that are gathered over the group."""

    sizes: NSASizes

    def __init__(
        self, source: Scope, sizes: NSASizes, rope: RopeTable, group: Group, kernels: Kernels, layer: int
    ) -> None:
        super().__init__(source, sizes, rope, group, kernels, layer)
        self._gates = ColumnParallelLinear(source, "g_proj.weight", 3 * sizes.num_heads, group, kernels)
        self._sharers, share = max(group.size // sizes.num_kv_heads, 1), max(sizes.num_kv_heads // group.size, 1)
        self._sharing, first = group if self._sharers > 1 else Group.alone(), group.rank // self._sharers * share
        self._here = slice(first, first + 1) if self._sharers > 1 else slice(None)
        self._learned = None
        if sizes.compression == "linear":
            names = ("compress_key", "compress_value", "intra_block_pe")
            parts = (source.take(name, start=first, stop=first + share, dtype=torch.float32) for name in names)
            w_key, w_value, places = parts
            shape = (sizes.kernel_size, sizes.head_dim)
            self._learned = w_key.unflatten(1, shape), w_value.unflatten(1, shape), places.transpose(0, 1)

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
        gates = self._gates(x).float().sigmoid().to(q.dtype).unflatten(-1, (-1, 3))
        yield Point.PREPARED
        store_tokens(plan.gather(rows), cache.entries, plan)
        self._summarise(cache, plan)
        o = torch.empty_like(q)
        for run in plan.runs:
            o[run.queries] = self._attend_run(q[run.queries], gates[run.queries], run, cache, plan, probe)
        pending = start_sum(self._out.partial(o.flatten(1)))
        yield Point.SUMMING
        out = pending.wait()
        probe("attention_out", self._layer, out)
        return out

    def _summarise(self, cache: LayerCache, plan: AttentionPlan) -> None:
        """Store the summaries that the step's rows complete; the rows themselves are stored."""
        size, stride = self.sizes.kernel_size, self.sizes.kernel_stride
        closing = plan.closing[stride]
        last, slots = plan.keys.positions[closing], plan.keys.slots[closing]
        whole = last + 1 >= size
        last, slots = last[whole], slots[whole]
        tokens = last.unsqueeze(1) - torch.arange(size - 1, -1, -1, device=last.device)
        at = entry_rows(plan.page_table, slots.unsqueeze(1), tokens, cache.entries.shape[1])
        rows = cache.entries.flatten(0, 1)[at].float().unflatten(-1, (2, -1, self.sizes.head_dim))
        if self._learned is None:
            made = rows.mean(1)
        else:
            w_key, w_value, places = self._learned
            cos, sin = self._rope.cos[tokens].unsqueeze(2), self._rope.sin[tokens].unsqueeze(2)
            keys = rotate_halves(rows[:, :, 0], cos, -sin) + places
            key = rotate_halves(torch.einsum("clhd,hlde->che", keys, w_key), cos[:, 0], sin[:, 0])
            made = torch.stack((key, torch.einsum("clhd,hlde->che", rows[:, :, 1], w_value)), dim=1)
        to = entry_rows(plan.page_table, slots, last // stride, cache.index_entries.shape[1])
        cache.index_entries.flatten(0, 1)[to] = made.flatten(1).to(cache.index_entries.dtype)

    def _attend_run(
        self, q: torch.Tensor, gates: torch.Tensor, run: Run, cache: LayerCache, plan: AttentionPlan, probe: Probe
    ) -> torch.Tensor:
        """The heads' outputs [t, H, d] of ``q`` [t, H, d] with ``gates`` [t, H, 3] for the three parts."""
        sizes, positions = self.sizes, plan.queries.positions[run.queries]
        skipped = sizes.kernel_size // sizes.kernel_stride - 1
        summaries = read_tokens(cache.index_entries, run, run.limit // sizes.kernel_stride, plan)[skipped:]
        summed, weights = self._over_summaries(q, *self._keys_and_values(summaries), positions)
        weights = all_gather(weights, self._sharing, dim=1).unflatten(1, (-1, self._sharers)).sum(2)[:, self._here]
        chosen = self._choose(weights, positions, run.limit)
        probe("selected", self._layer, chosen)
        over_blocks = self._gathered if len(q) <= GATHER_ROWS else self._masked
        o = gates[..., :1] * summed + gates[..., 1:2] * over_blocks(q, chosen, positions, run, cache, plan)
        if not sizes.window:
            return o
        begin = max(run.first - sizes.window + 1, 0)
        rows = self._tokens(torch.arange(begin, run.limit, device=q.device), run, cache, plan)
        k, v = self._keys_and_values(rows)
        near = attend(q, k, v, visible(run, plan, begin, sizes.window), sizes.head_dim**-0.5)
        return o + gates[..., 2:] * near

    def _over_summaries(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention [t, H, d] over the summaries ``k`` and ``v`` [C, H_k, d], zero where none is seen, and its weights
        float32 [t, H_k, C], summed over the heads that share a key head."""
        grouped = q.unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("thgd,chd->thgc", grouped, k).float() * self.sizes.head_dim**-0.5
        last = torch.arange(len(k), device=q.device) * self.sizes.kernel_stride + self.sizes.kernel_size - 1
        hidden = (last > positions.unsqueeze(1))[:, None, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0.0)
        return torch.einsum("thgc,chd->thgd", weights.to(v.dtype), v).flatten(1, 2), weights.sum(2)

    def _choose(self, weights: torch.Tensor, positions: torch.Tensor, limit: int) -> torch.Tensor:
        """The blocks int64 [t, H_k, N] that each row's key heads read, best first, from summed ``weights``
        [t, H_k, C]; of equal weights the earlier block. May hold blocks behind the row's own, which it does not see."""
        sizes = self.sizes
        covering, strides = sizes.kernel_size // sizes.kernel_stride, sizes.block_size // sizes.kernel_stride
        num_blocks = -(-limit // sizes.block_size)
        weights = pad(weights, (covering - 1, num_blocks * strides - weights.shape[-1]))
        weights = weights.unfold(-1, covering, 1).sum(-1).unflatten(-1, (num_blocks, strides)).sum(-1)
        blocks, own = torch.arange(num_blocks, device=weights.device), (positions // sizes.block_size).unsqueeze(1)
        always = (blocks < sizes.init_blocks) | (blocks > own - sizes.local_blocks)
        weights = weights.masked_fill(always.unsqueeze(1), torch.inf)
        weights = weights.masked_fill((blocks > own).unsqueeze(1), -torch.inf)
        return weights.sort(dim=-1, descending=True, stable=True).indices[..., : sizes.block_counts]

    def _tokens(self, positions: torch.Tensor, run: Run, cache: LayerCache, plan: AttentionPlan) -> torch.Tensor:
        """The stored rows [..., 2 H_k d] of the run's request at ``positions`` [...]."""
        slots = torch.full_like(positions, run.slot)
        return cache.entries.flatten(0, 1)[entry_rows(plan.page_table, slots, positions, cache.entries.shape[1])]

    def _gathered(
        self,
        q: torch.Tensor,
        chosen: torch.Tensor,
        positions: torch.Tensor,
        run: Run,
        cache: LayerCache,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Attention [t, H, d] over the tokens of ``chosen`` blocks [t, H_k, N], which alone are read."""
        num_heads, here = chosen.shape[1], torch.arange(self.sizes.block_size, device=q.device)
        tokens = (chosen.unsqueeze(-1) * self.sizes.block_size + here).flatten(2)
        seen = tokens <= positions[:, None, None]
        slots = torch.full_like(tokens, run.slot)
        at = entry_rows(plan.page_table, slots, tokens.clamp(max=run.limit - 1), cache.entries.shape[1])
        rows = cache.entries.flatten(0, 1).unflatten(-1, (2, num_heads, -1))
        heads = torch.arange(num_heads, device=q.device).unsqueeze(1)
        k, v = rows[at, 0, heads], rows[at, 1, heads]
        grouped = q.unflatten(1, (num_heads, -1))
        scale = self.sizes.head_dim**-0.5
        return scaled_dot_product_attention(grouped, k, v, seen.unsqueeze(2), scale=scale).flatten(1, 2)

    def _masked(
        self,
        q: torch.Tensor,
        chosen: torch.Tensor,
        positions: torch.Tensor,
        run: Run,
        cache: LayerCache,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """As :meth:`_gathered`, from all tokens of the request, most of them masked."""
        k, v = (
            part.transpose(0, 1).unsqueeze(1)
            for part in self._keys_and_values(read_tokens(cache.entries, run, run.limit, plan))
        )
        num_blocks = -(-run.limit // self.sizes.block_size)
        seen = torch.zeros(*chosen.shape[:2], num_blocks, dtype=torch.bool, device=q.device).scatter_(2, chosen, True)
        seen = seen.repeat_interleave(self.sizes.block_size, dim=-1)[..., : run.limit]
        seen = seen & (torch.arange(run.limit, device=q.device) <= positions.unsqueeze(1)).unsqueeze(1)
        grouped = q.unflatten(1, (chosen.shape[1], -1)).permute(1, 2, 0, 3)
        shape = (*grouped.shape[:2], *k.shape[2:])
        o = scaled_dot_product_attention(
            grouped,
            k.expand(shape),
            v.expand(shape),
            seen.transpose(0, 1).unsqueeze(1),
            scale=self.sizes.head_dim**-0.5,
        )
        return o.permute(2, 0, 1, 3).flatten(1, 2)
