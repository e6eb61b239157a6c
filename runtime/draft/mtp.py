"""The plain multi-token prediction layer of a V4 checkpoint, run on its own output to draft several tokens.

Legend: R requests, γ drafts a block, T rows of a target step, n streams, D hidden width, V vocabulary, P position of a
request's anchor.

A row at position p joins what the target made of the token at p (its n streams after the last layer) with the embedding
of the token at p + 1, runs one sliding layer, and predicts the token at p + 2:

    streams_j = e_proj(enorm(embedding)) + h_proj(hnorm(target stream_j))

The first draft behind the anchor comes from the row at P - 1. The row at P, which gives the second, reads the layer's
own output in place of the target's streams and the embedding of the first draft; and so on, one forward a draft.

State: the layer's rotated keys, and the target's streams of the latest positions, each in a ring by position. With one
layer a key depends on nothing but its own row's input, so rows behind which no draft is wanted need neither attention
nor experts. A step's token at p completes the row at p - 1. Hence the rows that a chain wrote, and those that read a
rejected draft, are written anew from what the target says before any row that is kept attends to them.
"""

from __future__ import annotations

import numpy as np
import torch

from ...comm.collectives import broadcast
from ...comm.dispatch import Exchange, StepRows
from ...layers.attention.plan import AttentionPlan, HostPlan, Rows, build_plan
from ...layers.draft_heads_host import HostDraftBlock, HostHeads
from ...layers.hyper_connection import HyperConnection, HyperHead
from ...layers.kernels import Kernels
from ...layers.linear import MergedLinear, Part
from ...layers.norm import RMSNorm
from ...layers.params import ParamSource, Scope
from ...layers.probe import ignore
from ...layers.stages import drain
from ...parallel.groups import Groups
from ..cache import Cache, CacheLayout
from ..model_config import ModelConfig
from ..models.base import TapKind, placed
from ..models.deepseek_v4 import Block, DeepseekV4, draft_stage_sizes, hyper_sizes, rope_table
from ..models.staged import dispatcher_for
from ..step import Step
from .base import DraftNoise, DraftRequests, DraftRoom, PlainDraft

MAX_GAMMA = 8
"""Drafts of a block at most; each costs a forward, and is kept less often than the one before it."""

NEVER = 1 << 40
"""A last position so far ahead that the row counts as one of the distant past, which rings do not keep."""


