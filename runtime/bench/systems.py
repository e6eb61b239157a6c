"""The system that is measured, behind the interface that its baselines share."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..engine import Engine
from ..load import make_cache
from ..models.base import Model
from ..request import Request, SamplingParams
from .timing import waiter


class Decoded(NamedTuple):
    """A greedy run of some prompts at once. ``token_ids``: new tokens by prompt. ``start``: the clock before prefill;
    ``stamps``, ``counts`` and ``requests``: the clock after every step that gave tokens, how many it gave, and to how
    many prompts. Seconds."""

    token_ids: list[list[int]]
    start: float
    stamps: list[float]
    counts: list[int]
    requests: list[int]

    @property
    def prefill_seconds(self) -> float:
        """From the start to the first tokens."""
        return self.stamps[0] - self.start

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all prompts a second, over the steps after the first: prefill is left out."""
        return sum(self.counts[1:]) / (self.stamps[-1] - self.stamps[0])

    def full_steps(self) -> list[tuple[int, float]]:
        """Tokens and seconds of each step after the first in which every prompt was going on."""
        steps = zip(self.counts[1:], self.requests[1:], self.stamps, self.stamps[1:])
        return [(count, after - before) for count, going, before, after in steps if going == len(self.token_ids)]


class System(Protocol):
    """Something that continues prompts."""

    def decode(self, prompts: Sequence[Sequence[int]], num_new: int) -> Decoded:
        """Greedily ``num_new`` tokens for each of some prompts of one length, ends of sequence ignored."""
        ...


class EngineSystem:
    """The engine, driven step by step as every other user of it does. Its chunk size must hold all prompts, so that
    they start decoding together."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._wait = waiter(engine.cache.page_table.device)

    def decode(self, prompts: Sequence[Sequence[int]], num_new: int) -> Decoded:
        """See :class:`System`."""
        params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
        tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        stamps, counts, requests = [], [], []
        start = time.perf_counter()
        for i, ids in enumerate(prompts):
            self.engine.add(Request(str(i), tuple(ids), params, i))
        while self.engine.has_work():
            events = self.engine.step()
            self._wait()
            fresh = sum(len(event.token_ids) for event in events)
            if fresh:
                stamps.append(time.perf_counter())
                counts.append(fresh)
                requests.append(sum(bool(event.token_ids) for event in events))
            for event in events:
                tokens[event.request_id] += event.token_ids
        return Decoded(list(tokens.values()), start, stamps, counts, requests)


def sibling(engine: Engine, model: Model | None = None, **changes: object) -> Engine:
    """An engine with the weights and the draft of ``engine`` (or another ``model``), a cache of its own and no texts.

    ``changes`` are fields of its :class:`EngineConfig`, such as ``chunk_size``.
    """
    config = dataclasses.replace(engine.config, **changes)
    model = engine.model if model is None else model
    layout, device = engine.cache.layout, engine.cache.page_table.device
    cache = make_cache(model.config, config, device, layout.max_verify, engine.groups.pp, engine.groups.attn_tp.size)
    return Engine(model, engine.drafter, cache, engine.groups, config)


def first_difference(ours: list[list[int]], theirs: list[list[int]]) -> str | None:
    """Where two runs of the same prompts first gave different tokens; None if nowhere."""
    for number, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        for position, pair in enumerate(zip(left, right, strict=True)):
            if pair[0] != pair[1]:
                return f"prompt {number}, new token {position}: {pair[0]} here, {pair[1]} in the baseline"
    return None
