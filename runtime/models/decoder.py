"""A plain decoder: pre-norm layers with one residual stream, whatever their attention and feed-forward kinds.

Legend: T rows of a step, D hidden width, N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import torch

from ...comm.dp_attention import TokenExchange
from ...comm.pipeline import StageLink
from ...layers.attention import AttentionSizes, make_attention
from ...layers.attention.plan import AttentionPlan, LayerCache
from ...layers.embedding import ParallelLMHead, VocabParallelEmbedding
from ...layers.kernels import Kernels
from ...layers.mlp import MLP, MLPSizes
from ...layers.moe import MoE, MoESizes
from ...layers.norm import RMSNorm
from ...layers.params import ParamSource, Scope
from ...layers.probe import Probe, ignore
from ...layers.rope import RopeTable, build_rope_table
from ...parallel.groups import Groups
from ...parallel.pipeline import stage_layers
from ..cache import Cache
from ..step import Step
from .base import ModelOutput, drain
from .decoder_config import DecoderConfig


def rope_of(config: DecoderConfig, num_positions: int, device: torch.device) -> RopeTable:
    """The rotary tables of ``config``'s layers."""
    rope, rope_dim = config.rope, config.attention[0].rope_dim
    return build_rope_table(rope_dim, rope.theta, num_positions, rope.scaling, device, rope.magnitude)


class DecoderLayer:
    """Attention, then feed-forward, each added to the residual."""

    def __init__(
        self,
        source: Scope,
        attention: AttentionSizes,
        ffn: MLPSizes | MoESizes,
        eps: float,
        rope: RopeTable,
        groups: Groups,
        kernels: Kernels,
        layer: int,
    ) -> None:
        self._layer = layer
        self._attn_norm = RMSNorm(source, "attn_norm", eps, kernels)
        self._ffn_norm = RMSNorm(source, "ffn_norm", eps, kernels)
        self._attention = make_attention(source.scope("attn"), attention, rope, groups.attn_tp, kernels, layer)
        scope = source.scope("ffn")
        self._mlp = self._moe = None
        if isinstance(ffn, MLPSizes):
            self._mlp = MLP(scope, ffn, groups.attn_tp, kernels)
        else:
            self._moe = MoE(scope, ffn, groups.tp, groups.moe_ep, groups.moe_tp, kernels, layer)

    def stages(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        exchange: TokenExchange,
        probe: Probe,
    ) -> Generator[None, None, torch.Tensor]:
        """Residual ``x`` [T, D], token ids of all rows of the tp group [M] -> the new residual.

        Collective; yields wherever a collective is in flight, in the same places on every rank whatever the data.
        """
        y = yield from self._attention.stages(self._attn_norm(x), cache, plan, probe)
        x = x + y
        rows = self._ffn_norm(x)
        if self._mlp is not None:
            y = yield from self._mlp.stages(rows)
        else:
            y = yield from self._moe.stages(rows, ids, exchange, probe)
        x = x + y
        probe("residual", self._layer, x)
        return x


class Activations(NamedTuple):
    """What one pipeline stage hands to the next: the residual ``x`` [T, D] and ``taps`` [T, ...] of the layers so
    far."""

    x: torch.Tensor
    taps: torch.Tensor


class Decoder:
    """See :class:`.base.Model`. ``tap_layers``: layers whose output a draft wants to see."""

    def __init__(
        self,
        config: DecoderConfig,
        source: ParamSource,
        groups: Groups,
        kernels: Kernels,
        max_context: int,
        device: torch.device,
        tap_layers: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self._groups, self._tap_layers, self._dtype = config, groups, tap_layers, dtype
        self.layers = stage_layers(config.num_layers, groups.pp.size)[groups.pp.rank]
        self.is_first, self.is_last = groups.pp.rank == 0, groups.pp.rank == groups.pp.size - 1
        rope, top = rope_of(config, max_context, device), Scope(source)
        if self.is_first or (self.is_last and tap_layers):
            self.embed = VocabParallelEmbedding(top, "embed.weight", config.vocab_size, groups.attn_tp)
        self._blocks = []
        for layer in self.layers:
            sizes = (config.attention[layer], config.ffn[layer], config.rms_norm_eps)
            self._blocks.append(DecoderLayer(top.scope(f"layers.{layer}"), *sizes, rope, groups, kernels, layer))
        if self.is_last:
            self.norm = RMSNorm(top, "norm", config.rms_norm_eps, kernels)
            self.head = ParallelLMHead(top, config.head_name, config.vocab_size, groups.attn_tp, kernels)

    def begin(self, step: Step) -> Activations:
        """The activations before the first layer, on the first stage. Collective over attn_tp."""
        x = self.embed(step.tokens)
        return Activations(x, x.new_empty(x.shape[0], 0))

    def stages(
        self, step: Step, cache: Cache, before: Activations, probe: Probe = ignore
    ) -> Generator[None, None, Activations]:
        """This rank's layers as stages, see :meth:`DecoderLayer.stages`; the step's rows are stored in ``cache``."""
        exchange = TokenExchange(self._groups, step.counts, step.padding, step.tokens.device)
        ids, x, taps = exchange.gather(step.tokens), before.x, [before.taps]
        for layer, block, layer_cache in zip(self.layers, self._blocks, cache.layers):
            x = yield from block.stages(x, ids, layer_cache, step.plan, exchange, probe)
            if layer in self._tap_layers:
                taps.append(x)
        return Activations(x, torch.cat(taps, dim=1) if len(taps) > 1 else taps[0])

    def finish(self, step: Step, last: Activations) -> ModelOutput:
        """Logits of the wanted rows, on the last stage. Collective over attn_tp (and attn_cp where rows are split)."""
        x = last.x if step.logit_rows is None else last.x[step.logit_rows]
        return ModelOutput(self.head(step.gather_logit_rows(self.norm(x))), last.taps)

    @torch.inference_mode()
    def forward(self, step: Step, cache: Cache, probe: Probe = ignore) -> ModelOutput:
        """See :meth:`.base.Model.forward`."""
        assert self.is_first and self.is_last, "a pipeline runs its stages one by one"
        return self.finish(step, drain(self.stages(step, cache, self.begin(step), probe)))

    @torch.inference_mode()
    def run_stage(self, step: Step, cache: Cache, link: StageLink) -> ModelOutput | None:
        """See :meth:`.base.Model.run_stage`."""
        width = self.config.hidden_size
        if self.is_first:
            before = self.begin(step)
        else:
            num_taps = sum(layer < self.layers.start for layer in self._tap_layers)
            shape = (step.tokens.shape[0], width * (1 + num_taps))
            packed = link.receive(shape, self._dtype, step.tokens.device)
            before = Activations(packed[:, :width].contiguous(), packed[:, width:])
        after = drain(self.stages(step, cache, before))
        if self.is_last:
            return self.finish(step, after)
        link.send(torch.cat(after, dim=1))
        return None
