"""Engines whose experts are placed, counted and moved, on one rank or many."""

import dataclasses
import random
import sys

import pytest
import torch
from dspark.parallel.groups import Groups
from dspark.runtime.balance import expert_links
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import load_engine
from dspark.runtime.model_config import load_model_config
from dspark.runtime.request import Request, SamplingParams

LENGTHS = (1, 37, 5, 60, 18)


@pytest.fixture
def placed():
    """This module."""
    return sys.modules[__name__]


def make_engine(topology, rank, **options):
    """An engine on the bundled model; collective over the ranks of ``topology`` (None: one rank)."""
    folder = bundled_model()
    model = load_model_config(folder)
    defaults = {"max_running": len(LENGTHS), "max_context": 256, "chunk_size": 32}
    config = resolve(
        EngineConfig(model=str(folder), **defaults | options),
        model_dir=str(folder),
        device_type="cpu",
        max_positions=model.max_position_embeddings,
        own_draft="dspark",
    )
    groups = Groups.single() if topology is None else Groups.build(topology, rank)
    links = expert_links(config, groups)
    config = dataclasses.replace(config, dtype="float32")
    return load_engine(config, groups, torch.device("cpu"), model_config=model, links=links)


def run(engine, num_new=16, before_step=lambda step: None):
    """The greedy ids of five requests, each joining two steps after the one before."""
    numbers = random.Random(7)
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
    vocab_size = engine.model.config.vocab_size
    prompts = [tuple(numbers.randrange(vocab_size) for _ in range(length)) for length in LENGTHS]
    waiting = [Request(str(i), prompt, params, i) for i, prompt in enumerate(prompts)]
    ids, steps = [[] for _ in prompts], 0
    while waiting or engine.has_work():
        if waiting and steps % 2 == 0:
            engine.add(waiting.pop(0))
        before_step(steps)
        for event in engine.step():
            ids[int(event.request_id)] += event.token_ids
        steps += 1
    return ids
