"""DeepSeek-V4: sliding, CSA and HCA attention, mHC residual streams, and a mixture of experts in every layer.

Legend: T rows of a step, n residual streams, D hidden width, N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple, TypeVar

import torch

from ...comm.dp_attention import TokenExchange
from ...layers.attention.plan import AttentionPlan, LayerCache
from ...layers.attention.v4 import V4Attention, V4AttentionSizes
from ...layers.embedding import ParallelLMHead, VocabParallelEmbedding
from ...layers.hyper_connection import HyperConnection, HyperHead, HyperSizes
from ...layers.kernels import Kernels
from ...layers.moe import MoE, MoESizes
from ...layers.norm import RMSNorm
from ...layers.params import ParamSource, Scope
from ...layers.probe import Probe, ignore
from ...layers.rope import RopeTable, Yarn, build_rope_table
from ...parallel.groups import Groups
from ..cache import Cache
from ..model_config import ModelConfig, RopeConfig
from ..step import Step

T = TypeVar("T")


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


def drain(stages: Generator[None, None, T]) -> T:
    """Run stages one after the other, without overlap, and return their result."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            return end.value


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
    ) -> None:
        self._layer = layer
        self._attn_hc = HyperConnection(source, "hc_attn", "attn_norm", hyper, kernels)
        self._ffn_hc = HyperConnection(source, "hc_ffn", "ffn_norm", hyper, kernels)
        self._attention = V4Attention(source.scope("attn"), attention, rope, groups.attn_tp, kernels, layer)
        self._moe = MoE(source.scope("ffn"), moe, groups.tp, groups.moe_ep, groups.moe_tp, kernels, layer)

    def stages(
        self,
        streams: torch.Tensor,
        ids: torch.Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        exchange: TokenExchange,
        probe: Probe,
    ) -> Generator[None, None, torch.Tensor]:
        """``streams`` [T, n, D], token ids of all rows of the tp group [M] -> new streams.

        Collective; yields wherever a collective is in flight, in the same places on every rank whatever the data.
        """
        mix = self._attn_hc.read(streams)
        y = yield from self._attention.stages(mix.x, cache, plan, probe)
        streams = self._attn_hc.write(streams, y, mix)
        mix = self._ffn_hc.read(streams)
        y = yield from self._moe.stages(mix.x, ids, exchange, probe)
        streams = self._ffn_hc.write(streams, y, mix)
        probe("streams", self._layer, streams)
        return streams


class ModelOutput(NamedTuple):
    """``logits`` float32 [N, V], equal on every rank of the attention block. ``taps`` [T, len(ids) * D]: the mean of
    the streams after each tapped layer, side by side, or None when no layer is tapped."""

    logits: torch.Tensor
    taps: torch.Tensor | None


class DeepseekV4:
    """The model on this rank. ``tap_layers``: layers whose stream means a draft wants to see."""

    def __init__(
        self,
        config: ModelConfig,
        source: ParamSource,
        groups: Groups,
        kernels: Kernels,
        max_context: int,
        device: torch.device,
        tap_layers: tuple[int, ...] = (),
    ) -> None:
        self.config, self._groups, self._tap_layers = config, groups, tap_layers
        ropes = {
            "main": rope_table(config, config.main_rope, max_context, device),
            "compress": rope_table(config, config.compress_rope, max_context, device),
        }
        top = Scope(source)
        self.embed = VocabParallelEmbedding(top, "embed.weight", config.vocab_size, groups.attn_tp)
        self._blocks = [self._block(top, layer, ropes, groups, kernels) for layer in range(config.num_layers)]
        self._hyper_head = HyperHead(top, "hc_head", hyper_sizes(config), kernels)
        self._norm = RMSNorm(top, "norm", config.rms_norm_eps, kernels)
        self.head = ParallelLMHead(top, "head.weight", config.vocab_size, groups.attn_tp, kernels)

    def _block(self, top: Scope, layer: int, ropes: dict[str, RopeTable], groups: Groups, kernels: Kernels) -> Block:
        attention = attention_sizes(self.config, layer)
        rope = ropes["main" if attention.kind == "sliding" else "compress"]
        sizes = (attention, moe_sizes(self.config, layer), hyper_sizes(self.config))
        return Block(top.scope(f"layers.{layer}"), *sizes, rope, groups, kernels, layer)

    def stages(self, step: Step, cache: Cache, probe: Probe = ignore) -> Generator[None, None, ModelOutput]:
        """The forward of ``step`` as stages, see :meth:`Block.stages`; the step's rows are stored in ``cache``."""
        streams = self.embed(step.tokens).unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        exchange = TokenExchange(self._groups, step.counts, step.padding, step.tokens.device)
        ids, taps = exchange.gather(step.tokens), []
        for layer, block in enumerate(self._blocks):
            streams = yield from block.stages(streams, ids, cache.layers[layer], step.plan, exchange, probe)
            if layer in self._tap_layers:
                taps.append(streams.mean(dim=1))
        if step.logit_rows is not None:
            streams = streams[step.logit_rows]
        hidden = step.gather_logit_rows(self._norm(self._hyper_head(streams)))
        probe("final_norm", self.config.num_layers, hidden)
        return ModelOutput(self.head(hidden), torch.cat(taps, dim=-1) if taps else None)

    @torch.inference_mode()
    def forward(self, step: Step, cache: Cache, probe: Probe = ignore) -> ModelOutput:
        """The forward of ``step`` without overlap. Collective."""
        return drain(self.stages(step, cache, probe))
