"""A small language model as the draft: it reads every token the target reads, and continues on its own.

Legend: R requests, γ drafts a block, K rows of a target step, P position of a request's anchor, V vocabulary.

Its cache has a row for every position that the target has passed. Drafting runs the anchor at P, then each draft behind
it; those rows are written again when the target has judged them, from the tokens that stand there then.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from ...layers.attention.plan import AttentionPlan, build_plan
from ...layers.draft_heads_host import HostDraftBlock
from ...layers.kernels import Kernels
from ...layers.params import ParamSource
from ...layers.probe import ignore
from ...layers.stages import drain
from ...parallel.groups import Group, Groups
from ..model_config import load_model_config
from ..models.base import Model
from ..models.decoder import Decoder
from ..models.decoder_config import DecoderConfig
from ..step import Step
from .base import DraftNoise, DraftRequests, DraftRoom, PlainDraft
from .chain import Chain, rows_at
from .files import DraftFiles, open_draft
from .pages import lone_exchange, own_pages

MAX_GAMMA = 16
"""Drafts of a block at most; each costs a forward of the draft."""


class ModelDrafter(PlainDraft):
    """See :class:`.base.Drafter`."""

    longest, usual = MAX_GAMMA, 4

    def __init__(
        self,
        config: DecoderConfig,
        source: ParamSource,
        target: Model,
        groups: Groups,
        kernels: Kernels,
        room: DraftRoom,
        gamma: int,
    ) -> None:
        self.gamma, self._groups = gamma, dataclasses.replace(groups, pp=Group.alone("pp"))
        device, dtype = target.head.weight.device, target.head.weight.dtype
        max_context = room.max_context + MAX_GAMMA
        self._model = Decoder(config, source, self._groups, kernels, max_context, device, dtype=dtype)
        shapes = [sizes.cache(groups.attn_tp.size) for sizes in config.attention]
        if any(shape.window for shape in shapes):
            raise ValueError("a draft model with sliding layers is not supported")
        self._cache = own_pages(shapes, room.num_slots, max_context, device, dtype)
        self._chain = Chain(gamma, groups.attn_block, device)

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
    ) -> ModelDrafter:
        """See :meth:`.base.Drafter.load`. Raises ``ValueError`` for a model of another vocabulary or with experts."""
        length = cls.block_length(config, gamma)
        own = load_model_config(config.folder)
        if not isinstance(own, DecoderConfig) or own.num_experts:
            raise ValueError(f"{config.folder}: a draft model must be a dense decoder, this one is {own.model_type}")
        if own.vocab_size != config.target.vocab_size:
            raise ValueError(
                f"the draft model has a vocabulary of {own.vocab_size}, but the target's has {config.target.vocab_size}"
            )
        if own.max_position_embeddings < room.max_context:
            raise ValueError(
                f"the draft model has {own.max_position_embeddings} positions, but --max-context is {room.max_context}"
            )
        source, _ = open_draft(config, own, target.head.weight.dtype, target.head.weight.device)
        return cls(own, source, target, groups, kernels, room, length)

    @torch.inference_mode()
    def observe(self, taps: torch.Tensor, step: Step) -> None:
        """See :meth:`.base.Drafter.observe`; only the step's tokens matter."""
        keys = step.plan.keys
        rows = torch.stack(tuple(keys)).cpu().numpy()
        plan = build_plan(rows, self._cache.page_table, self._cache.layout.ratios)
        self._forward(step.plan.gather(step.tokens), plan)

    @torch.inference_mode()
    def propose(self, requests: DraftRequests, noise: DraftNoise | None) -> HostDraftBlock | None:
        """See :meth:`.base.Drafter.propose`."""
        slots, starts = np.array(requests.slots, np.int64), np.array(requests.starts, np.int64)

        def advance(k: int, tokens: torch.Tensor) -> torch.Tensor:
            plan = build_plan(rows_at(slots, starts + k), self._cache.page_table, self._cache.layout.ratios)
            return self._model.head(self._model.norm(self._forward(tokens, plan)))

        return self._chain.draw(requests, noise, advance)

    def _forward(self, tokens: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """The residual behind the last layer [T, D] of ``tokens`` [T]; the plan's rows are stored. Collective."""
        x = self._model.embed(tokens)
        exchange = lone_exchange(self._groups, len(tokens), x.dtype, x.device)
        for block, cache in zip(self._model.blocks, self._cache.layers):
            x = drain(block.stages(x, tokens, cache, plan, exchange, ignore))
        return x
