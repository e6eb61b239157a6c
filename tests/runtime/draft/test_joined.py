"""A DSpark block, and the taps' way into its rings, as one compiled call each: every bit as operation by operation."""

import numpy as np
import pytest
import torch
from dspark.comm.dispatch import DispatchOptions
from dspark.layers.kernels import Kernels
from dspark.parallel.groups import Groups
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.draft.base import DraftRequests, DraftRoom
from dspark.runtime.draft.dspark import DSparkDrafter
from dspark.runtime.load import make_cache
from dspark.runtime.models.deepseek_v4 import DeepseekV4
from dspark.runtime.step import Span, build_step

pytest.importorskip("numba")

PROMPTS = (150, 3, 64)  # tokens: beyond the window of 64, short, and just as many


def observed(drafter, loaded, config):
    """``drafter`` told of a prefill of all prompts and of a verified block of each; where the requests are then."""
    cache = make_cache(loaded.config, config, torch.device("cpu"), drafter.gamma + 1, loaded.groups.pp, 1)
    slots = [cache.acquire() for _ in PROMPTS]
    rng, starts = np.random.default_rng(7), [0] * len(PROMPTS)
    for sizes in (PROMPTS, (4, 1, drafter.gamma + 1)):
        spans = []
        for i, (slot, size) in enumerate(zip(slots, sizes)):
            cache.reserve(slot, starts[i] + size)
            spans.append(Span(slot, starts[i], rng.integers(8, 1500, size).tolist(), size))
            starts[i] += size
        step = build_step(spans, cache.page_table, cache.layout.ratios, loaded.config.vocab_size)
        drafter.observe(loaded.model.forward(step, cache).taps, step)
    return slots, starts


@pytest.mark.parametrize("draft", ["dspark", "random"])
def test_joined_calls_change_no_bit(drafted, monkeypatch, draft):
    loaded = drafted.Loaded(bundled_model(), Groups.single())
    for gamma in (1, 3, 7):
        config = loaded.engine(gamma=gamma).config
        room = DraftRoom(num_slots=4, max_context=256, max_verify=gamma + 1)
        with monkeypatch.context() as patch:
            joined = loaded._draft(draft, gamma, room)
            patch.setattr(Kernels, "join", lambda self, name, **parts: None)
            apart = loaded._draft(draft, gamma, room)
        assert joined._block is not None and joined._inject is not None and apart._block is apart._inject is None
        for num_requests in (1, 3):
            found = []
            for drafter in (joined, apart):
                slots, starts = observed(drafter, loaded, config)
                anchors = [11, 500, 1400][:num_requests]
                requests = DraftRequests(slots[:num_requests], starts[:num_requests], anchors, (num_requests,))
                found.append((*drafter.forward(requests), *(cache.window for cache in drafter.caches[0].layers)))
            for one, other in zip(*found, strict=True):
                assert torch.isfinite(one).all() and torch.equal(one, other)
            assert found[0][1].shape == (num_requests, gamma, loaded.config.vocab_size)


@pytest.mark.parametrize("dispatcher,joins", [("standard", True), ("low_latency", False)])
def test_a_dispatcher_that_moves_rows_is_not_passed_by(drafted, dispatcher, joins):
    """It sums, and may round, in a way of its own."""
    loaded = drafted.Loaded(bundled_model(), Groups.single())
    config, rest = loaded.config, (loaded.reader, loaded.groups, loaded.kernels)
    options = DispatchOptions(dispatcher, max_tokens_per_rank=16)
    model = DeepseekV4(config, *rest, 64, torch.device("cpu"), config.dspark.target_layer_ids, dispatch=options)
    drafter = DSparkDrafter.load(config, loaded.reader, model, *rest[1:], DraftRoom(2, 64, 8), 7)
    assert (drafter._block is not None) == (drafter._inject is not None) == joins
