"""The draft methods by name: what each reads of the target, what it trains with which loss, what it writes.

Legend: A anchors, γ places, N tokens, V vocabulary, D hidden width, m target layers read.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from ...layers.draft_heads import previous_tokens
from ...layers.params import ParamSource
from ...layers.rope import build_rope_table
from ..model_config import DSparkConfig, ModelConfig
from .batches import Batch
from .block_draft import BlockDraft, FrozenEnds
from .chain_draft import ChainDraft, EagleFusion, MtpFusion
from .chunked import chunked_sums
from .export import dspark_keys, write_bundled, write_standalone
from .initial import eagle_weights, initial_weights
from .losses import LossWeights, dspark_sums, eagle3_sums, place_weights
from .target import FeatureKind
from .trainer import StepSums


@dataclass(frozen=True)
class Recipe:
    """What to train. ``gamma``: tokens a block (or, for chains, that are evaluated and unrolled). ``num_experts`` and
    ``top_k`` are the draft's own routed experts; plain prediction layers must have the target's."""

    gamma: int
    target_layer_ids: tuple[int, ...]
    noise_token_id: int
    num_experts: int
    top_k: int
    markov_rank: int = 256
    markov_head: str = "vanilla"
    confidence: bool = True
    factors: LossWeights = LossWeights()
    decay_gamma: float = 4.0
    step_decay: float = 0.8


class Draft(Protocol):
    """A draft under training; also a :class:`~dspark.runtime.training.trainer.TrainableDraft`."""

    weights: dict[str, Tensor]

    def sums(self, batch: Batch) -> StepSums:
        """The loss of a batch."""
        ...

    def drafts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Draft and target logits [A, γ, V] behind the data's tokens, for evaluation."""
        ...

    def write(self, target: pathlib.Path, output: pathlib.Path, record: Mapping[str, Any]) -> None:
        """Write the checkpoint."""
        ...


@torch.no_grad()
def target_logits(batch: Batch, head: Tensor) -> Tensor:
    """[A, γ, V] the target's logits for the labels, from its hidden states."""
    return linear(batch.hidden[batch.rows].to(head.dtype), head)


class BlockMethod:
    """DSpark and DFlash: blocks at sampled anchors, teacher-forced. DFlash has no heads and the factors (1, 0, 0)."""

    def __init__(self, model: BlockDraft, factors: LossWeights, decay_gamma: float) -> None:
        self.model, self.weights = model, dict(model.weights)
        self._factors, self._decay_gamma = factors, decay_gamma

    def sums(self, batch: Batch) -> StepSums:
        """See :class:`Draft`."""
        model, head, labels = self.model, self.model.ends.head, batch.labels
        out = model.backbone(batch)
        prev = previous_tokens(batch.ids[batch.anchors], labels)
        features, confidence = model.markov_features(out, prev), model.confidence_logits(out, prev)
        weights = place_weights(batch.valid, self._decay_gamma)
        rows = (out.normed, features, confidence, batch.hidden[batch.rows], labels, weights)
        readout = model.weights.get(model.last + "markov_head.markov_w2.weight")
        factors = self._factors

        def sums(normed, feature, confidence, hidden, labels, weights, readout):
            logits = linear(normed, head).float()
            if feature is not None:
                logits = logits + linear(feature, readout).float()
            found = dspark_sums(logits, linear(hidden, head), labels, confidence, weights)
            loss = factors.ce * found.ce + factors.l1 * found.l1 + factors.confidence * found.confidence
            return loss, *found

        flat = [None if x is None else x.flatten(0, 1) for x in rows]
        loss, ce, l1, bce, weight = chunked_sums(sums, flat, (readout,))
        return StepSums(loss, weight, {"ce": ce, "l1": l1, "confidence": bce}, out.load)

    def drafts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See :class:`Draft`."""
        return self.model.teacher_forced(batch), target_logits(batch, self.model.ends.head)

    def write(self, target: pathlib.Path, output: pathlib.Path, record: Mapping[str, Any]) -> None:
        """See :class:`Draft`: the release naming, beside the target."""
        write_bundled(target, output, self.weights, dspark_keys(self.model.draft), record)


class MtpMethod:
    """Multi-token prediction with one layer: cross-entropy of every token's row against the token after next."""

    def __init__(self, model: ChainDraft, gamma: int) -> None:
        self.model, self.weights = model, dict(model.weights)
        self._gamma = gamma

    def sums(self, batch: Batch) -> StepSums:
        """See :class:`Draft`."""
        first = self.model.first_rows(batch)
        # Row t learns token t + 2 if that lies in the same sequence and is a label.
        rows = torch.arange(max(len(batch.ids) - 2, 0), device=batch.ids.device)
        rows = rows[(batch.begins[rows] == batch.begins[rows + 2]) & batch.learned[rows + 2]]
        each = cross_entropy(self.model.logits(first.hidden[rows]), batch.ids[rows + 2], reduction="sum")
        weight = torch.tensor(float(len(rows)), device=each.device)
        return StepSums(each, weight, {"ce": each}, first.load.unsqueeze(0))

    def drafts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See :class:`Draft`."""
        labels = batch.labels
        logits, _ = self.model.chain(batch, self._gamma, lambda k, _: labels[:, k])
        return logits, target_logits(batch, self.model.ends.head)

    def write(self, target: pathlib.Path, output: pathlib.Path, record: Mapping[str, Any]) -> None:
        """See :class:`Draft`: the release naming, beside the target."""
        write_bundled(target, output, self.weights, {"num_nextn_predict_layers": 1}, record)


class EagleMethod:
    """EAGLE-3: at step i the draft has run i times on its own output; soft cross-entropy against the target's law,
    weighted by ``step_decay`` ** i and averaged over the anchors."""

    def __init__(self, model: ChainDraft, recipe: Recipe) -> None:
        self.model, self.weights = model, dict(model.weights)
        self._recipe = recipe

    def sums(self, batch: Batch) -> StepSums:
        """See :class:`Draft`."""
        logits, wanted = self.drafts(batch)
        loss, places = eagle3_sums(logits, wanted, batch.valid, self._recipe.step_decay)
        weight = torch.tensor(float(len(batch.anchors)), device=loss.device)
        return StepSums(loss, weight, {"first_step": places[0]}, None)

    def drafts(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See :class:`Draft`."""
        labels = batch.labels
        logits, _ = self.model.chain(batch, self._recipe.gamma, lambda k, _: labels[:, k])
        return logits, target_logits(batch, self.model.ends.head)

    def write(self, target: pathlib.Path, output: pathlib.Path, record: Mapping[str, Any]) -> None:
        """See :class:`Draft`: a folder of its own, see docs/training.md for its names."""
        recipe = self._recipe
        config = {
            "model_type": "dspark_eagle3_v4",
            "eagle3_target_layer_ids": list(recipe.target_layer_ids),
            "eagle3_n_routed_experts": recipe.num_experts,
            "eagle3_num_experts_per_tok": recipe.top_k,
            "eagle3_num_steps": recipe.gamma,
            "vocab_size": self.model.config.vocab_size,
            "hidden_size": self.model.config.hidden_size,
        }
        write_standalone(output, self.weights, config, record)


