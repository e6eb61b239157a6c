"""From text to what drafts are trained on: sequences, the target's continuations, its hidden states.

Every rank cuts the same sequences, runs the target on its share of them, and then reads the shares of all.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from dataclasses import dataclass

import numpy as np
import torch

from ...comm.collectives import barrier
from ...parallel.groups import Group
from ..checkpoint.folder import read_checkpoint_headers
from ..checkpoint.names import canonical_name
from ..digest import files_digest
from ..model_config import ModelConfig
from ..progress import ProgressFactory, silent
from ..share import all_or_none
from ..tokenizer import Tokenizer
from .documents import TokenSequence, load_sequences
from .hidden_cache import HiddenData, find_shards, read_shards, write_shard
from .target import FeatureKind, FrozenTarget, cut_prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataOptions:
    """Which text, and what is made of it.

    ``max_tokens``: text tokens of each file, in a random order of its documents (``None``: all, in order; 0: none,
    continuations only). ``regenerate``: prompts of each file that the target continues by up to ``regenerate_tokens``
    tokens at the ``temperatures`` in turn. ``turn_token``: prompts end behind one, where a text has one.
    """

    text: tuple[str, ...]
    max_length: int = 512
    max_tokens: int | None = None
    held_out: float = 0.03
    regenerate: int = 0
    regenerate_tokens: int = 96
    temperatures: tuple[float, ...] = (0.0, 1.0)
    turn_token: str = "<|assistant|>"
    cache_dtype: str = "float16"
    seed: int = 0


@dataclass(frozen=True)
class StatesWanted:
    """The target states that a draft method reads."""

    layers: tuple[int, ...]
    feature: FeatureKind


def cache_name(model: pathlib.Path, config: ModelConfig, options: DataOptions, wanted: StatesWanted) -> str:
    """The name of the cache of these options: a digest of the target's files, the text and everything that matters.

    A draft that the checkpoint brings does not: neither its keys nor its shards.
    """
    stored = read_checkpoint_headers(model)
    used = sorted({t.file for name, t in stored.tensors.items() if not canonical_name(name).startswith("mtp.")})
    target = dataclasses.asdict(dataclasses.replace(config, dspark=None, num_nextn_predict_layers=0))
    facts = dataclasses.asdict(options) | {"text": None}
    files = [model / "tokenizer.json", *(stored.files[index] for index in used), *options.text]
    return files_digest(files, target, facts, list(wanted.layers), wanted.feature)[:32]


def text_sequences(options: DataOptions, tokenizer: Tokenizer, eos_token_id: int) -> list[TokenSequence]:
    """The sequences of the text itself."""
    return load_sequences(
        options.text,
        tokenizer,
        eos_token_id,
        max_length=options.max_length,
        held_out_share=options.held_out,
        max_tokens=options.max_tokens or None,
        seed=options.seed,
    )


def prompts_for(
    options: DataOptions, sequences: list[TokenSequence], turn_id: int | None
) -> list[tuple[TokenSequence, tuple[int, ...]]]:
    """``options.regenerate`` prompts of each file, with the sequences they were cut from."""
    result = []
    for source in sorted({sequence.source for sequence in sequences}):
        pool = [sequence for sequence in sequences if sequence.source == source]
        rng = np.random.default_rng([options.seed, len(result)])
        for _ in range(options.regenerate):
            origin = pool[int(rng.integers(len(pool)))]
            ids = origin.ids
            if turn_id is None or turn_id not in ids:
                # Another window of a long text, so that few documents give many different prompts.
                start = 1 + int(rng.integers(max(len(ids) - 128, 1)))
                ids = np.concatenate((ids[:1], ids[start : start + options.max_length // 2]))
            prompt = cut_prompt(ids, turn_id, rng)[: options.max_length - options.regenerate_tokens]
            result.append((origin, prompt))
    return result


def prepare(
    model: pathlib.Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    options: DataOptions,
    wanted: StatesWanted,
    cache: pathlib.Path,
    device: torch.device,
    group: Group,
    progress: ProgressFactory = silent,
) -> HiddenData:
    """The target's states over the text of ``options``, from the folder ``cache`` or computed and kept there.

    Collective over ``group``. Sources of continuations are called after their file and temperature, ``math@0``. Raises
    ``ValueError``, on every rank, for text or options that cannot be used.
    """
    folder = cache / all_or_none(lambda: cache_name(model, config, options, wanted), group)
    num_shards = find_shards(folder)
    if num_shards is None:
        all_or_none(lambda: _compute(model, config, tokenizer, options, wanted, folder, device, group, progress), group)
        barrier(group)
        num_shards = find_shards(folder)
        assert num_shards == group.size
    data = read_shards(folder, num_shards)
    log.info("%d tokens in %d sequences, states in %s", len(data.ids), len(data.sources), folder)
    return data


def _compute(model, config, tokenizer, options, wanted, folder, device, group, progress) -> None:
    """This rank's shard of the cache."""
    sequences = text_sequences(options, tokenizer, config.eos_token_ids[0])
    target = FrozenTarget(
        model,
        config,
        wanted.layers,
        device,
        max_length=options.max_length,
        feature=wanted.feature,
        dtype={"cpu": "float32", "cuda": "bfloat16"}[device.type],
        seed=options.seed,
    )
    mine = [] if options.max_tokens == 0 else sequences[group.rank :: group.size]
    if options.regenerate:
        mine = mine + _continuations(target, tokenizer, options, sequences, group, progress)
    if not mine:
        raise ValueError(f"rank {group.rank} of {group.size} has no sequence; the text is too short for so many ranks")
    bar = progress("target states", sum(len(sequence.ids) for sequence in mine), "tok")
    try:
        write_shard(folder, group.rank, group.size, mine, target, getattr(torch, options.cache_dtype), bar.update)
    finally:
        bar.close()


def _continuations(
    target: FrozenTarget,
    tokenizer: Tokenizer,
    options: DataOptions,
    sequences: list[TokenSequence],
    group: Group,
    progress: ProgressFactory,
) -> list[TokenSequence]:
    """This rank's share of the prompts, continued."""
    prompts = prompts_for(options, sequences, tokenizer.backend.token_to_id(options.turn_token))
    keys = range(group.rank, len(prompts), group.size)
    bar = progress("continuations", len(keys) * options.regenerate_tokens, "tok")
    try:
        texts = target.continue_prompts(
            [prompts[key][1] for key in keys], keys, options.temperatures, options.regenerate_tokens, bar.update
        )
    finally:
        bar.close()
    result = []
    for key, text in zip(keys, texts):
        origin, prompt = prompts[key]
        temperature = options.temperatures[key % len(options.temperatures)]
        if len(text) >= 2:
            ids = np.array(prompt + text, np.int32)
            result.append(TokenSequence(ids, len(prompt), f"{origin.source}@{temperature:g}", origin.held_out))
    return result
