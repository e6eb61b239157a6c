"""DeepSeek-V4: sliding, CSA and HCA attention, mHC residual streams, and a mixture of experts in every layer.

Legend: T rows of a step, t of them that layers outside attention work on here (see :class:`Exchange`), n residual
streams, D hidden width, N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ...comm.dispatch import DispatchOptions, Exchange
from ...layers.attention.plan import AttentionPlan, LayerCache
from ...layers.attention.v4 import V4Attention, V4AttentionSizes
from ...layers.embedding import ParallelLMHead, VocabParallelEmbedding
from ...layers.hyper_connection import HyperConnection, HyperHead, HyperSizes, spread
from ...layers.kernels import Bound, Kernels
from ...layers.moe import MoE, MoESizes
from ...layers.norm import RMSNorm
from ...layers.params import ParamSource, Scope
from ...layers.probe import Probe, ignore
from ...layers.rope import RopeTable, Yarn, build_rope_table
from ...layers.stages import Stages
from ...parallel.groups import Groups
from ...parallel.pipeline import stage_layers
from ..balance.placement import PlacedExperts
from ..cache import Cache
from ..model_config import ModelConfig, RopeConfig
from .base import STANDARD, ModelOutput, TapKind, placed
from .staged import Part, Staged


def attention_sizes(config: ModelConfig, layer: int) -> V4AttentionSizes:
    """The attention sizes of one layer."""
    return V4AttentionSizes(
        kind=config.layer_kinds[layer],
        ratio=config.compress_ratios[layer],
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        q_lora_rank=config.q_lora_rank,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        window=config.sliding_window,
        index_num_heads=config.index_num_heads,
        index_head_dim=config.index_head_dim,
        index_topk=config.index_topk,
        norm_eps=config.rms_norm_eps,
        rope_dim=config.rope_dim,
    )


def moe_sizes(config: ModelConfig, layer: int) -> MoESizes:
    """The mixture-of-experts sizes of one layer."""
    return MoESizes(
        hidden_size=config.hidden_size,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        width=config.moe_intermediate_size,
        limit=math.inf if config.swiglu_limit is None else config.swiglu_limit,
        scoring=config.scoring_func,
        renormalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        hashed=config.hash_layers[layer],
        vocab_size=config.vocab_size,
    )


def hyper_sizes(config: ModelConfig) -> HyperSizes:
    """The settings of every hyper-connection."""
    return HyperSizes(config.hc_eps, config.rms_norm_eps, config.hc_sinkhorn_iters, config.hc_kind == "mhc")


def draft_stage_sizes(config: ModelConfig) -> tuple[V4AttentionSizes, MoESizes, HyperSizes]:
    """The sizes of one stage of a bundled draft: a sliding layer with a scored router and the draft's own experts."""
    attention = attention_sizes(config, 0)._replace(kind="sliding", ratio=0)
    moe = moe_sizes(config, 0)._replace(hashed=False)
    if config.dspark is not None:
        moe = moe._replace(num_experts=config.dspark.num_routed_experts, top_k=config.dspark.num_experts_per_tok)
    return attention, moe, hyper_sizes(config)


def rope_table(config: ModelConfig, rope: RopeConfig, num_positions: int, device: torch.device) -> RopeTable:
    """Tables of one kind of layer for ``num_positions`` positions."""
    yarn = rope.yarn and Yarn(
        rope.yarn.factor, rope.yarn.original_max_position, rope.yarn.beta_fast, rope.yarn.beta_slow
    )
    return build_rope_table(config.rope_dim, rope.theta, num_positions, yarn, device)


class Block:
    """One layer: attention and mixture of experts, each read from and written to the residual streams."""

    def __init__(
        self,
        source: Scope,
        attention: V4AttentionSizes,
        moe: MoESizes,
        hyper: HyperSizes,
        rope: RopeTable,
        groups: Groups,
        kernels: Kernels,
        layer: int,
        all_to_all: bool = False,
    ) -> None:
        self._layer = layer
        self._attn_hc = HyperConnection(source, "hc_attn", "attn_norm", hyper, kernels)
        self._ffn_hc = HyperConnection(source, "hc_ffn", "ffn_norm", hyper, kernels)
        self._attention = V4Attention(source.scope("attn"), attention, rope, groups.attn_tp, kernels, layer)
        self.moe = MoE(source.scope("ffn"), moe, groups, kernels, layer, all_to_all)

    @property
    def bound(self) -> dict[str, Bound]:
        """The operations of a sliding layer with a scored router, for :meth:`.Kernels.join`."""
        return {"attn_hc": self._attn_hc.bound, **self._attention.bound, "ffn_hc": self._ffn_hc.bound, **self.moe.bound}

    def stages(
        self,
        streams: torch.Tensor,
        ids: torch.Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        exchange: Exchange,
        probe: Probe,
    ) -> Stages[torch.Tensor]:
        """``streams`` [t, n, D] and token ids [t] of the rows here -> new streams; attention sees all T of its rank.

        Collective; yields wherever a collective is in flight, in the same places on every rank whatever the data.
        """
        mix = self._attn_hc.read(streams)
        x = exchange.for_attention(mix.x)
        y = yield from self._attention.stages(x, cache, plan, exchange.start_sum, probe)
        streams = self._attn_hc.write(streams, y, mix)
        mix = self._ffn_hc.read(streams)
        y = yield from self.moe.stages(mix.x, ids, exchange, probe)
        streams = self._ffn_hc.write(streams, y, mix)
        probe("streams", self._layer, streams)
        return streams


