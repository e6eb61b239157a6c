"""The DSpark draft (and DFlash, which is its backbone alone) as a differentiable model over many anchors at once.

Legend: N tokens, A anchors, γ places, n residual streams, D hidden width, w sliding window, m target layers read.

Source: paper sections 3.1 and 3.2. The block of an anchor at position p is [anchor, mask × (γ - 1)] at positions
p .. p + γ - 1; row k predicts token p + 1 + k. Every row sees the same context, the last w positions before p, and all
rows of its block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from ...layers.draft_heads import ConfidenceHead, make_markov_head, previous_tokens, teacher_forced_logits
from ...layers.kernels.hyper_connection import weighted_norm
from ...layers.rope import RopeTable
from ..model_config import ModelConfig
from .batches import Batch
from .stage import Keys, StageSizes, Weights, collapse, context_keys, scoped, stage_forward

MARKOV_PREFIX = "markov_head."


class FrozenEnds(NamedTuple):
    """The target's ``embed`` and ``head``, both [V, D], which a draft uses and never changes."""

    embed: Tensor
    head: Tensor


class BlockOutput(NamedTuple):
    """``normed`` [A, γ, D] for the target's head; ``hidden`` [A, γ, D] that the draft's heads read; ``load`` [S, E]
    rows by expert of each stage."""

    normed: Tensor
    hidden: Tensor
    load: Tensor


class BlockDraft:
    """The forward of a draft that ``config.dspark`` describes, on given weights (canonical names, ``mtp.*``)."""

    def __init__(self, config: ModelConfig, weights: Weights, ends: FrozenEnds, rope: RopeTable) -> None:
        assert config.dspark is not None and config.dspark.sample_from_anchor
        self.config, self.draft, self.weights, self.ends, self.rope = config, config.dspark, weights, ends, rope
        self.num_stages = len(self.draft.target_layer_ids)
        self._sizes = StageSizes(config, self.draft.num_routed_experts, self.draft.num_experts_per_tok)

    @property
    def last(self) -> str:
        """The prefix of the last stage."""
        return f"mtp.{self.num_stages - 1}."

    def context(self, features: Tensor) -> Tensor:
        """The context [N, D] that all stages see, of the target's ``features`` [N, m D]."""
        projected = linear(features, self.weights["mtp.0.main_proj.weight"])
        return weighted_norm(projected, self.weights["mtp.0.main_norm.weight"], self.config.rms_norm_eps)

    def window(self, anchors: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that the blocks of ``anchors`` [A] see: indices [A, w], and which of them exist (bool)."""
        w = self.config.sliding_window
        rows = anchors.unsqueeze(1) + torch.arange(-w, 0, device=anchors.device)
        return rows.clamp(min=0), rows >= begins[anchors].unsqueeze(1)

    def backbone(self, batch: Batch, gamma: int | None = None) -> BlockOutput:
        """All blocks of ``batch``, ``gamma`` rows each (default: the block size)."""
        config, draft = self.config, self.draft
        gamma = draft.block_size if gamma is None else gamma
        num_blocks = len(batch.anchors)
        context = self.context(batch.features)
        rows, exists = self.window(batch.anchors, batch.begins)
        tokens = torch.full((num_blocks, gamma), draft.noise_token_id, device=batch.ids.device)
        tokens[:, 0] = batch.ids[batch.anchors]
        positions = batch.positions[batch.anchors].unsqueeze(1) + torch.arange(gamma, device=rows.device)
        streams = embedding(tokens.flatten(), self.ends.embed).unsqueeze(1).expand(-1, config.hc_mult, -1)
        # The rows of a block see the same context and each other, in both directions.
        visible = torch.cat((exists, exists.new_ones(num_blocks, gamma)), dim=1).unsqueeze(1).expand(-1, gamma, -1)
        loads = []
        for stage in range(self.num_stages):
            weights = scoped(self.weights, f"mtp.{stage}.")
            keys = context_keys(weights, context, batch.positions, self.rope, config.rms_norm_eps)
            past = embedding(rows, keys)

            def seen(own: Tensor, past: Tensor = past) -> Keys:
                return Keys(torch.cat((past, own), dim=1), visible)

            streams, load = stage_forward(weights, streams, seen, positions, self.rope, self._sizes)
            loads.append(load)
        last = scoped(self.weights, self.last)
        hidden = collapse(last, streams, config)
        normed = weighted_norm(hidden, last["norm.weight"], config.rms_norm_eps)
        shape = (num_blocks, gamma, config.hidden_size)
        return BlockOutput(normed.view(shape), hidden.view(shape), torch.stack(loads))

    def markov_head(self):
        """The Markov head on the current weights, or ``None``."""
        if not self.draft.markov_rank:
            return None
        weights = scoped(self.weights, self.last + MARKOV_PREFIX)
        return make_markov_head(self.draft.markov_head_type, weights, self.config.hidden_size)

    def confidence_head(self) -> ConfidenceHead | None:
        """The confidence head on the current weights, or ``None``."""
        if not self.draft.enable_confidence_head:
            return None
        return ConfidenceHead(self.weights[self.last + "confidence_head.proj.weight"])

    def markov_features(self, out: BlockOutput, prev: Tensor) -> Tensor | None:
        """[A, γ, r] what W2 reads behind the tokens ``prev`` [A, γ], or ``None`` without a Markov head."""
        head = self.markov_head()
        if head is None:
            return None
        state = head.begin(out.hidden)
        if not head.recurrent:
            return head.step(slice(None), prev, state)[0]
        features = []
        for k in range(prev.shape[1]):
            feature, state = head.step(k, prev[:, k], state)
            features.append(feature)
        return torch.stack(features, dim=1)

    def confidence_logits(self, out: BlockOutput, prev: Tensor) -> Tensor | None:
        """[A, γ] behind the tokens ``prev``, or ``None`` without a confidence head."""
        head = self.confidence_head()
        if head is None:
            return None
        w1 = self.weights.get(self.last + MARKOV_PREFIX + "markov_w1.weight")
        return head.logits(out.hidden, prev, w1 if self.draft.confidence_head_with_markov else None)

    def teacher_forced(self, batch: Batch) -> Tensor:
        """Draft logits [A, γ, V] behind the data's tokens."""
        out = self.backbone(batch)
        prev = previous_tokens(batch.ids[batch.anchors], batch.labels)
        base = linear(out.normed, self.ends.head)
        return teacher_forced_logits(base, out.hidden, prev, self.markov_head())
