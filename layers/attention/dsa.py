"""DeepSeek sparse attention: latent attention whose queries see only the tokens that a lightning indexer chooses.

Legend: T query rows, K key rows of the step, t query rows and L keys of a run, D hidden width, H_i index heads, d_i
their width, k tokens that a query sees.

The indexer scores every earlier token s for a query t by sum over heads of w_h relu(q_h k_s), with one index key a
token that is cached beside the latent row; every rank of the group has the whole indexer. While a query has at most k
tokens before it, it sees them all.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import torch

from ...parallel.groups import Group
from ..kernels import Kernels
from ..linear import MergedLinear, Part
from ..params import Scope
from ..probe import Probe
from ..rope import RopeTable, rotate_halves
from .dense import CacheShape, read_tokens, store_tokens, visible
from .mla import Latent, MLASizes, MLAttention
from .plan import AttentionPlan, LayerCache, Run

FP8_MAX = 448.0
LAYER_NORM_EPS = 1e-6
GATHER_ROWS = 8
"""Up to so many query rows of a run gather the latents they chose, one row after the other."""


class DSASizes(NamedTuple):
    """``latent``: the attention itself. ``index_fp8``: index queries and keys are rotated by a Hadamard matrix and
    rounded to FP8 (E4M3, a power-of-two scale each), as FP8 releases are served; the scores are else the same."""

    latent: MLASizes
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    index_fp8: bool = False

    kind = "dsa"
    num_kv_heads = 1

    @property
    def label(self) -> str:
        """What the kind is called."""
        return self.kind

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.latent.num_heads

    @property
    def head_dim(self) -> int:
        """Channels of a query head."""
        return self.latent.head_dim

    @property
    def rope_dim(self) -> int:
        """Rotated channels."""
        return self.latent.rope_dim

    def cache(self, num_ranks: int) -> CacheShape:
        """What a rank of ``num_ranks`` keeps: the same on each."""
        return self.latent.cache(num_ranks)._replace(index_width=self.index_head_dim)

    def keys_read(self, context: int) -> int:
        """Keys that a token behind ``context`` positions attends to; the indexer reads them all."""
        return min(context, self.index_topk)

    def operations(self, context: int) -> int:
        """As :meth:`.mla.MLASizes.operations`, with the indexer's."""
        index = 2 * self.index_num_heads * (self.index_head_dim + 1) * context
        return index + self.latent.operations(self.keys_read(context))

    def problems(self, num_ranks: int) -> list[str]:
        """What keeps the heads from being cut over ``num_ranks`` ranks."""
        return self.latent.problems(num_ranks)


