"""Drafts of a whole block in one forward over injected target features: DFlash 1 and 2, and DSpark for dense targets.

Legend: R requests, γ drafts a block, w rows of a block, T rows of a target step, D hidden width, V vocabulary, P
position of a request's anchor.

Context: for every position the target has passed, the outputs of the tapped layers go through ``fc`` and
``hidden_norm`` once, and each layer keeps keys and values of that by position. Block: the anchor and masks at P .. P +
w - 1, where every row sees the context before P and the whole block. The public DFlash layout predicts from the rows
behind the anchor (w = γ + 1), the DSpark layout from the anchor on (w = γ), with a Markov head that draws left to
right and a confidence head. DFlash 2 adds convolutions and a selector, see :mod:`.dflash2`. Embedding and head are
the target's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from ...layers.attention.injected import InjectedSizes
from ...layers.attention.plan import build_plan
from ...layers.candidate_selector import CandidateSelector, SelectorSizes
from ...layers.draft_heads import load_confidence_head, load_markov_head
from ...layers.draft_heads_host import HostDraftBlock, HostHeads
from ...layers.kernels import Kernels
from ...layers.linear import MergedLinear, Part
from ...layers.norm import RMSNorm
from ...layers.params import ParamSource, Scope
from ...layers.probe import ignore
from ...layers.stages import drain
from ...layers.suffix_conv import ConvSizes
from ...parallel.groups import Groups
from ..checkpoint.config_file import or_default
from ..checkpoint.config_keys import ConfigKeys
from ..model_config import MARKOV_HEAD_TYPES, within
from ..models.base import Model
from ..models.decoder import DecoderLayer, rope_of
from ..models.decoder_config import DecoderConfig
from ..models.decoder_spec import Parts, block_parts
from ..step import Step
from .base import DraftNoise, DraftRequests, DraftRoom, PlainDraft
from .dflash2 import ConvolvedLayer, read_refinement, refinement_parts
from .files import (
    DraftFiles,
    StoredDraft,
    check_copies,
    check_target,
    open_draft,
    read_layers,
    stored_draft,
    target_layers,
)
from .pages import lone_exchange, own_pages, own_plan

MAX_BLOCK = 64


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """``layers``: of the draft; ``gamma``: drafts of a block; ``skips_anchor``: the anchor's row predicts nothing."""

    layers: DecoderConfig
    gamma: int
    skips_anchor: bool
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    has_confidence: bool = False
    confidence_with_markov: bool = False
    selector: SelectorSizes | None = None
    conv: ConvSizes | None = None

    @property
    def width(self) -> int:
        """Rows of a block."""
        return self.gamma + self.skips_anchor

    @classmethod
    def read(cls, files: DraftFiles) -> BlockConfig:
        """From ``config.json``; DSpark's own keys at the top, DFlash's in ``dflash_config``."""
        keys = ConfigKeys(files.keys, "the draft's config.json")
        layers = read_layers(keys)
        check_target(keys, layers, files.target)
        sparse = [InjectedSizes(*sizes) for sizes in layers.attention]
        layers = dataclasses.replace(layers, attention=tuple(sparse))
        nested = keys.optional_dict("dflash_config")
        own = keys if nested is None else nested
        ids = own.optional_list("target_layer_ids", int, MAX_BLOCK)
        mask, block = (
            own.required_int("mask_token_id"),
            (own if "block_size" in own else keys).required_int("block_size"),
        )
        within("mask_token_id of the draft", mask, 0, files.target.vocab_size - 1)
        within("block_size of the draft", block, 1 if nested is None else 2, MAX_BLOCK)
        chosen = target_layers(own, ids, files.target)
        if nested is not None:
            plain = cls(layers, block - 1, True, mask, chosen)
            if files.format != "dflash2":
                return plain
            selector, conv = read_refinement(nested, keys, layers, block)
            return dataclasses.replace(plain, selector=selector, conv=conv)
        rank, kind = keys.required_int("markov_rank"), or_default(keys.optional_str("markov_head_type"), "vanilla")
        if kind not in MARKOV_HEAD_TYPES:
            raise keys.error(f"markov_head_type is {kind!r:.40}, not one of {', '.join(MARKOV_HEAD_TYPES)}")
        confidence = or_default(keys.optional_bool("enable_confidence_head"), rank > 0)
        with_markov = or_default(keys.optional_bool("confidence_head_with_markov"), rank > 0)
        return cls(layers, block, False, mask, chosen, rank, kind, confidence, with_markov and rank > 0)

    def stored(self) -> StoredDraft:
        """The tensors of the folder."""
        layers = self.layers
        hidden, vocab, rank = layers.hidden_size, layers.vocab_size, self.markov_rank
        parts: Parts = {
            "fc.weight": ((hidden, hidden * len(self.target_layer_ids)), "linear"),
            "hidden_norm.weight": ((hidden,), "plain"),
            "norm.weight": ((hidden,), "plain"),
            "embed.weight": ((vocab, hidden), "plain"),
            "head.weight": ((vocab, hidden), "plain"),
        }
        for layer, (attention, ffn) in enumerate(zip(layers.attention, layers.ffn)):
            parts |= {f"layers.{layer}.{name}": part for name, part in block_parts(hidden, attention, ffn).items()}
        if rank:
            parts |= {f"markov_head.markov_w{n}.weight": ((vocab, rank), "plain") for n in (1, 2)}
        if self.markov_head_type == "gated":
            parts |= {"markov_head.gate_proj.weight": ((rank, hidden + rank), "plain")}
            parts |= {"markov_head.gate_proj.bias": ((rank,), "plain")}
        if self.markov_head_type == "rnn":
            parts |= {"markov_head.joint_proj.weight": ((3 * rank, 2 * rank + hidden), "plain")}
            parts |= {"markov_head.joint_proj.bias": ((3 * rank,), "plain")}
        if self.has_confidence:
            width = hidden + (rank if self.confidence_with_markov else 0)
            parts |= {"confidence_head.proj.weight": ((1, width), "plain")}
            parts |= {"confidence_head.proj.bias": ((1,), "plain")}
        if self.selector is not None:
            parts |= refinement_parts(self.selector, self.conv, layers)
        return stored_draft(parts, {name: name for name in ("embed.weight", "head.weight")})


