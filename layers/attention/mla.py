"""Multi-head latent attention: one low-rank row a token stands for the keys and values of all heads.

Legend: T query rows, K key rows of the step, t query rows and L keys of a run, D hidden width, H heads on this rank,
r latent width, a and d_r channels of a query head without and with rotation, e value channels of a head.

A cached row is the normed latent [r] and one rotated key [d_r] that all heads share, whatever the number of heads and
ranks. Two forms give the same result. Naive: the up-projection W [r, H (a + e)] turns each latent into the heads' keys
and values. Absorbed: W's key part is folded into the query and its value part into the output, so that attention works
on latents as with a single key head of r + d_r channels; less work for few query rows, more for many.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Literal, NamedTuple

import torch

from ...comm.collectives import Pending
from ...parallel.groups import Group
from ..kernels import Kernels
from ..linear import MergedLinear, Part, RowParallelLinear, divide, shard
from ..params import Scope
from ..probe import Probe
from ..rope import RopeTable, rotate, rotate_halves
from ..stages import Point, Stages
from .dense import CacheShape, attend, attend_around, read_tokens, store_tokens, visible
from .plan import AttentionPlan, LayerCache, Run
from .ring import Blocks

Form = Literal["naive", "absorbed"]


class MLASizes(NamedTuple):
    """Sizes of one layer. ``q_lora_rank`` None: queries are projected directly. ``interleaved``: rotated channels pair
    up as (2i, 2i + 1), else as (i, i + d_r / 2). ``scale``: of the scores."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_head_dim: int
    norm_eps: float
    scale: float
    interleaved: bool = True

    kind = "mla"
    num_kv_heads = 1

    @property
    def label(self) -> str:
        """What the kind is called."""
        return self.kind

    @property
    def head_dim(self) -> int:
        """Channels of a query head."""
        return self.nope_dim + self.rope_dim

    def cache(self, num_ranks: int) -> CacheShape:
        """What a rank of ``num_ranks`` keeps: the same on each."""
        return CacheShape(entry_width=self.kv_lora_rank + self.rope_dim)

    def keys_read(self, context: int) -> int:
        """Keys that a token behind ``context`` positions attends to."""
        return context

    def operations(self, context: int) -> int:
        """Multiplications and additions of the absorbed form, of one token behind ``context`` positions."""
        fold = self.kv_lora_rank * (self.nope_dim + self.v_head_dim)
        return 2 * self.num_heads * (context * (2 * self.kv_lora_rank + self.rope_dim) + fold)

    def problems(self, num_ranks: int) -> list[str]:
        """What keeps the heads from being cut over ``num_ranks`` ranks."""
        if self.num_heads % num_ranks:
            return [f"num_attention_heads = {self.num_heads} is not divisible by attn_tp = {num_ranks}"]
        return []

    def form(self, num_rows: int, num_keys: int) -> Form:
        """The form with fewer multiplications for a run of ``num_rows`` rows over ``num_keys`` keys."""
        per_head = self.kv_lora_rank * (self.nope_dim + self.v_head_dim)
        naive = num_keys * (per_head + num_rows * (self.head_dim + self.v_head_dim))
        absorbed = num_rows * (per_head + num_keys * (2 * self.kv_lora_rank + self.rope_dim))
        return "naive" if naive < absorbed else "absorbed"


class Latent(NamedTuple):
    """What a layer makes of its rows: queries without rotation ``q`` [T, H, a] and rotated ``q_rope`` [T, H, d_r], the
    ``rows`` for the cache [T, r + d_r], and ``q_latent`` [T, q rank], what queries are projected from."""

    q: torch.Tensor
    q_rope: torch.Tensor
    rows: torch.Tensor
    q_latent: torch.Tensor


