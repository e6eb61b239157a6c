"""A whole training run: data, draft, loop, evaluation, checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from dataclasses import dataclass
from typing import Any

import torch

from ...parallel.groups import Group
from ..checkpoint import CheckpointReader
from ..model_config import ModelConfig, load_model_config
from ..progress import ProgressFactory, silent
from ..share import all_or_none
from ..tokenizer import Tokenizer
from .curves import draw_curves, read_log
from .evaluate import evaluate_drafts
from .hidden_cache import HiddenData
from .methods import METHODS, Draft, Recipe
from .prepare import DataOptions, StatesWanted, prepare
from .trainer import LOG_NAME, Trainer, TrainOptions, run_identity

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """Everything that ``train-draft`` was told. ``cache``: where target states are kept."""

    model: pathlib.Path
    output: pathlib.Path
    cache: pathlib.Path
    method: str
    recipe: Recipe
    data: DataOptions
    train: TrainOptions


def check_recipe(recipe: Recipe, method: str, config: ModelConfig) -> None:
    """Raise ``ValueError`` naming what in ``recipe`` the target does not allow."""
    for layer in recipe.target_layer_ids:
        if not 0 <= layer < config.num_layers:
            raise ValueError(f"--target-layer-ids has {layer}; the target has layers 0 to {config.num_layers - 1}")
    if not 0 <= recipe.noise_token_id < config.vocab_size:
        raise ValueError(f"--mask-token-id is {recipe.noise_token_id}; the vocabulary has {config.vocab_size} ids")
    if not 1 <= recipe.top_k <= recipe.num_experts:
        raise ValueError(f"--draft-top-k is {recipe.top_k} of --draft-experts {recipe.num_experts}")
    if config.hc_kind != "mhc":
        raise ValueError(f"drafts are trained for mHC targets; this one has hc_kind {config.hc_kind!r}")
    if method not in METHODS:
        raise ValueError(f"--method is {method!r}; there are {', '.join(METHODS)}")


def split(data: HiddenData) -> tuple[HiddenData, HiddenData]:
    """The training and the held-out sequences."""
    both = [[q for q, held in enumerate(data.held_out) if held == wanted] for wanted in (False, True)]
    return data.select(both[0]), data.select(both[1])


def train(
    options: RunOptions, group: Group, device: torch.device, progress: ProgressFactory = silent
) -> dict[str, Any]:
    """Run or continue the training of ``options`` and write its checkpoint; the record of the run.

    Collective over ``group``. Raises ``ValueError``, on every rank, for options and files that cannot be used.
    """
    method = METHODS[options.method]

    def load() -> tuple[ModelConfig, Tokenizer, CheckpointReader]:
        config = load_model_config(options.model)
        check_recipe(options.recipe, options.method, config)
        tokenizer = Tokenizer.load(options.model, config.bos_token_id)
        if not config.eos_token_ids:
            raise ValueError(f"{options.model} names no end-of-sequence token")
        return config, tokenizer, CheckpointReader(options.model, config)

    config, tokenizer, reader = all_or_none(load, group)
    wanted = StatesWanted(method.layers(options.recipe, config), method.feature)
    data = prepare(options.model, config, tokenizer, options.data, wanted, options.cache, device, group, progress)
    training, held_out = split(data)
    plain = dataclasses.replace(config, dspark=None, num_nextn_predict_layers=0)
    generator = torch.Generator().manual_seed(options.train.seed)
    draft = method.build(options.recipe, plain, reader, generator, device)
    folder = options.output / "training"
    folder.mkdir(parents=True, exist_ok=True)
    identity = run_identity(options.train, options.method, dataclasses.asdict(options.recipe))
    trainer = Trainer(draft, training, options.train, group, device, folder, identity)
    if all_or_none(trainer.resume, group):
        log.info("continuing at step %d of %d", trainer.step, options.train.steps)
    _loop(trainer, draft, held_out, options, device, progress)
    return _finish(trainer, draft, held_out, options, data, device)


def _loop(trainer: Trainer, draft: Draft, held_out: HiddenData, options: RunOptions, device, progress) -> None:
    bar = (progress if trainer.is_first else silent)("training", options.train.steps - trainer.step, "step")

    def evaluate() -> dict[str, Any]:
        return evaluate_drafts(draft.drafts, held_out, options.train.gamma, device) if trainer.is_first else {}

    try:
        trainer.run(lambda step: bar.update(1), evaluate)
    finally:
        bar.close()


def _finish(trainer: Trainer, draft: Draft, held_out: HiddenData, options: RunOptions, data, device) -> dict[str, Any]:
    """Evaluate and write, on the first rank; the others wait for what it found."""
    record: dict[str, Any] = {}

    def write() -> dict[str, Any]:
        if not trainer.is_first:
            return {}
        found = {
            "method": options.method,
            "steps": trainer.step,
            "recipe": dataclasses.asdict(options.recipe),
            "train": dataclasses.asdict(options.train),
            "data": dataclasses.asdict(options.data) | {"num_tokens": len(data.ids)},
            "held_out": evaluate_drafts(draft.drafts, held_out, options.train.gamma, device, anchors_per_source=2048),
        }
        draft.write(options.model, options.output, found)
        folder = options.output / "training"
        draw_curves(read_log(folder / LOG_NAME), folder / "curves.png")
        return found

    record.update(all_or_none(write, trainer.group))
    return record