class BlockDrafter(PlainDraft):
    """See :class:`.base.Drafter`."""

    def __init__(
        self,
        config: BlockConfig,
        source: ParamSource,
        target: Model,
        groups: Groups,
        kernels: Kernels,
        room: DraftRoom,
        gamma: int,
    ) -> None:
        self.gamma, self.config = gamma, config
        self._target, self._groups = target, groups
        layers, top = config.layers, Scope(source)
        device, dtype = target.head.weight.device, target.head.weight.dtype
        rope = rope_of(layers, room.max_context + config.width, device)
        hidden, eps = layers.hidden_size, layers.rms_norm_eps
        self._fc = MergedLinear(top, [Part("fc.weight", 0, hidden)], kernels)
        self._context_norm, self._norm = (RMSNorm(top, name, eps, kernels) for name in ("hidden_norm", "norm"))
        self._layers = []
        for n, sizes in enumerate(zip(layers.attention, layers.ffn)):
            parts = (top.scope(f"layers.{n}"), *sizes, eps, rope, groups, kernels, n)
            plain = config.conv is None
            self._layers.append(
                DecoderLayer(*parts, all_to_all=False) if plain else ConvolvedLayer(*parts, config.conv)
            )
        shapes = tuple(sizes.cache(groups.attn_tp.size) for sizes in layers.attention)
        self._cache = own_pages(shapes, room.num_slots, room.max_context + config.width, device, dtype)
        markov = confidence = None
        if config.markov_rank:
            markov = load_markov_head(config.markov_head_type, top.scope("markov_head"), hidden)
        if config.has_confidence:
            confidence = load_confidence_head(top.scope("confidence_head"), has_bias=True)
        self._heads, self._selector = HostHeads(markov, confidence, kernels=kernels), None
        if config.selector is not None:
            self._selector = CandidateSelector(top.scope("candidate_selector"), config.selector)

    @classmethod
    def tap_layers(cls, config: Any) -> tuple[int, ...]:
        """See :meth:`.base.Drafter.tap_layers`."""
        return BlockConfig.read(config).target_layer_ids

    @classmethod
    def max_gamma(cls, config: Any) -> int:
        """See :meth:`.base.Drafter.max_gamma`: the block it was trained with."""
        return BlockConfig.read(config).gamma

    @classmethod
    def has_confidence(cls, config: Any) -> bool:
        """See :meth:`.base.Drafter.has_confidence`."""
        return BlockConfig.read(config).has_confidence

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
    ) -> BlockDrafter:
        """See :meth:`.base.Drafter.load`. Raises ``ValueError`` if a copy of the target's embedding or head differs."""
        own = BlockConfig.read(config)
        length = cls.block_length(config, gamma)
        weight = target.head.weight
        source, reader = open_draft(config, own.stored(), weight.dtype, weight.device)
        check_copies(reader, source, target, ("embed.weight", "head.weight"))
        return cls(own, source, target, groups, kernels, room, length)

    @torch.inference_mode()
    def observe(self, taps: torch.Tensor, step: Step) -> None:
        """See :meth:`.base.Drafter.observe`."""
        plan = own_plan(step.plan, self._cache)
        context = self._context_norm(self._fc(step.plan.gather(taps)))
        for layer, cache in zip(self._layers, self._cache.layers):
            layer.attention.inject(context, cache, plan)

    def propose(self, requests: DraftRequests, noise: DraftNoise | None) -> HostDraftBlock | None:
        """See :meth:`.base.Drafter.propose`."""
        hidden, base_logits = self.forward(requests)
        if noise is None:
            return None
        anchors = np.array(requests.anchors, np.int64)
        if self._selector is not None:
            return self._selector.draw_block(hidden, base_logits, anchors, *noise)
        hidden, base_logits = (x.float().cpu().numpy() for x in (hidden, base_logits))
        return self._heads.draw_block(base_logits, hidden, anchors, *noise)

    @torch.inference_mode()
    def forward(self, requests: DraftRequests) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's states behind the final norm [R, γ, D] and its base logits [R, γ, V], row k for draft k + 1."""
        num_requests, width = len(requests.slots), self.config.width
        rows = np.empty((5, num_requests * width), np.int64)
        starts = np.repeat(np.array(requests.starts, np.int64), width)
        rows[0] = starts + np.tile(np.arange(width), num_requests)
        rows[1] = np.repeat(np.array(requests.slots, np.int64), width)
        rows[2], rows[3] = starts, starts + width
        rows[4] = np.arange(num_requests * width)
        ids = np.full((num_requests, width), self.config.mask_token_id, np.int64)
        ids[:, 0] = requests.anchors
        plan = build_plan(rows, self._cache.page_table, (1,), bidirectional=True)
        tokens = torch.from_numpy(ids.ravel()).to(self._cache.page_table.device)
        x = self._target.embed(tokens)
        exchange = lone_exchange(self._groups, len(tokens), x.dtype, x.device)
        for layer, cache in zip(self._layers, self._cache.layers):
            x = drain(layer.stages(x, tokens, cache, plan, exchange, ignore))
        skipped = int(self.config.skips_anchor)
        drafted = x.unflatten(0, (num_requests, width))[:, skipped : skipped + self.gamma]
        hidden = self._norm(drafted.flatten(0, 1))
        shape = (num_requests, self.gamma)
        return hidden.unflatten(0, shape), self._target.head(hidden).unflatten(0, shape)
