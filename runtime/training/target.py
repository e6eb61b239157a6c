"""The frozen target on one rank: continuations of prompts, and the hidden states that a draft is trained on.

Legend: T tokens, D hidden width, m target layers that the draft reads.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch

from ...parallel.groups import Groups
from ..engine_config import EngineConfig, resolve
from ..load import load_engine
from ..model_config import ModelConfig
from ..request import Request, SamplingParams
from ..step import Span, build_step

FeatureKind = Literal["mean", "streams"]


class TargetStates(NamedTuple):
    """What the target made of a sequence: ``features`` of each layer read, in order of the layers, and ``hidden``
    [T, D], normed, whose product with the head is the law of the next token.

    ``features`` are [T, m D], the mean of the residual streams after each layer (kind ``"mean"``), or [T, m n D], all n
    streams of each (``"streams"``).
    """

    features: torch.Tensor
    hidden: torch.Tensor


class FrozenTarget:
    """A target of one rank, for sequences of up to ``max_length`` tokens. ``seed`` keys what it samples."""

    def __init__(
        self,
        folder: str | pathlib.Path,
        config: ModelConfig,
        tap_layers: tuple[int, ...],
        device: torch.device,
        *,
        max_length: int,
        feature: FeatureKind = "mean",
        max_running: int = 64,
        dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        options = EngineConfig(max_running=max_running, max_context=max_length, dtype=dtype, seed=seed, draft="none")
        where = {"model_dir": str(folder), "device_type": device.type}
        self._options = resolve(options, **where, max_positions=config.max_position_embeddings, own_draft="none")
        self._engine = load_engine(self._options, Groups.single(), device, model_config=config)
        self._config, self._tap_layers, self._feature = config, tap_layers, feature

    def states(self, sequences: Sequence[np.ndarray], tokens_per_step: int = 4096) -> Iterator[TargetStates]:
        """The states of each sequence, in order; several whole sequences share a forward."""
        start = 0
        while start < len(sequences):
            stop, num_tokens = start, 0
            while (
                stop < len(sequences)
                and stop - start < self._options.max_running
                and (stop == start or num_tokens + len(sequences[stop]) <= tokens_per_step)
            ):
                num_tokens += len(sequences[stop])
                stop += 1
            yield from self._forward(sequences[start:stop])
            start = stop

    def _forward(self, sequences: Sequence[np.ndarray]) -> Iterator[TargetStates]:
        model, cache = self._engine.model, self._engine.cache
        slots = [cache.acquire() for _ in sequences]
        hidden: list[torch.Tensor] = []
        features: list[torch.Tensor] = []

        def probe(name: str, layer: int, value: torch.Tensor) -> None:
            if name == "final_norm":
                hidden.append(value)
            elif name == "streams" and layer in self._tap_layers:
                features.append(value.mean(dim=1) if self._feature == "mean" else value.flatten(1))

        try:
            for slot, ids in zip(slots, sequences):
                if not cache.reserve(slot, len(ids)):
                    raise ValueError(f"a sequence of {len(ids)} tokens does not fit the cache")
            spans = [Span(slot, 0, ids.tolist(), len(ids)) for slot, ids in zip(slots, sequences)]
            step = build_step(spans, cache.page_table, cache.layout.ratios, self._config.vocab_size)
            model.forward(step, cache, probe)
        finally:
            for slot in slots:
                cache.release(slot)
        lengths = [len(ids) for ids in sequences]
        yield from map(TargetStates, torch.cat(features, dim=-1).split(lengths), hidden[0].split(lengths))

    def continue_prompts(
        self,
        prompts: Sequence[tuple[int, ...]],
        keys: Sequence[int],
        temperatures: Sequence[float],
        max_new_tokens: int,
        progress: Callable[[int], None] | None = None,
    ) -> list[tuple[int, ...]]:
        """What the target says after each prompt (without it), up to its end-of-sequence token or ``max_new_tokens``.

        A prompt's key (unique) names its random numbers and picks its temperature, ``temperatures[key % len]``; 0 is
        greedy. ``progress`` is told new tokens.
        """
        names = [f"train-{key}" for key in keys]
        for arrival, (name, key, prompt) in enumerate(zip(names, keys, prompts)):
            temperature = temperatures[key % len(temperatures)]
            params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
            self._engine.add(Request(name, prompt, params, arrival))
        result: dict[str, list[int]] = {name: [] for name in names}
        while self._engine.has_work():
            events = self._engine.step()
            for event in events:
                result[event.request_id] += event.token_ids
            if progress is not None:
                progress(sum(len(event.token_ids) for event in events))
        return [tuple(result[name]) for name in names]


def cut_prompt(ids: np.ndarray, turn_id: int | None, rng: np.random.Generator) -> tuple[int, ...]:
    """A prompt from a sequence: up to and including one of its ``turn_id`` tokens (such as ``<|assistant|>``), or,
    without one, its first 16 to 64 tokens, never more than half of it."""
    turns = np.flatnonzero(ids == turn_id) if turn_id is not None else ()
    if len(turns):
        stop = int(turns[rng.integers(len(turns))]) + 1
    else:
        stop = min(int(rng.integers(16, 65)), max(len(ids) // 2, 2))
    return tuple(ids[:stop].tolist())