@dataclass(frozen=True)
class Method:
    """One entry of :data:`METHODS`.

    ``feature`` and ``layers`` say what the target's states must hold, ``default_layers`` which layers are read unless
    the user says.
    """

    feature: FeatureKind
    default_layers: Callable[[ModelConfig], tuple[int, ...]]
    layers: Callable[[Recipe, ModelConfig], tuple[int, ...]]
    build: Callable[[Recipe, ModelConfig, ParamSource, torch.Generator, torch.device], Draft]


def _frozen(source: ParamSource, device: torch.device) -> FrozenEnds:
    take = source.take
    return FrozenEnds(*(take(f"{name}.weight", dtype=torch.float32).to(device) for name in ("embed", "head")))


def _rope(config: ModelConfig, device: torch.device):
    # Blocks reach past the last token; positions of training sequences are far below the model's limit.
    return build_rope_table(config.rope_dim, config.main_rope.theta, config.max_position_embeddings + 64, None, device)


def _block(config: ModelConfig, recipe: Recipe, source, generator, device, *, heads: bool) -> BlockMethod:
    rank = recipe.markov_rank if heads else 0
    confidence = recipe.confidence and heads
    draft = DSparkConfig(
        block_size=recipe.gamma,
        markov_rank=rank,
        markov_head_type=recipe.markov_head if heads and rank else "vanilla",
        noise_token_id=recipe.noise_token_id,
        target_layer_ids=recipe.target_layer_ids,
        num_routed_experts=recipe.num_experts,
        num_experts_per_tok=recipe.top_k,
        enable_confidence_head=confidence,
        confidence_head_with_markov=confidence and rank > 0,
        sample_from_anchor=True,
    )
    announced = dataclasses.replace(config, dspark=draft, num_nextn_predict_layers=0)
    weights = initial_weights(announced, source, generator, device)
    model = BlockDraft(announced, weights, _frozen(source, device), _rope(config, device))
    return BlockMethod(model, recipe.factors if heads else LossWeights(1.0, 0.0, 0.0), recipe.decay_gamma)


def _dspark(recipe, config, source, generator, device) -> BlockMethod:
    return _block(config, recipe, source, generator, device, heads=True)


def _dflash(recipe, config, source, generator, device) -> BlockMethod:
    return _block(config, recipe, source, generator, device, heads=False)


def _mtp(recipe, config, source, generator, device) -> MtpMethod:
    announced = dataclasses.replace(config, dspark=None, num_nextn_predict_layers=1)
    weights = initial_weights(announced, source, generator, device)
    model = ChainDraft(announced, weights, _frozen(source, device), _rope(config, device), MtpFusion(config))
    return MtpMethod(model, recipe.gamma)


def _eagle3(recipe, config, source, generator, device) -> EagleMethod:
    plain = dataclasses.replace(config, dspark=None, num_nextn_predict_layers=1)
    weights = eagle_weights(plain, recipe.num_experts, len(recipe.target_layer_ids), source, generator, device)
    ends, rope = _frozen(source, device), _rope(config, device)
    model = ChainDraft(plain, weights, ends, rope, EagleFusion(config), recipe.num_experts, recipe.top_k)
    return EagleMethod(model, recipe)


def _chosen(recipe: Recipe, config: ModelConfig) -> tuple[int, ...]:
    return recipe.target_layer_ids


def _last(config: ModelConfig) -> tuple[int, ...]:
    return (config.num_layers - 1,)


def _spread(config: ModelConfig) -> tuple[int, ...]:
    """A low, a middle and the last layer, fewer in a shallow target."""
    return tuple(sorted({min(1, config.num_layers - 1), config.num_layers // 2, config.num_layers - 1}))


METHODS: dict[str, Method] = {
    "dspark": Method("mean", _last, _chosen, _dspark),
    "dflash": Method("mean", _last, _chosen, _dflash),
    "mtp": Method("streams", _last, lambda recipe, config: _last(config), _mtp),
    "eagle3": Method("mean", _spread, _chosen, _eagle3),
}