class MLAttention:
    """One attention layer, cut by heads over ``group``. ``form``: use this one always; None for the cheaper."""

    def __init__(
        self,
        source: Scope,
        sizes: MLASizes,
        rope: RopeTable,
        group: Group,
        kernels: Kernels,
        layer: int,
        form: Form | None = None,
    ) -> None:
        self.sizes, self._rope, self._layer, self._form = sizes, rope, layer, form
        num_heads = divide("number of attention heads", sizes.num_heads, group)
        kv = Part("kv_a_proj_with_mqa.weight", 0, sizes.kv_lora_rank + sizes.rope_dim)
        direct = sizes.q_lora_rank is None
        name = "q_proj.weight" if direct else "wq_b.weight"
        heads = shard(name, "query features", sizes.num_heads * sizes.head_dim, group)
        self._down = MergedLinear(source, [heads if direct else Part("wq_a.weight", 0, sizes.q_lora_rank), kv], kernels)
        if not direct:
            self._q_norm = self._norm(source, "q_a_layernorm", kernels)
            self._up = MergedLinear(source, [heads], kernels)
        self._kv_norm = self._norm(source, "kv_a_layernorm", kernels)
        share = num_heads * (sizes.nope_dim + sizes.v_head_dim)
        up = source.take("kv_b_proj.weight", start=group.rank * share, stop=(group.rank + 1) * share)
        up = up.unflatten(0, (num_heads, -1))
        self._key_up, self._value_up = up[:, : sizes.nope_dim].contiguous(), up[:, sizes.nope_dim :].contiguous()
        self._blocks = Blocks.bind(kernels, sizes.scale)
        self._out = RowParallelLinear(source, "o_proj.weight", sizes.num_heads * sizes.v_head_dim, group, kernels)

    def _norm(self, source: Scope, name: str, kernels: Kernels):
        weight = source.take(f"{name}.weight", dtype=torch.float32)
        return kernels.bind("rms_norm", weight=weight, eps=self.sizes.norm_eps)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Latent:
        """From normed rows ``x`` [T, D] at ``positions`` [T]."""
        sizes = self.sizes
        q_latent, kv = self._down.split(self._down(x))
        q = q_latent
        if sizes.q_lora_rank is not None:
            q_latent = self._q_norm(q_latent)
            q = self._up(q_latent)
        q, q_rope = q.unflatten(-1, (-1, sizes.head_dim)).split([sizes.nope_dim, sizes.rope_dim], dim=-1)
        latent, key = kv.split([sizes.kv_lora_rank, sizes.rope_dim], dim=-1)
        turn = rotate if sizes.interleaved else rotate_halves
        cos, sin = self._rope.cos[positions], self._rope.sin[positions]
        q_rope = turn(q_rope, cos.unsqueeze(1), sin.unsqueeze(1))
        return Latent(q, q_rope, torch.cat((self._kv_norm(latent), turn(key, cos, sin)), dim=1), q_latent)

    def kept(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What the layer keeps [T, c] of normed rows ``x`` [T, D] at ``positions`` [T], both pools side by side."""
        return self.project(x, positions).rows

    def attend(
        self, made: Latent, run: Run, rows: torch.Tensor, seen: torch.Tensor | None, is_causal: bool
    ) -> torch.Tensor:
        """The heads' outputs [t, H, e] of a run over the cached ``rows`` [L, r + d_r]; ``seen`` as in
        :func:`.dense.visible`."""
        sizes, rank = self.sizes, self.sizes.kv_lora_rank
        q, q_rope = made.q[run.queries], made.q_rope[run.queries]
        form = self._form or sizes.form(q.shape[0], rows.shape[0])
        if form == "naive":
            latent, shared = rows[:, :rank], rows[:, rank:]
            keys = torch.einsum("lr,har->lha", latent, self._key_up)
            keys = torch.cat((keys, shared.unsqueeze(1).expand(-1, keys.shape[1], -1)), dim=-1)
            values = torch.einsum("lr,her->lhe", latent, self._value_up)
            return attend(torch.cat((q, q_rope), dim=-1), keys, values, seen, sizes.scale, is_causal)
        (keys,) = _one_head(rows)
        o = attend(self._fold(q, q_rope), keys, keys[..., :rank], seen, sizes.scale, is_causal)
        return torch.einsum("thr,her->the", o, self._value_up)

    def stages(
        self,
        x: torch.Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        start_sum: Callable[[torch.Tensor], Pending],
        probe: Probe,
    ) -> Stages[torch.Tensor]:
        """See :meth:`..Attention.stages`."""
        made = self.project(x, plan.queries.positions)
        yield Point.PREPARED
        if plan.ring is None:
            o = self._over_cache(x, made, cache, plan, probe)
        else:
            keys = self._fold(made.q, made.q_rope), _one_head, made.rows
            o = attend_around(*keys, cache.entries, plan, self._blocks, self.sizes.kv_lora_rank)
            o = torch.einsum("thr,her->the", o, self._value_up)
        pending = start_sum(self._out.partial(o.flatten(1)))
        yield Point.SUMMING
        out = pending.wait()
        probe("attention_out", self._layer, out)
        return out

    def _over_cache(
        self, x: torch.Tensor, made: Latent, cache: LayerCache, plan: AttentionPlan, probe: Probe
    ) -> torch.Tensor:
        """Attention [T, H, e] run by run; the step's key rows are brought together and stored."""
        store_tokens(plan.gather(made.rows), cache.entries, plan)
        o = made.q.new_empty((*made.q.shape[:2], self.sizes.v_head_dim))
        for run, seen, is_causal in self.selected(x, made, cache, plan, probe):
            o[run.queries] = self.attend(made, run, read_tokens(cache.entries, run, run.limit, plan), seen, is_causal)
        return o

    def _fold(self, q: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
        """Queries [t, H, r + d_r] over stored rows: the keys' up-projection is folded into them."""
        return torch.cat((torch.einsum("tha,har->thr", q, self._key_up), q_rope), dim=-1)

    def selected(
        self, x: torch.Tensor, made: Latent, cache: LayerCache, plan: AttentionPlan, probe: Probe
    ) -> Generator[tuple[Run, torch.Tensor | None, bool], None, None]:
        """Each run, which keys its rows see, and whether those are simply all up to their own position."""
        for run in plan.runs:
            yield run, None if run.is_prefix else visible(run, plan, 0), run.is_prefix


def _one_head(rows: torch.Tensor) -> tuple[torch.Tensor]:
    """Stored rows [L, c] as the keys [L, 1, c] that all heads share."""
    return (rows.unsqueeze(1),)
