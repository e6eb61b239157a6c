"""Drafts that run on their own output: multi-token prediction (MTP-1) and EAGLE-3, over many anchors at once.

Legend: N tokens, A anchors, γ places, n residual streams, D hidden width, w sliding window, m target layers read.

A row at position t reads what the target made of token t and the embedding of token t + 1, and predicts token t + 2.
The first draft behind an anchor at p comes from the row at p - 1, whose next token is the anchor; later rows read the
draft's own output instead of the target's. Keys of rows that read the target stay; keys of a chain are seen by that
chain only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from ...layers.kernels.hyper_connection import weighted_norm
from ...layers.rope import RopeTable
from ..model_config import ModelConfig
from .batches import Batch
from .block_draft import FrozenEnds
from .stage import Keys, SeenBy, StageSizes, Weights, collapse, scoped, stage_forward

PREFIX = "mtp.0."


class Fusion(Protocol):
    """How a chain draft joins the embedding of the next token with what is known of this one."""

    def start(self, weights: Weights, features: Tensor) -> Tensor:
        """The state [N, ..] of rows that read the target's ``features`` [N, ..]."""
        ...

    def join(self, weights: Weights, state: Tensor, embedded: Tensor) -> Tensor:
        """The layer's streams [R, n, D] of states and embedded next tokens [R, D]."""
        ...

    def carry(self, weights: Weights, streams: Tensor) -> Tensor:
        """The state [R, ..] that the layer's output ``streams`` [R, n, D] hand to the next row."""
        ...


class MtpFusion:
    """e_proj(enorm(embedding)) on every stream, plus h_proj(hnorm(stream)); the state is the streams themselves."""

    def __init__(self, config: ModelConfig) -> None:
        self._shape, self._eps = (config.hc_mult, config.hidden_size), config.rms_norm_eps

    def start(self, weights: Weights, features: Tensor) -> Tensor:
        """See :class:`Fusion`: ``features`` [N, n D] are the target's streams."""
        return features.unflatten(-1, self._shape)

    def join(self, weights: Weights, state: Tensor, embedded: Tensor) -> Tensor:
        """See :class:`Fusion`."""
        e = linear(weighted_norm(embedded, weights["enorm.weight"], self._eps), weights["e_proj.weight"])
        h = linear(weighted_norm(state, weights["hnorm.weight"], self._eps), weights["h_proj.weight"])
        return e.unsqueeze(1) + h

    def carry(self, weights: Weights, streams: Tensor) -> Tensor:
        """See :class:`Fusion`."""
        return streams


