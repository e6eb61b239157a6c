"""A plain decoder: pre-norm layers with one residual stream, whatever their attention and feed-forward kinds.

Legend: T rows of a step, t of them that layers outside attention work on here (see :class:`Exchange`), D hidden width,
N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import torch

from ...comm.dispatch import DispatchOptions, Exchange, StepRows
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
from .base import STANDARD, ModelOutput, dispatcher_for, drain
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
        all_to_all: bool,
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
            self._moe = MoE(scope, ffn, groups, kernels, layer, all_to_all)

    def stages(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        exchange: Exchange,
        probe: Probe,
    ) -> Generator[None, None, torch.Tensor]:
        """Residual ``x`` [t, D] and token ids [t] of the rows here -> the new residual; attention and dense layers see
        all T rows of their rank.

        Collective; yields wherever a collective is in flight, in the same places on every rank whatever the data.
        """
        rows = exchange.for_attention(self._attn_norm(x))
        y = yield from self._attention.stages(rows, cache, plan, exchange.start_sum, probe)
        x = x + y
        rows = self._ffn_norm(x)
        if self._mlp is not None:
            y = yield from self._mlp.stages(exchange.for_attention(rows), exchange.start_sum)
        else:
            y = yield from self._moe.stages(rows, ids, exchange, probe)
        x = x + y
        probe("residual", self._layer, x)
        return x


class Activations(NamedTuple):
    """What one pipeline stage hands to the next: the residual ``x`` [t, D] and ``taps`` [t, ...] of the layers so
    far."""

    x: torch.Tensor
    taps: torch.Tensor


class Decoder:
    """See :class:`.base.Model`. ``tap_layers``: layers whose output a draft wants to see; ``dispatch``: how rows reach
    their experts."""

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
        dispatch: DispatchOptions = STANDARD,
    ) -> None:
        self.config, self._groups, self._tap_layers, self._dtype = config, groups, tap_layers, dtype
        self.dispatch, self._dispatcher = dispatch, dispatcher_for(config.routed, dispatch, groups, dtype, device)
        self.layers = stage_layers(config.num_layers, groups.pp.size)[groups.pp.rank]
        self.is_first, self.is_last = groups.pp.rank == 0, groups.pp.rank == groups.pp.size - 1
        rope, top = rope_of(config, max_context, device), Scope(source)
        if self.is_first or (self.is_last and tap_layers):
            self.embed = VocabParallelEmbedding(top, "embed.weight", config.vocab_size, groups.attn_tp)
        self._blocks = []
        for layer in self.layers:
            sizes = (config.attention[layer], config.ffn[layer], config.rms_norm_eps)
            place = (rope, groups, kernels, layer, self._dispatcher.all_to_all)
            self._blocks.append(DecoderLayer(top.scope(f"layers.{layer}"), *sizes, *place))
        if self.is_last:
            self.norm = RMSNorm(top, "norm", config.rms_norm_eps, kernels)
            self.head = ParallelLMHead(top, config.head_name, config.vocab_size, groups.attn_tp, kernels)

    def exchange(self, step: Step) -> Exchange:
        """The rows of ``step`` between attention and experts. Raises ``ValueError`` for more rows than fit at once."""
        return Exchange(self._groups, self._dispatcher, StepRows(step.counts, step.has_prefill))

    def begin(self, step: Step, exchange: Exchange) -> Activations:
        """The activations before the first layer, on the first stage. Collective over attn_tp."""
        x = exchange.own(self.embed(step.tokens))
        return Activations(x, x.new_empty(x.shape[0], 0))

    def stages(
        self, step: Step, cache: Cache, exchange: Exchange, before: Activations, probe: Probe = ignore
    ) -> Generator[None, None, Activations]:
        """This rank's layers as stages, see :meth:`DecoderLayer.stages`; the step's rows are stored in ``cache``."""
        ids, x, taps = exchange.own(step.tokens), before.x, [before.taps]
        for layer, block, layer_cache in zip(self.layers, self._blocks, cache.layers):
            x = yield from block.stages(x, ids, layer_cache, step.plan, exchange, probe)
            if layer in self._tap_layers:
                taps.append(x)
        return Activations(x, torch.cat(taps, dim=1) if len(taps) > 1 else taps[0])

    def finish(self, step: Step, exchange: Exchange, last: Activations) -> ModelOutput:
        """Logits of the wanted rows, on the last stage. Collective over attn_tp (and attn_cp where rows are split)."""
        x = exchange.for_attention(self.norm(last.x))
        x = step.gather_logit_rows(x if step.logit_rows is None else x[step.logit_rows])
        return ModelOutput(self.head(x), exchange.for_attention(last.taps) if self._tap_layers else last.taps)

    @torch.inference_mode()
    def forward(self, step: Step, cache: Cache, probe: Probe = ignore) -> ModelOutput:
        """See :meth:`.base.Model.forward`."""
        assert self.is_first and self.is_last, "a pipeline runs its stages one by one"
        exchange = self.exchange(step)
        after = drain(self.stages(step, cache, exchange, self.begin(step, exchange), probe))
        return self.finish(step, exchange, after)

    @torch.inference_mode()
    def run_stage(self, step: Step, cache: Cache, link: StageLink) -> ModelOutput | None:
        """See :meth:`.base.Model.run_stage`."""
        exchange, width = self.exchange(step), self.config.hidden_size
        if self.is_first:
            before = self.begin(step, exchange)
        else:
            num_rows = step.tokens.shape[0] if exchange.num_rows is None else exchange.num_rows
            num_taps = sum(layer < self.layers.start for layer in self._tap_layers)
            packed = link.receive((num_rows, width * (1 + num_taps)), self._dtype, step.tokens.device)
            before = Activations(packed[:, :width].contiguous(), packed[:, width:])
        after = drain(self.stages(step, cache, exchange, before))
        if self.is_last:
            return self.finish(step, exchange, after)
        link.send(torch.cat(after, dim=1))
        return None
