"""The multi-token prediction layer of a DeepSeek-V3 or V3.2 checkpoint, run on its own output to draft several tokens.

Legend: K rows, D hidden width, V vocabulary.

A row joins the embedding of the token at p + 1 with the target's state at p, behind the target's final norm:
``eh_proj([enorm(embedding); hnorm(state)])``; then comes a layer like the target's last, a norm, and the target's head.
What the layer gives behind that norm is the state of the next row.
"""

from __future__ import annotations

import torch

from ...comm.dispatch import Exchange, StepRows
from ...layers.attention.plan import AttentionPlan
from ...layers.kernels import Kernels
from ...layers.linear import MergedLinear, Part
from ...layers.moe import MoESizes
from ...layers.norm import RMSNorm
from ...layers.params import ParamSource, Scope
from ...layers.probe import ignore
from ...layers.stages import drain
from ...parallel.groups import Groups
from ..models.base import placed
from ..models.decoder import Decoder, DecoderLayer, rope_of
from ..models.decoder_config import DecoderConfig
from ..models.staged import dispatcher_for
from . import OWN_PREDICTION
from .base import DraftRoom
from .feature_chain import MAX_GAMMA, FeatureChain


class MTPV3Drafter(FeatureChain):
    """See :class:`.base.Drafter`. The layer was trained for one token."""

    usual = 1

    def __init__(
        self,
        config: DecoderConfig,
        source: ParamSource,
        target: Decoder,
        groups: Groups,
        kernels: Kernels,
        room: DraftRoom,
        gamma: int,
    ) -> None:
        sizes, hidden, eps = config.attention[-1], config.hidden_size, config.rms_norm_eps
        super().__init__(target, groups, kernels, room, gamma, sizes.cache(groups.attn_tp.size), hidden)
        self._groups, scope = groups, Scope(source).scope("mtp.0")
        rope = rope_of(config, room.max_context + MAX_GAMMA, target.head.weight.device)
        names = ("enorm", "hnorm", "shared_head.norm")
        self._embed_norm, self._hidden_norm, self._norm = (RMSNorm(scope, name, eps, kernels) for name in names)
        self._in = MergedLinear(scope, [Part("eh_proj.weight", 0, hidden)], kernels)
        weight = target.head.weight
        self._dispatcher = dispatcher_for(config.routed, target.dispatch, groups, weight.dtype, weight.device)
        place = (rope, groups, kernels, config.num_layers, self._dispatcher.all_to_all)
        ffn = config.ffn[-1]
        if isinstance(ffn, MoESizes):
            ffn = placed(ffn, room.experts, 0)
        self._layer = DecoderLayer(scope, sizes, ffn, eps, *place)
        if self._layer.moe is not None:
            self.expert_layers = (self._layer.moe,)

    @classmethod
    def tap_layers(cls, config: DecoderConfig) -> tuple[int, ...]:
        """See :meth:`.base.Drafter.tap_layers`: the last layer."""
        if OWN_PREDICTION.get(config.model_type) != "mtp_v3" or config.num_nextn_predict_layers != 1:
            raise ValueError(
                "the draft mtp_v3 needs a deepseek_v3 or deepseek_v32 model with 1 prediction layer; this is "
                f"{config.model_type} with {config.num_nextn_predict_layers}"
            )
        return (config.num_layers - 1,)

    @classmethod
    def load(
        cls,
        config: DecoderConfig,
        source: ParamSource,
        target: Decoder,
        groups: Groups,
        kernels: Kernels,
        room: DraftRoom,
        gamma: int | None,
    ) -> MTPV3Drafter:
        """See :meth:`.base.Drafter.load`."""
        return cls(config, source, target, groups, kernels, room, cls.block_length(config, gamma))

    def features(self, taps: torch.Tensor) -> torch.Tensor:
        """See :meth:`.feature_chain.FeatureChain.features`."""
        return self.target.norm(taps)

    def _join(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        embedded = self._embed_norm(self.target.embed(tokens))
        return self._in(torch.cat((embedded, self._hidden_norm(features)), dim=1))

    def keys(self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See :meth:`.feature_chain.FeatureChain.keys`."""
        return self._layer.keys(self._join(tokens, features), positions)

    def forward(
        self, tokens: torch.Tensor, features: torch.Tensor, plan: AttentionPlan, counts: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`.feature_chain.FeatureChain.forward`."""
        exchange = Exchange(self._groups, self._dispatcher, StepRows(counts, has_prefill=False))
        x, ids = exchange.own(self._join(tokens, features)), exchange.own(tokens)
        x = drain(self._layer.stages(x, ids, self.cache.layers[0], plan, exchange, ignore))
        x = self._norm(exchange.for_attention(x))
        return x, self.target.head(x)