class EagleFusion:
    """EAGLE-3: fc joins the features of m target layers to one state h; in_proj reads [enorm(embedding); hnorm(h)].

    The residual is h, and what is fed back is the layer's output before its final norm, as in the original; the layer
    itself is the target's kind, so its streams all start from h + in_proj(..).
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def start(self, weights: Weights, features: Tensor) -> Tensor:
        """See :class:`Fusion`: ``features`` [N, m D]."""
        return linear(features, weights["fc.weight"])

    def join(self, weights: Weights, state: Tensor, embedded: Tensor) -> Tensor:
        """See :class:`Fusion`."""
        eps = self._config.rms_norm_eps
        e = weighted_norm(embedded, weights["enorm.weight"], eps)
        h = weighted_norm(state, weights["hnorm.weight"], eps)
        x = state + linear(torch.cat((e, h), dim=-1), weights["in_proj.weight"])
        return x.unsqueeze(1).expand(-1, self._config.hc_mult, -1)

    def carry(self, weights: Weights, streams: Tensor) -> Tensor:
        """See :class:`Fusion`."""
        return collapse(weights, streams, self._config)


class ChainOutput(NamedTuple):
    """``hidden`` [R, D] normed, for the head; ``state`` for the next row; ``keys`` [R, d]; ``load`` [E]."""

    hidden: Tensor
    state: Tensor
    keys: Tensor
    load: Tensor


class ChainDraft:
    """One layer of the target's kind behind a :class:`Fusion`, on given weights (canonical names, ``mtp.0.*``)."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ends: FrozenEnds,
        rope: RopeTable,
        fusion: Fusion,
        num_experts: int | None = None,
        top_k: int | None = None,
    ) -> None:
        self.config, self.weights, self.ends, self.rope, self.fusion = config, weights, ends, rope, fusion
        experts = config.num_experts if num_experts is None else num_experts
        self._sizes = StageSizes(config, experts, config.num_experts_per_tok if top_k is None else top_k)

    def first_rows(self, batch: Batch) -> ChainOutput:
        """The rows of all tokens of ``batch`` that read the target; the last row of a sequence means nothing."""
        weights = scoped(self.weights, PREFIX)
        state = self.fusion.start(weights, batch.features)
        tokens = batch.ids.roll(-1)
        seen = window_in_sequence(batch.begins, self.config.sliding_window)
        size = self.config.sliding_window
        positions = _padded(batch.positions, size).view(-1, size)
        return self._rows(weights, _padded(state, size), _padded(tokens, size), positions, seen, len(tokens))

    def next_rows(
        self, first: ChainOutput, batch: Batch, past: list[Tensor], state: Tensor, tokens: Tensor
    ) -> ChainOutput:
        """The rows of step i = len(past) of the chains of ``batch.anchors``: at anchor - 1 + i, behind ``tokens`` [A].

        ``past``: keys [A, d] of the chains' steps 0 .. i - 1; step 0 is a row of ``first``, whose earlier keys are the
        context.
        """
        rows = (
            batch.anchors.unsqueeze(1)
            - 1
            + torch.arange(1 - self.config.sliding_window + len(past), 0).to(batch.anchors.device)
        )
        context = embedding(rows.clamp(min=0), first.keys)
        exists = rows >= batch.begins[batch.anchors].unsqueeze(1)
        chain = torch.stack(past, dim=1)

        def seen(own: Tensor) -> Keys:
            keys = torch.cat((context, chain, own), dim=1)
            ones = exists.new_ones(len(rows), keys.shape[1] - exists.shape[1])
            return Keys(keys, torch.cat((exists, ones), dim=1).unsqueeze(1))

        positions = (batch.positions[batch.anchors] - 1 + len(past)).unsqueeze(1)
        return self._rows(scoped(self.weights, PREFIX), state, tokens, positions, seen, len(tokens))

    def _rows(
        self, weights: Weights, state: Tensor, tokens: Tensor, positions: Tensor, seen: SeenBy, count: int
    ) -> ChainOutput:
        streams = self.fusion.join(weights, state, embedding(tokens, self.ends.embed))
        kept: list[Tensor] = []

        def keep(own: Tensor) -> Keys:
            kept.append(own.flatten(0, 1)[:count])
            return seen(own)

        streams, load = stage_forward(weights, streams, keep, positions, self.rope, self._sizes)
        streams = streams[:count]
        hidden = weighted_norm(
            collapse(weights, streams, self.config), weights["norm.weight"], self.config.rms_norm_eps
        )
        return ChainOutput(hidden, self.fusion.carry(weights, streams), kept[0], load)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] float32 of normed ``hidden`` [R, D], by the target's head."""
        return linear(hidden, self.ends.head).float()

    def chain(self, batch: Batch, gamma: int, choose: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, ChainOutput]:
        """Logits [A, γ, V] of the drafts behind each anchor, and the first rows (for losses on all of them).

        ``choose(k, logits [A, V])`` gives the tokens [A] that the drafts go on from: the data's, or their own.
        """
        first = self.first_rows(batch)
        before = (batch.anchors - 1).clamp(min=0)
        state, past = first.state[before], [first.keys[before]]
        logits = [self.logits(first.hidden[before])]
        for k in range(1, gamma):
            out = self.next_rows(first, batch, past, state, choose(k - 1, logits[-1]))
            state = out.state
            past.append(out.keys)
            logits.append(self.logits(out.hidden))
        return torch.stack(logits, dim=1), first


def _padded(x: Tensor, size: int) -> Tensor:
    """``x`` with zero rows up to a multiple of ``size``."""
    missing = -len(x) % size
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x


def window_in_sequence(begins: Tensor, window: int) -> SeenBy:
    """Keys of rows that lie side by side in chunks of ``window``: the w positions up to a row, in its own sequence.

    A chunk attends to itself and to the chunk before it, which together hold every window. ``begins`` [N].
    """
    size = window
    begins = _padded(begins, size).view(-1, size)
    row = torch.arange(begins.numel(), device=begins.device).view(-1, size)
    column = torch.cat((row - size, row), dim=1)
    visible = (column.unsqueeze(1) <= row.unsqueeze(2)) & (column.unsqueeze(1) > row.unsqueeze(2) - window)
    visible = visible & (column.unsqueeze(1) >= begins.unsqueeze(2))

    def seen(own: Tensor) -> Keys:
        before = torch.cat((torch.zeros_like(own[:1]), own[:-1]))
        return Keys(torch.cat((before, own), dim=1), visible)

    return seen