class Activations(NamedTuple):
    """What one pipeline stage hands to the next: ``streams`` [t, n, D] and ``taps`` [t, ...] of the layers so far."""

    streams: torch.Tensor
    taps: torch.Tensor


class DeepseekV4(Staged[Activations]):
    """The model on this rank: the layers of its pipeline stage.

    ``tap_layers``: layers whose output a draft wants to see, as ``tap_kind`` says. ``dispatch``: how rows reach their
    experts; ``experts``: where these are, None for whole blocks in order. The first stage embeds, the last has the
    head; with ``tap_layers`` the last embeds too, for the draft.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: ParamSource,
        groups: Groups,
        kernels: Kernels,
        max_context: int,
        device: torch.device,
        tap_layers: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        tap_kind: TapKind = "mean",
        dispatch: DispatchOptions = STANDARD,
        experts: PlacedExperts | None = None,
    ) -> None:
        super().__init__(placed(moe_sizes(config, 0), experts, 0), dispatch, groups, dtype, device)
        self.config, self._tap_layers, self._tap_kind = config, tap_layers, tap_kind
        self.layers = stage_layers(config.num_layers, groups.pp.size)[groups.pp.rank]
        self._experts = experts
        ropes = {
            "main": rope_table(config, config.main_rope, max_context, device),
            "compress": rope_table(config, config.compress_rope, max_context, device),
        }
        top, self._mean = Scope(source), kernels.bind("hc_mean")
        if self.is_first or (self.is_last and tap_layers):
            self.embed = VocabParallelEmbedding(top, "embed.weight", config.vocab_size, groups.attn_tp)
        self._blocks = [self._block(top, layer, ropes, groups, kernels) for layer in self.layers]
        if self.is_last:
            self._hyper_head = HyperHead(top, "hc_head", hyper_sizes(config), kernels)
            self._norm = RMSNorm(top, "norm", config.rms_norm_eps, kernels)
            self.head = ParallelLMHead(top, "head.weight", config.vocab_size, groups.attn_tp, kernels)

    def _block(self, top: Scope, layer: int, ropes: dict[str, RopeTable], groups: Groups, kernels: Kernels) -> Block:
        attention = attention_sizes(self.config, layer)
        rope = ropes["main" if attention.kind == "sliding" else "compress"]
        sizes = (attention, self._moe_sizes(layer), hyper_sizes(self.config))
        travels = self.dispatchers[0].all_to_all
        return Block(top.scope(f"layers.{layer}"), *sizes, rope, groups, kernels, layer, travels)

    def _moe_sizes(self, layer: int) -> MoESizes:
        return placed(moe_sizes(self.config, layer), self._experts, layer)

    @property
    def expert_layers(self) -> tuple[MoE, ...]:
        """The layers with experts on this stage, in order."""
        return tuple(block.moe for block in self._blocks)

    @property
    def num_taps_before(self) -> int:
        """Tapped layers of earlier stages."""
        return sum(layer < self.layers.start for layer in self._tap_layers)

    def pack(self, after: Activations) -> torch.Tensor:
        """See :meth:`.staged.Staged.pack`: [t, n D + taps]."""
        return torch.cat((after.streams.flatten(1), after.taps), dim=1)

    def unpack(self, packed: torch.Tensor) -> Activations:
        """See :meth:`.staged.Staged.unpack`."""
        width = self.config.hc_mult * self.config.hidden_size
        streams = packed[:, :width].unflatten(1, (self.config.hc_mult, self.config.hidden_size))
        return Activations(streams.contiguous(), packed[:, width:])

    def packed_width(self) -> int:
        """See :meth:`.staged.Staged.packed_width`."""
        streams_per_tap = self.config.hc_mult if self._tap_kind == "streams" else 1
        return (self.config.hc_mult + self.num_taps_before * streams_per_tap) * self.config.hidden_size

    def begin(self, part: Part) -> Activations:
        """See :meth:`.staged.Staged.begin`."""
        embedded = part.exchange.own(self.embed(part.step.tokens))
        streams = spread(embedded, self.config.hc_mult)
        return Activations(streams, streams.new_empty(streams.shape[0], 0))

    def stages(self, part: Part, cache: Cache, before: Activations, probe: Probe = ignore) -> Stages[Activations]:
        """See :meth:`.staged.Staged.stages` and :meth:`Block.stages`."""
        step, exchange = part
        ids, streams, taps = exchange.own(step.tokens), before.streams, [before.taps]
        for layer, block, layer_cache in zip(self.layers, self._blocks, cache.layers):
            streams = yield from block.stages(streams, ids, layer_cache, step.plan, exchange, probe)
            if layer in self._tap_layers:
                taps.append(self._mean(streams) if self._tap_kind == "mean" else streams.flatten(1))
        return Activations(streams, torch.cat(taps, dim=1) if len(taps) > 1 else taps[0])

    def finish(self, part: Part, last: Activations, probe: Probe = ignore) -> ModelOutput:
        """See :meth:`.staged.Staged.finish`."""
        step, exchange = part
        hidden = exchange.for_attention(self._norm(self._hyper_head(last.streams)))
        hidden = step.gather_logit_rows(hidden if step.logit_rows is None else hidden[step.logit_rows])
        probe("final_norm", self.config.num_layers, hidden)
        taps = exchange.for_attention(last.taps) if self._tap_layers else last.taps
        return ModelOutput(self.head(hidden), taps)
