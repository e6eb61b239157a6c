"""Greedy tokens with a draft are those without one: golden continuations of other code, for every kind of draft.

Drafts that are mostly rejected (made-up weights), always kept (a replay of the continuation), kept to any length (a
replay with mistakes), and the model's own. ``scripts/soak_speculation.py greedy`` runs the whole grid, this a part.
"""

import json
import pathlib
from typing import NamedTuple

import numpy as np
import pytest
import torch
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.request import Request, SamplingParams
from dspark.runtime.spec.policy import make_policy
from dspark.runtime.spec.sps import StaircaseTable
from safetensors.torch import load_file

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
MODES = ("static", "sync", "async", "threshold")
DRAFTS = ("noisy", "random", "own", "right")
BATCHES = (1, 3, 12)
HERE = ["mixed_yarn", "fp8_release"]
SHARED = ["sliding_only", "csa_only", "hca_only", "mixed_hash", "softmax_router", "orig_names"]
# Every row costs, by steps of uneven height, as on real devices.
SPS = StaircaseTable(np.array([1, 3, 4, 8, 9, 16, 24, 32, 64]), np.array([100.0, 99, 80, 78, 70, 69, 50, 45, 20]))


class Prompt(NamedTuple):
    """A prompt and what the model says behind it, by other code."""

    ids: tuple[int, ...]
    continuation: list[int]


def golden_prompts():
    """The 12 prompts for the bundled model."""
    items = json.loads((DATA / "models" / "golden.json").read_text())["items"]
    return [Prompt(tuple(item["prompt_ids"]), item["output_ids"]) for item in items]


def short_prompts(most):
    """Those of at most so many tokens."""
    return [prompt for prompt in golden_prompts() if len(prompt.ids) <= most]


def oracle_prompts(folder):
    """The two sequences of a checkpoint with golden tensors: behind its prompt each goes on greedily."""
    golden = load_file(folder / "golden.safetensors")
    cut = int(golden["n_prompt"])
    return [Prompt(tuple(row[:cut]), row[cut:]) for row in golden["input_ids"].tolist()]


def policy_for(mode):
    """The verify policy under test."""
    if mode == "threshold":
        return make_policy("static", threshold=0.5)
    return make_policy(mode, SPS)


def draft_for(drafted, loaded, name, prompts, gamma):
    """What ``engine`` takes as a draft."""
    if name in ("noisy", "right"):
        texts = {str(i): [*prompt.ids, *prompt.continuation] for i, prompt in enumerate(prompts)}
        return drafted.Replay(texts, gamma, loaded.config.vocab_size, wrong=0.3 if name == "noisy" else 0.0)
    return loaded.own if name == "own" else name


def check_greedy(drafted, loaded, prompts, draft, gamma, mode, batch, chunk_size=64, most=20):
    """Run one case, fail on any other token than the golden ones, and return the ``spec`` fields of the requests.

    Requests end at different times: after 1 to ``most`` tokens.
    """
    engine = loaded.engine(draft_for(drafted, loaded, draft, prompts, gamma), gamma, batch, chunk_size=chunk_size)
    engine.set_policy(policy_for(mode))
    counts = [min(1 + (7 * i + 5 * gamma) % most, len(p.continuation)) for i, p in enumerate(prompts)]
    requests = [
        Request(str(i), prompt.ids, SamplingParams(max_new_tokens=count, ignore_eos=True))
        for i, (prompt, count) in enumerate(zip(prompts, counts))
    ]
    found = drafted.run(engine, requests)
    for i, (prompt, count) in enumerate(zip(prompts, counts)):
        ids, reason, _ = found[str(i)]
        what = f"prompt {i}, draft {draft}, gamma {gamma}, {mode}, batch {batch}, chunks of {chunk_size}"
        assert reason == "length", what
        drafted.check_ids(loaded, prompt.ids, prompt.continuation[:count], ids, what)
    return [(count, found[str(i)][2]) for i, count in enumerate(counts)]


def totals(results):
    """Drafted, verified and accepted of all requests."""
    return [sum(spec[name] for _, spec in results) for name in ("drafted", "verified", "accepted")]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gamma", [2, 7])
def test_golden_prompts(drafted, gamma, mode):
    loaded = drafted.alone(bundled_model())
    turn = MODES.index(mode) + gamma
    for i, (draft, chunk_size) in enumerate((("noisy", 64), ("random", 7), ("own", 512))):
        batch = BATCHES[(turn + i) % 3]
        some = golden_prompts() if draft == "noisy" and batch == 12 else short_prompts(110)
        results = check_greedy(drafted, loaded, some, draft, gamma, mode, batch, chunk_size, most=12)
        num_drafted, verified, accepted = totals(results)
        if draft == "noisy":
            assert 0 < accepted < verified
            assert mode == "static" or verified < num_drafted


