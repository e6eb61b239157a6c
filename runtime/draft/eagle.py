"""EAGLE-1, whose weights EAGLE-2 uses as well: one layer on the target's own features, without norms before or behind.

Legend: K rows, D hidden width, V vocabulary.

A row at position p joins the embedding of the token at p + 1 with the target's state at p behind its final norm:
``fc([embedding; state])``. That goes unnormed into the attention of a decoder layer; what the layer gives is read by
the target's head as it is, and is the state of the next row. EAGLE-2 grows a tree from it (``--tree dynamic``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ...layers.attention.gqa import GQASizes, GQAttention
from ...layers.attention.plan import AttentionPlan
from ...layers.embedding import VocabParallelEmbedding
from ...layers.kernels import Kernels
from ...layers.linear import MergedLinear, Part
from ...layers.mlp import MLP
from ...layers.norm import RMSNorm
from ...layers.params import ParamSource, Scope
from ...layers.probe import ignore
from ...layers.stages import drain
from ...parallel.groups import Groups
from ..checkpoint.config_file import or_default
from ..checkpoint.config_keys import ConfigKeys
from ..models.decoder import Decoder, rope_of
from ..models.decoder_config import DecoderConfig
from ..models.decoder_spec import Parts, block_parts
from .base import DraftRoom
from .feature_chain import MAX_GAMMA, FeatureChain
from .files import DraftFiles, StoredDraft, check_copies, check_target, open_draft, read_layers, stored_draft
from .pages import lone_exchange

LAYER = "layers.0."


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """``layers``: the one layer; ``has_bias``: of ``fc``."""

    layers: DecoderConfig
    has_bias: bool

    @classmethod
    def read(cls, files: DraftFiles) -> EagleConfig:
        """From ``config.json``, which looks like a model's of one layer; ``bias`` is true unless it says so."""
        if files.target.model_type == "deepseek_v4":
            raise ValueError("an EAGLE draft reads one state of a token, but a deepseek_v4 target has several streams")
        keys = ConfigKeys(files.keys, "the draft's config.json")
        layers = read_layers(keys, 1)
        check_target(keys, layers, files.target)
        if layers.num_layers != 1:
            raise keys.error(f"num_hidden_layers is {layers.num_layers}, but EAGLE drafts have 1 layer")
        return cls(layers, or_default(keys.optional_bool("bias"), True))

    def stored(self) -> StoredDraft:
        """The tensors of the folder."""
        hidden, vocab = self.layers.hidden_size, self.layers.vocab_size
        parts: Parts = {"fc.weight": ((hidden, 2 * hidden), "linear")}
        if self.has_bias:
            parts["fc.bias"] = ((hidden,), "plain")
        parts |= dict.fromkeys(("embed.weight", "head.weight"), ((vocab, hidden), "plain"))
        layer = block_parts(hidden, self.layers.attention[0], self.layers.ffn[0])
        del layer["attn_norm.weight"]
        parts |= {LAYER + name: part for name, part in layer.items()}
        return stored_draft(parts, {name: name for name in ("embed.weight", "head.weight")})


class EagleDrafter(FeatureChain):
    """See :class:`.base.Drafter`."""

    usual = 5

    def __init__(
        self,
        config: EagleConfig,
        source: ParamSource,
        has_embedding: bool,
        target: Decoder,
        groups: Groups,
        kernels: Kernels,
        room: DraftRoom,
        gamma: int,
    ) -> None:
        layers, top = config.layers, Scope(source)
        sizes: GQASizes = layers.attention[0]
        super().__init__(target, groups, kernels, room, gamma, sizes.cache(groups.attn_tp.size), layers.hidden_size)
        self._groups, scope = groups, top.scope("layers.0")
        rope = rope_of(layers, room.max_context + MAX_GAMMA, target.head.weight.device)
        self._fc = MergedLinear(top, [Part("fc.weight", 0, layers.hidden_size)], kernels)
        self._bias = top.take("fc.bias") if config.has_bias else None
        self._ffn_norm = RMSNorm(scope, "ffn_norm", layers.rms_norm_eps, kernels)
        self._attention = GQAttention(scope.scope("attn"), sizes, rope, groups.attn_tp, kernels, 0)
        self._mlp = MLP(scope.scope("ffn"), layers.ffn[0], groups.attn_tp, kernels)
        self._embed = target.embed
        if has_embedding:
            self._embed = VocabParallelEmbedding(top, "embed.weight", layers.vocab_size, groups.attn_tp)

    @classmethod
    def tap_layers(cls, config: Any) -> tuple[int, ...]:
        """See :meth:`.base.Drafter.tap_layers`: the last layer."""
        EagleConfig.read(config)
        return (config.target.num_layers - 1,)

    @classmethod
    def load(
        cls,
        config: DraftFiles,
        source: ParamSource,
        target: Decoder,
        groups: Groups,
        kernels: Kernels,
        room: DraftRoom,
        gamma: int | None,
    ) -> EagleDrafter:
        """See :meth:`.base.Drafter.load`. Raises ``ValueError`` if a head in the folder is not the target's."""
        own, weight = EagleConfig.read(config), target.head.weight
        source, reader = open_draft(config, own.stored(), weight.dtype, weight.device)
        check_copies(reader, source, target, ("head.weight",))
        length, has_embedding = cls.block_length(config, gamma), "embed.weight" in reader
        return cls(own, source, has_embedding, target, groups, kernels, room, length)

    def features(self, taps: torch.Tensor) -> torch.Tensor:
        """See :meth:`.feature_chain.FeatureChain.features`."""
        return self.target.norm(taps)

    def _join(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        rows = self._fc(torch.cat((self._embed(tokens), features), dim=1))
        return rows if self._bias is None else rows + self._bias

    def keys(self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See :meth:`.feature_chain.FeatureChain.keys`."""
        return self._attention.project(self._join(tokens, features), positions).rows

    def forward(
        self, tokens: torch.Tensor, features: torch.Tensor, plan: AttentionPlan, counts: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`.feature_chain.FeatureChain.forward`."""
        x = self._join(tokens, features)
        start_sum = lone_exchange(self._groups, len(tokens), x.dtype, x.device).start_sum
        x = x + drain(self._attention.stages(x, self.cache.layers[0], plan, start_sum, ignore))
        x = x + drain(self._mlp.stages(self._ffn_norm(x), start_sum))
        return x, self.target.head(x)