class LightningIndexer:
    """Index queries, keys and weights of a layer's rows, and the tokens they choose."""

    def __init__(self, source: Scope, sizes: DSASizes, rope: RopeTable, kernels: Kernels) -> None:
        self._sizes, self._rope = sizes, rope
        parts = [
            Part("wk.weight", 0, sizes.index_head_dim),
            Part("weights_proj.weight", 0, sizes.index_num_heads),
        ]
        self._in = MergedLinear(source, parts, kernels)
        width = sizes.index_num_heads * sizes.index_head_dim
        self._queries = MergedLinear(source, [Part("wq_b.weight", 0, width)], kernels)
        self._norm_weight, self._norm_bias = (
            source.take(f"k_norm.{leaf}", dtype=torch.float32) for leaf in ("weight", "bias")
        )
        self._turn = hadamard(sizes.index_head_dim).to(self._norm_weight.device) if sizes.index_fp8 else None
        self._scale = sizes.index_head_dim**-0.5 * sizes.index_num_heads**-0.5

    def project(
        self, x: torch.Tensor, q_latent: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, H_i, d_i], weights [T, H_i] and keys [T, d_i] of rows ``x`` [T, D] with latents [T, q rank]."""
        keys, weights = self._in.split(self._in(x))
        keys = torch.nn.functional.layer_norm(
            keys.float(), keys.shape[-1:], self._norm_weight, self._norm_bias, LAYER_NORM_EPS
        ).to(x.dtype)
        q = self._queries(q_latent).unflatten(-1, (-1, self._sizes.index_head_dim))
        cos, sin = self._rope.cos[positions], self._rope.sin[positions]
        q, keys = rotate_halves(q, cos.unsqueeze(1), sin.unsqueeze(1)), rotate_halves(keys, cos, sin)
        if self._turn is not None:
            q, keys = fp8_round(q @ self._turn.to(q.dtype)), fp8_round(keys @ self._turn.to(keys.dtype))
        return q, weights.float() * self._scale, keys

    def choose(
        self, q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor | None
    ) -> torch.Tensor:
        """Which of L cached ``keys`` [L, d_i] the rows with ``q`` [t, H_i, d_i] and ``weights`` [t, H_i] see: the best
        k of those ``seen``, bool [t, L]. Of equal scores, which rectified ones often are, the earlier token wins."""
        scores = torch.einsum("thd,ld->thl", q.float(), keys.float()).relu_()
        scores = torch.einsum("thl,th->tl", scores, weights)
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        least = scores.topk(self._sizes.index_topk, dim=-1).values[:, -1:]
        above, equal = scores > least, scores == least
        chosen = above | (equal & (equal.cumsum(1) <= self._sizes.index_topk - above.sum(1, keepdim=True)))
        return chosen if seen is None else chosen & seen


class DSAttention(MLAttention):
    """One attention layer, cut by heads over ``group``; the indexer is whole on every rank."""

    def __init__(
        self, source: Scope, sizes: DSASizes, rope: RopeTable, group: Group, kernels: Kernels, layer: int
    ) -> None:
        super().__init__(source, sizes.latent, rope, group, kernels, layer)
        self._topk = sizes.index_topk
        self._indexer = LightningIndexer(source.scope("indexer"), sizes, rope, kernels)

    def kept(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See :meth:`.mla.MLAttention.kept`: the index keys come last."""
        made = self.project(x, positions)
        return torch.cat((made.rows, self._indexer.project(x, made.q_latent, positions)[2]), dim=1)

    def attend(
        self, made: Latent, run: Run, rows: torch.Tensor, seen: torch.Tensor | None, is_causal: bool
    ) -> torch.Tensor:
        """See :meth:`.mla.MLAttention.attend`; a few rows read what they chose, many read everything."""
        begin, end = run.queries.start, run.queries.stop
        if seen is None or end - begin > GATHER_ROWS:
            return super().attend(made, run, rows, seen, is_causal)
        alone = [run._replace(queries=slice(at, at + 1)) for at in range(begin, end)]
        return torch.cat([super(DSAttention, self).attend(made, o, rows[s], None, False) for o, s in zip(alone, seen)])

    def selected(
        self, x: torch.Tensor, made: Latent, cache: LayerCache, plan: AttentionPlan, probe: Probe
    ) -> Generator[tuple[Run, torch.Tensor | None, bool], None, None]:
        """See :meth:`.mla.MLAttention.selected`; stores the step's index keys. Collective where rows are split."""
        q, weights, keys = self._indexer.project(x, made.q_latent, plan.queries.positions)
        store_tokens(plan.gather(keys), cache.index_entries, plan)
        for run in plan.runs:
            if run.limit <= self._topk:
                yield run, None if run.is_prefix else visible(run, plan, 0), run.is_prefix
                continue
            keys = read_tokens(cache.index_entries, run, run.limit, plan)
            chosen = self._indexer.choose(q[run.queries], weights[run.queries], keys, visible(run, plan, 0))
            probe("selected", self._layer, chosen)
            yield run, chosen, False


def hadamard(size: int) -> torch.Tensor:
    """The orthonormal Hadamard matrix [size, size]; ``ValueError`` unless ``size`` is a power of two."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"index_head_dim is {size}, but a Hadamard rotation needs a power of two")
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * size**-0.5


def fp8_round(x: torch.Tensor) -> torch.Tensor:
    """``x`` [..., d] as FP8 (E4M3) with one power-of-two scale for each row would hold it."""
    largest = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(largest / FP8_MAX)))
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)