@pytest.mark.parametrize("batch,gamma", [(1, 7), (3, 1), (12, 4)])
def test_a_right_draft_is_kept_whole(drafted, batch, gamma):
    results = check_greedy(
        drafted, drafted.alone(bundled_model()), golden_prompts(), "right", gamma, "static", batch, chunk_size=512
    )
    for count, spec in results:
        assert spec["verify_ct"] == -(-(count - 1) // (gamma + 1))
        assert spec["verified"] == spec["accepted"] == count - 1 - spec["verify_ct"]


@pytest.fixture(params=HERE + SHARED)
def folder(request):
    if request.param in HERE:
        return DATA / "v4" / request.param
    return request.getfixturevalue("shared") / "oracle" / "v4" / request.param


def test_checkpoints_with_golden_tensors(drafted, folder):
    loaded, prompts = drafted.alone(folder), oracle_prompts(folder)
    most = max(len(prompt.continuation) for prompt in prompts)
    for draft, gamma, mode, batch in (
        ("random", 7, "static", 3),
        ("random", 3, "threshold", 1),
        ("noisy", 5, "sync", 1),
        ("noisy", 7, "async", 3),
        ("right", 6, "static", 3),
    ):
        results = check_greedy(drafted, loaded, prompts, draft, gamma, mode, batch, chunk_size=7, most=most)
        _, verified, accepted = totals(results)
        assert (accepted == verified) if draft == "right" else accepted < verified


def test_stop_ids_cut_inside_a_kept_block(drafted):
    """A stop id among drafts that are all right: the same tokens, reason and counts as without a draft."""
    loaded, short = drafted.alone(bundled_model()), short_prompts(110)[:4]
    requests, expected = [], {}
    for i, prompt in enumerate(short):
        stop = prompt.continuation[3 + 2 * i]
        end = prompt.continuation.index(stop) + 1
        params = SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
        requests.append(Request(str(i), prompt.ids, params))
        expected[str(i)] = (prompt.continuation[:end], "stop")
    for draft in ("none", "random", "right"):
        engine = loaded.engine(draft_for(drafted, loaded, draft, short, 7), 7)
        found = drafted.run(engine, requests)
        assert {name: (ids, reason) for name, (ids, reason, _) in found.items()} == expected
        if draft == "right":
            # A step gives one token more than it keeps, unless it ends inside a block.
            cut = [spec["verify_ct"] + spec["accepted"] - (len(ids) - 1) for ids, _, spec in found.values()]
            assert set(cut) <= {0, 1} and 1 in cut


def on_ranks(rank, world, drafted, cases):
    """Every rank checks every case against the golden tokens."""
    loaded = drafted.Loaded(bundled_model(), Groups.build(Topology(tp=world), rank))
    return [totals(check_greedy(drafted, loaded, short_prompts(110), *case, most=12)) for case in cases]


def test_tensor_parallel(drafted, run_ranks):
    cases = [("noisy", 7, "async", 12), ("random", 3, "sync", 3), ("own", 7, "threshold", 12)]
    first, second = run_ranks(on_ranks, 2, drafted, cases, timeout=240)
    assert first == second and first[0][2] > 0


class Noise:
    """Adds its own noise of ``size`` to what this rank computes, and counts the choices that it turned."""

    def __init__(self, rank):
        self.generator, self.size, self.turned = torch.Generator().manual_seed(100 + rank), 0.0, 0

    def __call__(self, values):
        noisy = values + self.size * torch.randn(values.shape, generator=self.generator)
        self.turned += int((noisy.argmax(-1) != values.argmax(-1)).sum())
        return noisy

    def disturb(self, model):
        """Disturb the target's logits."""
        run_stage = model.run_stage

        def disturbed(*args):
            return tuple(part._replace(logits=self(part.logits)) for part in run_stage(*args))

        model.run_stage = disturbed

    def disturb_draft(self, drafter):
        """Disturb the draft's states, of which its confidences are made, and its logits."""
        forward = drafter.forward
        drafter.forward = lambda requests: tuple(self(values) for values in forward(requests))


def disagreeing(rank, world, drafted, cases):
    """For each case (sizes of noise by rank, temperature): tokens on this rank, and choices that the noise turned."""
    loaded = drafted.Loaded(bundled_model(), Groups.build(Topology(tp=world), rank))
    noise, results = Noise(rank), []
    noise.disturb(loaded.model)
    noise.disturb_draft(loaded.engine(loaded.own, 5).drafter)
    for sizes, temperature in cases:
        noise.size, noise.turned = sizes[rank], 0
        engine = loaded.engine(loaded.own, 5)
        engine.set_policy(policy_for("sync"))
        params = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=temperature)
        found = drafted.run(engine, [Request(str(i), p.ids, params) for i, p in enumerate(short_prompts(40))])
        results.append(([ids for ids, _, _ in found.values()], noise.turned))
    return results


def test_ranks_that_disagree_emit_the_same_tokens(drafted, run_ranks):
    """By rounding, and by so much that the other rank alone would have chosen other tokens."""
    sizes = ((0.0, 0.0), (0.0, 1e-5), (0.0, 1.0), (1e-5, 0.0))
    cases = [(size, temperature) for temperature in (0.0, 0.8) for size in sizes]
    expected = {0.0: [prompt.continuation[:8] for prompt in short_prompts(40)]}
    for case, (ids, _), (other_ids, turned) in zip(cases, *run_ranks(disagreeing, 2, drafted, cases, timeout=240)):
        (own_size, other_size), temperature = case
        assert ids == other_ids, case
        if own_size == 0.0:
            assert ids == expected.setdefault(temperature, ids), case
        assert (turned > 20) == (other_size == 1.0)
