"""Engines with every kind of draft, for tests of speculation: made-up weights, the model's own, and replays.

A replay proposes a known continuation, right or with mistakes at fixed places, so blocks are kept to any length.
"""

import dataclasses
import functools
import sys
import warnings

import numpy as np
import pytest
import torch
from dspark.layers.draft_heads_host import HostDraftBlock
from dspark.layers.kernels import choose
from dspark.parallel.groups import Groups
from dspark.runtime.cache import Cache, CacheLayout
from dspark.runtime.checkpoint import CheckpointReader, RandomWeights
from dspark.runtime.draft import drafter_class
from dspark.runtime.draft.base import DraftRoom
from dspark.runtime.draft.none import NoDraft
from dspark.runtime.engine import Engine
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import make_cache
from dspark.runtime.model_config import DSparkConfig, load_model_config
from dspark.runtime.models.deepseek_v4 import DeepseekV4, attention_sizes
from dspark.runtime.step import Span, build_step

CPU = torch.device("cpu")
GAMMA = 7
CONTEXT = 512
TIE = 1e-5


@pytest.fixture
def drafted():
    """This module."""
    return sys.modules[__name__]


class Loaded:
    """A target on this rank with the configs and weights of its drafts; drafts are made on demand and kept."""

    def __init__(self, folder, groups, deterministic=False):
        self.config, self.groups = load_model_config(folder), groups
        self.reader = CheckpointReader(folder, self.config)
        self.kernels = choose(CPU, torch.float32, deterministic)
        own = self.config.dspark
        # Made-up weights take the shape of the model's own draft where it has one: both read the same layers.
        self.with_draft = self.config if own else dataclasses.replace(self.config, dspark=self._dspark())
        taps = self.with_draft.dspark.target_layer_ids
        self.model = DeepseekV4(self.config, self.reader, groups, self.kernels, CONTEXT, CPU, taps)
        self.draft = functools.cache(self._draft)

    def _dspark(self):
        last = self.config.num_layers - 1
        return DSparkConfig(GAMMA, 8, "vanilla", 2, (last,), 4, 2, True, True, True)

    @property
    def own(self):
        """The best draft there is: the model's own, else a made-up one."""
        return "dspark" if self.config.dspark else "random"

    def _draft(self, name, gamma, room):
        source = self.reader if name == "dspark" else RandomWeights(self.with_draft, seed=5)
        made = drafter_class("dspark").load
        return made(self.with_draft, source, self.model, self.groups, self.kernels, room, gamma)

    def engine(self, draft="none", gamma=GAMMA, max_running=4, **options):
        """A fresh engine; ``draft``: "none", "random", "dspark", or a :class:`Replay`."""
        options = {"chunk_size": 64, "max_context": CONTEXT, "seed": 0, "draft": "none"} | options
        config = resolve(
            EngineConfig(max_running=max_running, dtype="float32", **options),
            model_dir="",
            device_type="cpu",
            max_positions=CONTEXT,
            own_draft="none",
        )
        drafter = draft
        if draft == "none":
            drafter, gamma = NoDraft(), 0
        elif isinstance(draft, str):
            drafter = self.draft(draft, gamma, DraftRoom(max_running, CONTEXT, 2 * (1 + GAMMA)))
        gamma = drafter.gamma
        cache = make_cache(self.config, config, CPU, 1 + gamma, self.groups.pp)
        engine = Engine(self.model, drafter, cache, self.groups, config)
        if isinstance(draft, Replay):
            draft.states = lambda: engine._states.values()
        return engine

    def logits(self, tokens, num_logits):
        """The last ``num_logits`` rows [n, V] of one forward over ``tokens``, alone and from an empty cache."""
        layers = tuple(attention_sizes(self.config, layer) for layer in range(self.config.num_layers))
        layout = CacheLayout(layers, 1, 4)
        cache = Cache(layout, 1, max(layout.pages_for(CONTEXT), 1), CONTEXT, CPU, torch.float32)
        assert cache.reserve(cache.acquire(), len(tokens))
        step = build_step([Span(0, 0, tokens, num_logits)], cache.page_table, layout.ratios, self.config.vocab_size)
        return self.model.forward(step, cache).logits


@functools.cache
def alone(folder, deterministic=False):
    """One :class:`Loaded` of a folder for the tests on one rank."""
    return Loaded(folder, Groups.single(), deterministic)


class Replay(NoDraft):
    """Proposes ``texts[request_id]`` (prompt and continuation) from where the request is.

    ``wrong``: share of the places at which something else is proposed. Confidences are made up; they depend on places,
    not on tokens, so that a sampled request may be trimmed by them. Laws are one-point, as the drafts are.
    """

    def __init__(self, texts, gamma, vocab_size, wrong=0.0):
        self.texts, self.gamma, self.vocab_size, self.wrong = texts, gamma, vocab_size, wrong
        self.states = None

    def propose(self, requests, noise):
        if noise is None:
            return None
        by_slot = {state.slot: state for state in self.states() if state.slot >= 0}
        drafts = np.zeros((len(requests.slots), self.gamma), np.int64)
        confidence = np.zeros(drafts.shape)
        for r, (slot, start) in enumerate(zip(requests.slots, requests.starts)):
            state = by_slot[slot]
            assert len(state.tokens) == start + 1 and state.tokens[-1] == requests.anchors[r]
            text = self.texts[state.request.request_id][start + 1 : start + 1 + self.gamma]
            dice = np.random.default_rng([start, len(text), state.number]).random((2, self.gamma))
            drafts[r, : len(text)] = text
            drafts[r] = np.where(dice[0] < self.wrong, (drafts[r] + 1) % self.vocab_size, drafts[r])
            confidence[r] = 6 * dice[1] - 1
        probs = None
        if noise.temperatures is not None:
            probs = np.eye(self.vocab_size)[drafts]
        return HostDraftBlock(drafts, probs, confidence)


def run(engine, requests):
    """``{request_id: (token ids, finish reason, spec)}`` of all requests, added together."""
    for one in requests:
        engine.add(one)
    tokens, ends = {one.request_id: [] for one in requests}, {}
    while engine.has_work():
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
            if event.finish_reason:
                ends[event.request_id] = (event.finish_reason, event.spec)
    assert engine.cache.bytes_in_use == 0
    return {name: (ids, *ends[name]) for name, ids in tokens.items()}


def check_ids(loaded, prompt, expected, got, what, penalise=lambda logits, tokens: logits):
    """Fail unless ``got`` is ``expected``, or parts from it at a tie: two logits within 1e-5, which is reported."""
    if got == expected:
        return
    assert len(got) == len(expected), f"{what}: {len(got)} tokens, not {len(expected)}"
    at = next(i for i, (a, b) in enumerate(zip(got, expected)) if a != b)
    tokens = [*prompt, *expected[:at]]
    row = penalise(loaded.logits(tokens, 1)[0], tokens)
    gap = abs(float(row[got[at]] - row[expected[at]]))
    assert gap <= TIE, f"{what}: token {at} is {got[at]}, not {expected[at]}; their logits differ by {gap:.2e}"
    warnings.warn(f"{what}: a tie of {gap:.1e} at token {at}", stacklevel=2)
