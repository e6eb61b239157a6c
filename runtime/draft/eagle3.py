"""EAGLE-3: one layer over the joined outputs of several target layers, with a head of its own, maybe over few tokens.

Legend: K rows, D hidden width, m tapped layers, V and V_d vocabulary of the target and of the draft.

Input of the layer: [norm(embedding); norm(h)], 2 D wide; the residual is h alone. h is ``fc`` of the tapped layers at
the first row of a chain and the layer's own output, before its final norm, behind that. A draft over V_d tokens has
offsets ``d2t``: its token i is the target's i + d2t[i].
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ...layers.attention.gqa import GQASizes, GQAttention
from ...layers.attention.plan import AttentionPlan
from ...layers.embedding import ParallelLMHead, VocabParallelEmbedding
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
from ..model_config import within
from ..models.base import Model
from ..models.decoder import rope_of
from ..models.decoder_config import DecoderConfig
from ..models.decoder_spec import Parts, block_parts
from .base import DraftRoom
from .feature_chain import MAX_GAMMA, FeatureChain
from .files import DraftFiles, StoredDraft, check_target, open_draft, read_layers, stored_draft, target_layers
from .pages import lone_exchange

LAYER = "layers.0."


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """``layers``: the one layer; ``target_layer_ids``: whose outputs are read; ``draft_vocab``: V_d."""

    layers: DecoderConfig
    target_layer_ids: tuple[int, ...]
    draft_vocab: int

    @classmethod
    def read(cls, files: DraftFiles) -> Eagle3Config:
        """From ``config.json``. Without ids of its own the draft reads the outputs of layers 1, L/2 - 1 and L - 4."""
        keys = ConfigKeys(files.keys, "the draft's config.json")
        layers = read_layers(keys, 1)
        check_target(keys, layers, files.target)
        if layers.num_layers != 1:
            raise keys.error(f"num_hidden_layers is {layers.num_layers}, but EAGLE-3 drafts have 1 layer")
        nested = keys.optional_dict("eagle_config")
        ids = keys.optional_list("target_layer_ids", int, 64)
        if ids is None and nested is not None:
            ids = nested.optional_list("eagle_aux_hidden_state_layer_ids", int, 64)
        count = files.target.num_layers
        chosen = target_layers(keys, [1, count // 2 - 1, count - 4] if ids is None else ids, files.target)
        draft_vocab = or_default(keys.optional_int("draft_vocab_size"), layers.vocab_size)
        within("draft_vocab_size", draft_vocab, 1, layers.vocab_size)
        return cls(layers, chosen, draft_vocab)

    def stored(self) -> StoredDraft:
        """The tensors of the folder."""
        hidden, layers = self.layers.hidden_size, self.layers
        parts: Parts = {
            "fc.weight": ((hidden, hidden * len(self.target_layer_ids)), "linear"),
            "norm.weight": ((hidden,), "plain"),
            "embed.weight": ((layers.vocab_size, hidden), "plain"),
            "head.weight": ((self.draft_vocab, hidden), "plain"),
            f"{LAYER}hidden_norm.weight": ((hidden,), "plain"),
        }
        for name, (shape, kind) in block_parts(hidden, layers.attention[0], layers.ffn[0]).items():
            is_input = name.split(".")[1] in ("q_proj", "k_proj", "v_proj")
            parts[LAYER + name] = ((shape[0], 2 * hidden) if is_input else shape, kind)
        optional = {"embed.weight": "embed.weight"}
        if self.draft_vocab < layers.vocab_size:
            parts |= {"d2t": ((self.draft_vocab,), "table"), "t2d": ((layers.vocab_size,), "table")}
            optional["t2d"] = "t2d"
        return stored_draft(parts, optional, (("midlayer.", LAYER),), layers.vocab_size)


class Eagle3Drafter(FeatureChain):
    """See :class:`.base.Drafter`."""

    usual = 5

    def __init__(
        self,
        config: Eagle3Config,
        source: ParamSource,
        has_embedding: bool,
        target: Model,
        groups: Groups,
        kernels: Kernels,
        room: DraftRoom,
        gamma: int,
    ) -> None:
        layers, top = config.layers, Scope(source)
        sizes: GQASizes = layers.attention[0]
        shape = sizes.cache(groups.attn_tp.size)
        super().__init__(target, groups, kernels, room, gamma, shape, layers.hidden_size)
        self.config, self._groups = config, groups
        rope = rope_of(layers, room.max_context + MAX_GAMMA, target.head.weight.device)
        scope, eps = top.scope("layers.0"), layers.rms_norm_eps
        self._fc = MergedLinear(top, [Part("fc.weight", 0, layers.hidden_size)], kernels)
        names = (("attn_norm", scope), ("hidden_norm", scope), ("ffn_norm", scope), ("norm", top))
        norms = [RMSNorm(at, name, eps, kernels) for name, at in names]
        self._embed_norm, self._hidden_norm, self._ffn_norm, self._norm = norms
        self._attention = GQAttention(scope.scope("attn"), sizes, rope, groups.attn_tp, kernels, 0)
        self._mlp = MLP(scope.scope("ffn"), layers.ffn[0], groups.attn_tp, kernels)
        self._embed = target.embed
        if has_embedding:
            self._embed = VocabParallelEmbedding(top, "embed.weight", layers.vocab_size, groups.attn_tp)
        self._head = ParallelLMHead(top, "head.weight", config.draft_vocab, groups.attn_tp, kernels)
        self._places = None
        if config.draft_vocab < layers.vocab_size:
            self._places = torch.arange(config.draft_vocab, device=self.cache.page_table.device) + top.take("d2t")

    @classmethod
    def tap_layers(cls, config: Any) -> tuple[int, ...]:
        """See :meth:`.base.Drafter.tap_layers`."""
        return Eagle3Config.read(config).target_layer_ids

    @classmethod
    def load(
        cls,
        config: DraftFiles,
        source: ParamSource,
        target: Model,
        groups: Groups,
        kernels: Kernels,
        room: DraftRoom,
        gamma: int | None,
    ) -> Eagle3Drafter:
        """See :meth:`.base.Drafter.load`."""
        own, weight = Eagle3Config.read(config), target.head.weight
        source, reader = open_draft(config, own.stored(), weight.dtype, weight.device)
        has_embedding, length = "embed.weight" in reader, cls.block_length(config, gamma)
        return cls(own, source, has_embedding, target, groups, kernels, room, length)

    def features(self, taps: torch.Tensor) -> torch.Tensor:
        """See :meth:`.feature_chain.FeatureChain.features`."""
        return self._fc(taps)

    def _join(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return torch.cat((self._embed_norm(self._embed(tokens)), self._hidden_norm(features)), dim=1)

    def keys(self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See :meth:`.feature_chain.FeatureChain.keys`."""
        return self._attention.project(self._join(tokens, features), positions).rows

    def forward(
        self, tokens: torch.Tensor, features: torch.Tensor, plan: AttentionPlan, counts: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`.feature_chain.FeatureChain.forward`."""
        rows = self._join(tokens, features)
        start_sum = lone_exchange(self._groups, len(tokens), rows.dtype, rows.device).start_sum
        x = features + drain(self._attention.stages(rows, self.cache.layers[0], plan, start_sum, ignore))
        x = x + drain(self._mlp.stages(self._ffn_norm(x), start_sum))
        logits = self._head(self._norm(x))
        if self._places is not None:
            wide = logits.new_full((logits.shape[0], self.config.layers.vocab_size), -torch.inf)
            logits = wide.index_copy_(1, self._places, logits)
        return x, logits