class MTPDrafter(PlainDraft):
    """See :class:`.base.Drafter`. The layer was trained for one token."""

    longest, usual = MAX_GAMMA, 1
    tap_kind: TapKind = "streams"
    resumes = True

    def __init__(
        self,
        config: ModelConfig,
        source: ParamSource,
        target: DeepseekV4,
        groups: Groups,
        kernels: Kernels,
        room: DraftRoom,
        gamma: int,
    ) -> None:
        self.gamma = gamma
        self._target, self._groups, self._shape = target, groups, (config.hc_mult, config.hidden_size)
        device, dtype, eps = target.embed.weight.device, target.embed.weight.dtype, config.rms_norm_eps
        rope = rope_table(config, config.main_rope, room.max_context + MAX_GAMMA, device)
        scope, hidden = Scope(source).scope("mtp.0"), config.hidden_size
        self._e_norm, self._h_norm = (RMSNorm(scope, name, eps, kernels) for name in ("enorm", "hnorm"))
        self._e_proj, self._h_proj = (
            MergedLinear(scope, [Part(f"{name}.weight", 0, hidden)], kernels) for name in ("e_proj", "h_proj")
        )
        attention, moe, hyper = draft_stage_sizes(config)
        moe = placed(moe, room.experts, 0)
        self._dispatcher = dispatcher_for(moe, target.dispatch, groups, dtype, device)
        travels = self._dispatcher.all_to_all
        self._block = Block(scope, attention, moe, hyper, rope, groups, kernels, config.num_layers, travels)
        self.expert_layers = (self._block.moe,)
        self._hyper_head = HyperHead(scope, "hc_head", hyper_sizes(config), kernels)
        self._norm = RMSNorm(scope, "norm", eps, kernels)
        # The way from a row's input to its key, for rows that need no more.
        self._read = HyperConnection(scope, "hc_attn", "attn_norm", hyper, kernels).read
        self._key_proj = MergedLinear(scope, [Part("attn.wkv.weight", 0, config.head_dim)], kernels)
        weight = scope.take("attn.kv_norm.weight", dtype=torch.float32)
        self._key = kernels.bind("key_norm_rope", weight=weight, rope=rope, eps=eps)
        self._store = kernels.bind("store_rows")
        streams = attention._replace(head_dim=config.hc_mult * hidden, window=1)
        layout = CacheLayout((attention, streams), room.max_verify, dtype.itemsize)
        self._cache = Cache(layout, room.num_slots, 0, 0, device, dtype)
        self.caches = (self._cache,)
        self.heads = HostHeads(None, None)

    @classmethod
    def tap_layers(cls, config: ModelConfig) -> tuple[int, ...]:
        """See :meth:`.base.Drafter.tap_layers`: the last layer."""
        if config.dspark is not None:
            raise ValueError("the mtp.* tensors of the checkpoint are a DSpark draft, no multi-token prediction layer")
        if config.num_nextn_predict_layers != 1:
            raise ValueError(
                f"the checkpoint has {config.num_nextn_predict_layers} multi-token prediction layers "
                "(num_nextn_predict_layers); the draft mtp needs exactly 1"
            )
        return (config.num_layers - 1,)

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        source: ParamSource,
        target: DeepseekV4,
        groups: Groups,
        kernels: Kernels,
        room: DraftRoom,
        gamma: int | None,
    ) -> MTPDrafter:
        """See :meth:`.base.Drafter.load`."""
        return cls(config, source, target, groups, kernels, room, cls.block_length(config, gamma))

    @torch.inference_mode()
    def observe(self, taps: torch.Tensor, step: Step) -> None:
        """See :meth:`.base.Drafter.observe`: keeps the streams, and the keys of the rows that the step completes."""
        keys, streams = self._cache.layers
        taps, tokens, plan = step.plan.gather(taps), step.plan.gather(step.tokens), step.plan.of_keys()
        rows = plan.keys
        before = taps[(rows.rows - 1).clamp(min=0)]
        kept = streams.window[rows.slots, (rows.positions - 1) % streams.window.shape[1]]
        features = torch.where((rows.positions > rows.starts).unsqueeze(1), before, kept)
        x = self._read(self._join(features.unflatten(1, self._shape), tokens)).x
        completed = _one_back(plan)
        self._store(self._key(self._key_proj(x), completed), None, keys, completed)
        self._store(taps.contiguous(), None, streams, plan)

    @torch.inference_mode()
    def propose(self, requests: DraftRequests, noise: DraftNoise | None) -> HostDraftBlock | None:
        """See :meth:`.base.Drafter.propose`. γ forwards, whoever has requests; tokens are drawn on the first rank of an
        attention block and broadcast in it."""
        num_requests, ring = len(requests.slots), self._cache.layers[1].window
        slots, starts = np.array(requests.slots, np.int64), np.array(requests.starts, np.int64)
        last = torch.from_numpy((starts - 1) % ring.shape[1]).to(ring.device)
        streams = ring[torch.from_numpy(slots).to(ring.device), last].unflatten(1, self._shape)
        tokens = torch.tensor(requests.anchors, dtype=torch.int64, device=ring.device)
        exchange = Exchange(self._groups, self._dispatcher, StepRows(requests.others, has_prefill=False))
        drawn: list[HostDraftBlock] = []
        for k in range(self.gamma):
            streams, logits = self._forward(streams, tokens, slots, starts - 1 + k, exchange)
            if noise is not None:
                drawn.append(self._draw(k, logits, noise))
                tokens = torch.from_numpy(drawn[k].tokens[:, 0]).to(ring.device)
            if num_requests and k + 1 < self.gamma:
                tokens = broadcast(tokens, self._groups.attn_block)
        if noise is None:
            return None
        probs = None if noise.temperatures is None else np.concatenate([place.probs for place in drawn], axis=1)
        return HostDraftBlock(np.concatenate([place.tokens for place in drawn], axis=1), probs, None)

    def _draw(self, k: int, logits: torch.Tensor, noise: DraftNoise) -> HostDraftBlock:
        """The drafts of place ``k`` from ``logits`` [R, V], as blocks of one."""
        base = logits.float().cpu().numpy()[:, None]
        uniforms = None if noise.uniforms is None else noise.uniforms[:, k : k + 1]
        nothing = np.empty((len(base), 1, 0), np.float32)
        return self.heads.draw_block(base, nothing, np.empty(len(base), np.int64), noise.temperatures, uniforms)

    def _join(self, streams: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The layer's input [R, n, D] from ``streams`` [R, n, D] of positions and the ``tokens`` [R] behind them."""
        embedded = self._e_proj(self._e_norm(self._target.embed(tokens)))
        carried = self._h_proj(self._h_norm(streams.reshape(-1, self._shape[1])))
        return embedded.unsqueeze(1) + carried.view(streams.shape)

    def _forward(
        self,
        streams: torch.Tensor,
        tokens: torch.Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        exchange: Exchange,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows at ``positions`` [R]: the streams [R, n, D] they hand on, and logits [R, V]. Collective."""
        rows = np.stack((positions, slots, positions, positions + 1, np.arange(len(slots))))
        plan, ids = build_plan(rows, self._cache.page_table, ()), exchange.own(tokens)
        joined = exchange.own(self._join(streams, tokens))
        out = drain(self._block.stages(joined, ids, self._cache.layers[0], plan, exchange, ignore))
        out = exchange.for_attention(out)
        return out, self._target.head(self._norm(self._hyper_head(out)))


def _one_back(plan: AttentionPlan) -> AttentionPlan:
    """``plan`` with every row one position earlier; rows that would lie before the first position are not stored."""
    rows = plan.keys
    exists = rows.positions > 0
    ends = torch.where(exists, rows.ends - 1, NEVER)
    moved = torch.stack(((rows.positions - 1).clamp(min=0), rows.slots, rows.starts - 1, ends, rows.rows))
    host = plan.host
    if host is not None:
        host = HostPlan(moved.numpy(), moved.numpy(), host.page_table, {})
    keys = Rows(*moved.unbind(0))
    return plan._replace(queries=keys, keys=keys, closing={}, host=host)
