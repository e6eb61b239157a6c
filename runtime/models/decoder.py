"""A plain decoder: pre-norm layers with one residual stream, whatever their attention and feed-forward kinds.

Legend: T rows of a step, t of them that layers outside attention work on here (see :class:`Exchange`), D hidden width,
N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...comm.dispatch import DispatchOptions, Exchange
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
from ...layers.stages import Stages
from ...parallel.groups import Groups
from ...parallel.pipeline import stage_layers
from ..balance.placement import PlacedExperts
from ..cache import Cache
from .base import STANDARD, ModelOutput, placed
from .decoder_config import DecoderConfig
from .staged import Part, Staged


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
        self.attention = make_attention(source.scope("attn"), attention, rope, groups.attn_tp, kernels, layer)
        scope = source.scope("ffn")
        self._mlp = self.moe = None
        if isinstance(ffn, MLPSizes):
            self._mlp = MLP(scope, ffn, groups.attn_tp, kernels)
        else:
            self.moe = MoE(scope, ffn, groups, kernels, layer, all_to_all)

    def keys(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The rows [T, c] that latent attention keeps of residual rows ``x`` [T, D] at ``positions`` [T]."""
        return self.attention.kept(self._attn_norm(x), positions)

    def stages(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        exchange: Exchange,
        probe: Probe,
    ) -> Stages[torch.Tensor]:
        """Residual ``x`` [t, D] and token ids [t] of the rows here -> the new residual; attention and dense layers see
        all T rows of their rank.

        Collective; yields wherever a collective is in flight, in the same places on every rank whatever the data.
        """
        rows = exchange.for_attention(self._attn_norm(x))
        y = yield from self.attention.stages(rows, cache, plan, exchange.start_sum, probe)
        x = x + y
        rows = self._ffn_norm(x)
        if self._mlp is not None:
            y = yield from self._mlp.stages(exchange.for_attention(rows), exchange.start_sum)
        else:
            y = yield from self.moe.stages(rows, ids, exchange, probe)
        x = x + y
        probe("residual", self._layer, x)
        return x


class Activations(NamedTuple):
    """What one pipeline stage hands to the next: the residual ``x`` [t, D] and ``taps`` [t, ...] of the layers so
    far."""

    x: torch.Tensor
    taps: torch.Tensor


class Decoder(Staged[Activations]):
    """See :class:`.base.Model`. ``tap_layers``: layers whose output a draft wants to see; ``dispatch``: how rows reach
    their experts; ``experts``: where these are."""

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
        experts: PlacedExperts | None = None,
    ) -> None:
        super().__init__(config.routed and placed(config.routed, experts, 0), dispatch, groups, dtype, device)
        self.config, self._tap_layers = config, tap_layers
        self.layers = stage_layers(config.num_layers, groups.pp.size)[groups.pp.rank]
        rope, top = rope_of(config, max_context, device), Scope(source)
        if self.is_first or (self.is_last and tap_layers):
            self.embed = VocabParallelEmbedding(top, "embed.weight", config.vocab_size, groups.attn_tp)
        self.blocks = []
        for layer in self.layers:
            ffn = config.ffn[layer]
            if isinstance(ffn, MoESizes):
                ffn = placed(ffn, experts, sum(isinstance(one, MoESizes) for one in config.ffn[:layer]))
            sizes = (config.attention[layer], ffn, config.rms_norm_eps)
            place = (rope, groups, kernels, layer, self.dispatchers[0].all_to_all)
            self.blocks.append(DecoderLayer(top.scope(f"layers.{layer}"), *sizes, *place))
        self.expert_layers = tuple(block.moe for block in self.blocks if block.moe is not None)
        if self.is_last:
            self.norm = RMSNorm(top, "norm", config.rms_norm_eps, kernels)
            self.head = ParallelLMHead(top, config.head_name, config.vocab_size, groups.attn_tp, kernels)

    def pack(self, after: Activations) -> torch.Tensor:
        """See :meth:`.staged.Staged.pack`."""
        return torch.cat(after, dim=1)

    def unpack(self, packed: torch.Tensor) -> Activations:
        """See :meth:`.staged.Staged.unpack`."""
        width = self.config.hidden_size
        return Activations(packed[:, :width].contiguous(), packed[:, width:])

    def packed_width(self) -> int:
        """See :meth:`.staged.Staged.packed_width`."""
        return self.config.hidden_size * (1 + sum(layer < self.layers.start for layer in self._tap_layers))

    def begin(self, part: Part) -> Activations:
        """See :meth:`.staged.Staged.begin`."""
        x = part.exchange.own(self.embed(part.step.tokens))
        return Activations(x, x.new_empty(x.shape[0], 0))

    def stages(self, part: Part, cache: Cache, before: Activations, probe: Probe = ignore) -> Stages[Activations]:
        """See :meth:`.staged.Staged.stages` and :meth:`DecoderLayer.stages`."""
        step, exchange = part
        ids, x, taps = exchange.own(step.tokens), before.x, [before.taps]
        for layer, block, layer_cache in zip(self.layers, self.blocks, cache.layers):
            x = yield from block.stages(x, ids, layer_cache, step.plan, exchange, probe)
            if layer in self._tap_layers:
                taps.append(x)
        return Activations(x, torch.cat(taps, dim=1) if len(taps) > 1 else taps[0])

    def finish(self, part: Part, last: Activations, probe: Probe = ignore) -> ModelOutput:
        """See :meth:`.staged.Staged.finish`."""
        step, exchange = part
        x = exchange.for_attention(self.norm(last.x))
        x = step.gather_logit_rows(x if step.logit_rows is None else x[step.logit_rows])
        return ModelOutput(self.head(x), exchange.for_attention(last.taps) if self._tap_layers else last.taps)
