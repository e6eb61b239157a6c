"""Steps that do not draft are taken in later, together; drafts that follow are those of a draft told at once."""

import numpy as np
import pytest
import torch
from dspark.runtime.bench.systems import sibling
from dspark.runtime.llm import LLM
from dspark.runtime.request import Request, SamplingParams
from dspark.runtime.spec.schedule import FixedPolicy


@pytest.fixture(scope="module")
def llm():
    llm = LLM(max_running=3, max_context=512, chunk_size=96)
    yield llm
    llm.close()


def promises(engine, policies, join_at=9, most=300):
    """The confidence logits of every step that verifies drafts, under ``policies`` step by step. Three requests, of
    which one comes later and another ends early."""
    engine, seen = sibling(engine), []
    engine.record(lambda logits, lens, accepted, emitted: lens.any() and seen.append(logits.copy()))
    ids = [0, *np.random.default_rng(0).integers(8, 1500, 90).tolist()]

    def add(name, prompt, count):
        engine.add(Request(name, tuple(prompt), SamplingParams(max_new_tokens=count, ignore_eos=True)))

    add("long", ids, most)
    add("short", ids[:20], 30)
    for step, policy in enumerate(policies):
        if step == join_at:
            add("late", ids[:40], most)
        engine.set_policy(policy)
        engine.step()
    return seen


def same(left, right):
    assert len(left) == len(right) > 0
    for one, other in zip(left, right):
        assert np.abs(one - other).max() < 1e-4


@pytest.mark.parametrize("skipped", [1, 5, 40, 100])
def test_drafts_behind_skipped_steps(llm, skipped):
    """100 steps without a draft are more than the window of 64."""
    drafts = [FixedPolicy(2)] * 3
    late = [FixedPolicy(None)] * (12 + skipped) + drafts + [FixedPolicy(None)] * 2 + drafts
    at_once = [FixedPolicy(0) if policy.length is None else policy for policy in late]
    same(promises(llm._session.engine, late), promises(llm._session.engine, at_once))


def test_many_pending_rows_are_taken_in_on_the_way(llm, monkeypatch):
    late = [FixedPolicy(None)] * 60 + [FixedPolicy(2)] * 3
    expected = promises(llm._session.engine, late)
    for most in (1, 7, 50):
        monkeypatch.setattr("dspark.runtime.draft.dspark.MAX_PENDING", most)
        same(promises(llm._session.engine, late), expected)


@pytest.mark.parametrize("num_slots,num_first", [(1, 20), (2, 20), (2, 60)])
def test_what_is_pending_is_in_the_rings_before_they_are_copied(num_slots, num_first):
    """A request goes on behind a stored prefix while steps of another wait, whose slot it may have got; its drafts are
    those of a run without stored prefixes."""
    prompt = (0, *np.random.default_rng(1).integers(8, 1500, 299).tolist())
    found = []
    for stored in (True, False):
        llm = LLM(max_running=num_slots, max_context=512, chunk_size=512, prefix_cache=stored)
        engine, seen = llm._session.engine, []
        engine.record(lambda logits, lens, accepted, emitted, seen=seen: lens.any() and seen.append(logits[-1]))
        engine.set_policy(FixedPolicy(None))
        emitted = {"first": 0, "second": 0}

        def step(emitted=emitted, engine=engine):
            for event in engine.step():
                emitted[event.request_id] += len(event.token_ids)

        engine.add(Request("first", prompt, SamplingParams(max_new_tokens=num_first, ignore_eos=True)))
        while emitted["first"] < 20:
            step()
        engine.add(Request("second", prompt, SamplingParams(max_new_tokens=100, ignore_eos=True)))
        while emitted["second"] < 1:
            step()
        engine.set_policy(FixedPolicy(3))
        for _ in range(4):
            step()
        assert engine.take_counts().hits == stored
        found.append(seen)
        llm.close()
    same(*found)


def test_memory_of_pending_rows_is_bounded(llm):
    engine = llm._session.engine
    promises(engine, [FixedPolicy(None)] * 200)
    drafter = engine.drafter
    held = sum(len(taps) for taps, _ in drafter._pending)
    assert 0 < held == drafter._num_pending <= 2048 + 3
    drafter.settle()
    assert drafter._num_pending == 0 and not drafter._pending and torch.isfinite(drafter._cache.layers[0].window).all()
