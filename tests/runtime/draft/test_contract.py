"""What every draft must keep to, whatever it proposes: the target's tokens, laws, ends and log-probabilities.

Drafts with made-up weights of each kind, the bundled model's own where it has one, and a replay that is always right.
Greedy tokens are golden continuations of other code. The law of sampled ones is in ``test_exact_law.py``.
"""

import json
import pathlib

import numpy as np
import pytest
import torch
from dspark.layers.draft_heads_host import HostDraftBlock
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.decide import Ends
from dspark.runtime.detokenize import TextTracker
from dspark.runtime.draft import drafter_class, own_draft
from dspark.runtime.draft.none import NoDraft
from dspark.runtime.model_config import load_model_config
from dspark.runtime.request import Request, SamplingParams
from dspark.runtime.spec.policy import make_policy
from dspark.runtime.spec.sps import StaircaseTable
from dspark.runtime.tokenizer import Tokenizer

GOLDEN = json.loads((pathlib.Path(__file__).resolve().parents[2] / "data" / "models" / "golden.json").read_text())[
    "items"
]
SHORT = [i for i, item in enumerate(GOLDEN) if len(item["prompt_ids"]) <= 40]
KINDS = ("dspark", "gated", "rnn", "dflash", "mtp", "own")
MODES = ("static", "sync", "async", "threshold")
BATCHES = (1, 3, 12)
SPS = StaircaseTable(np.array([1, 3, 4, 8, 9, 16, 24, 32, 64]), np.array([100.0, 99, 80, 78, 70, 69, 50, 45, 20]))


@pytest.fixture(params=KINDS)
def kind(request):
    if request.param == "own" and own_draft(load_model_config(bundled_model())) == "none":
        pytest.skip("the bundled model has no draft")
    return request.param


@pytest.fixture
def folder(kind, made_up_draft):
    """A checkpoint whose own draft is of the kind under test."""
    return bundled_model() if kind == "own" else made_up_draft(kind)


def prompt(i):
    return tuple(GOLDEN[i]["prompt_ids"])


def set_mode(engine, mode):
    threshold = 0.5 if mode == "threshold" else None
    engine.set_policy(make_policy("static" if threshold else mode, SPS, threshold))


def check_spec(spec, gamma, num_tokens):
    """The counts of a request that ended by its length fit together."""
    histogram = spec["accept_histogram"]
    assert len(histogram) == gamma + 1 and sum(histogram) == spec["verify_ct"]
    assert sum(k * count for k, count in enumerate(histogram)) == spec["accepted"]
    assert spec["accepted"] <= spec["verified"] <= spec["drafted"] <= gamma * spec["verify_ct"]
    assert spec["drafted"] % gamma == 0
    assert 1 + spec["verify_ct"] + spec["accepted"] == num_tokens
    if spec["verify_ct"]:
        assert spec["accept_length"] == pytest.approx((num_tokens - 1) / spec["verify_ct"])
    if spec["verified"]:
        assert spec["accept_rate"] == pytest.approx(spec["accepted"] / spec["verified"])


def check_greedy(drafted, engine, chosen, mode, most=9):
    """Golden tokens for requests that end at different times; returns the spec fields."""
    set_mode(engine, mode)
    gamma = engine.drafter.gamma
    counts = [1 + (5 * i + gamma) % most for i in chosen]
    requests = [
        Request(str(i), prompt(i), SamplingParams(max_new_tokens=count, ignore_eos=True))
        for i, count in zip(chosen, counts)
    ]
    found = drafted.run(engine, requests)
    loaded = drafted.alone(bundled_model())
    for i, count in zip(chosen, counts):
        ids, reason, spec = found[str(i)]
        what = f"prompt {i}, gamma {gamma}, {mode}"
        assert reason == "length", what
        drafted.check_ids(loaded, prompt(i), GOLDEN[i]["output_ids"][:count], ids, what)
        check_spec(spec, gamma, count)
    return [found[str(i)][2] for i in chosen]


def test_greedy_tokens(drafted, load_draft, kind, folder):
    """Every gamma; verify modes and batch sizes in turns."""
    config = load_model_config(folder)
    draft = drafter_class(own_draft(config))
    modes = MODES if draft.has_confidence(config) else ("static",)
    for gamma in range(1, draft.max_gamma(config) + 1):
        batch = BATCHES[gamma % 3]
        engine = load_draft(folder, gamma=gamma, max_running=batch)
        chosen = range(len(GOLDEN)) if gamma == 5 else SHORT
        specs = check_greedy(drafted, engine, chosen, modes[gamma % len(modes)])
        assert any(spec["verified"] > 0 for spec in specs)
        if kind == "own":
            assert any(spec["accepted"] > 0 for spec in specs)


def test_gamma_beyond_the_draft(load_draft, folder):
    config = load_model_config(folder)
    most = drafter_class(own_draft(config)).max_gamma(config)
    with pytest.raises(ValueError, match=f"--gamma is {most + 1}, but"):
        load_draft(folder, gamma=most + 1)


class Noise:
    """The target's head on this rank, off by noise of a size."""

    def __init__(self, engine, size):
        self.head, self.size, self.generator = engine.model.head, size, torch.Generator().manual_seed(1)
        engine.model.head = self

    def __call__(self, hidden):
        logits = self.head(hidden)
        return logits + self.size * torch.randn(logits.shape, generator=self.generator)


def on_two_ranks(rank, world, load_draft, folder, sizes, sampled):
    engine = load_draft(folder, Groups.build(Topology(tp=world), rank), gamma=4)
    if engine.drafter.has_confidence(load_model_config(folder)):
        set_mode(engine, "sync")
    Noise(engine, sizes[rank])
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=0.8 if sampled else 0.0)
    for i in SHORT[:4]:
        engine.add(Request(str(i), prompt(i), params))
    tokens = {i: [] for i in SHORT[:4]}
    while engine.has_work():
        for event in engine.step():
            tokens[int(event.request_id)] += event.token_ids
    return tokens


@pytest.mark.parametrize(
    "name, size, sampled",
    [("gated", 1e-5, False), ("dflash", 5.0, False), ("mtp", 1e-5, False), ("mtp", 5.0, False), ("mtp", 5.0, True)],
)
def test_ranks_that_disagree(name, size, sampled, made_up_draft, load_draft, run_ranks):
    """By rounding, or so much that the second rank alone would choose other tokens, drafts included."""
    sizes = (0.0, size)
    first, second = run_ranks(on_two_ranks, 2, load_draft, made_up_draft(name), sizes, sampled, timeout=120)
    assert first == second
    assert sampled or first == {i: GOLDEN[i]["output_ids"][:8] for i in SHORT[:4]}


class Right(NoDraft):
    """Proposes the golden continuation of whatever text it has seen of a slot."""

    def __init__(self, gamma):
        self.gamma, self.seen = gamma, {}

    def observe(self, taps, step):
        for token, slot, position in zip(step.tokens.tolist(), *(x.tolist() for x in step.plan.keys[1::-1])):
            self.seen[slot] = [*self.seen.get(slot, [])[:position], token]

    def propose(self, requests, noise):
        drafts = np.zeros((len(requests.slots), self.gamma), np.int64)
        for r, (slot, start, anchor) in enumerate(zip(requests.slots, requests.starts, requests.anchors)):
            text = [*self.seen[slot][:start], anchor]
            whole = ([*item["prompt_ids"], *item["output_ids"]] for item in GOLDEN)
            rest = next(one[len(text) :] for one in whole if one[: len(text)] == text)[: self.gamma]
            drafts[r, : len(rest)] = rest
        return HostDraftBlock(drafts, None, None)


def right_engine(drafted, gamma, text=None):
    """An engine of the bundled model whose drafts are always right."""
    engine = drafted.alone(bundled_model()).engine(Right(gamma), gamma)
    engine._ends = Ends(text)
    return engine


def test_the_targets_own_continuation_is_always_kept(drafted):
    for gamma, batch in ((1, 3), (4, 12), (7, 1)):
        for spec in check_greedy(drafted, right_engine(drafted, gamma), range(len(GOLDEN))[:batch], "static", most=40):
            assert spec["accepted"] == spec["verified"]


def test_stop_ids_inside_a_kept_block(drafted):
    for place in range(1, 9):
        ids = GOLDEN[SHORT[0]]["output_ids"]
        end = ids.index(ids[place]) + 1
        params = SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=(ids[place],))
        found = drafted.run(right_engine(drafted, 7), [Request("a", prompt(SHORT[0]), params)])
        tokens, reason, spec = found["a"]
        assert (tokens, reason) == (ids[:end], "stop")
        # The first token is prefill's; up to eight are one block of seven drafts, the last token its eighth.
        steps = -(-(end - 1) // 8)
        assert spec["verify_ct"] == steps and spec["accepted"] == min(end - 1, 7 * steps)


def test_stop_strings_inside_a_kept_block(drafted):
    """The same tokens and text as without a draft; the text is what stands before the string."""
    tokenizer = Tokenizer.load(bundled_model(), 0)
    for i in SHORT[:3]:
        ids = GOLDEN[i]["output_ids"][:24]
        whole = tokenizer.decode(ids)
        for first in (3, 6, 11):
            stop = whole[first : first + 3]
            params = SamplingParams(max_new_tokens=24, ignore_eos=True, stop=(stop,))
            end = next(n for n in range(1, 25) if stop in tokenizer.decode(ids[:n]))
            for gamma in (0, 7):
                text = TextTracker(tokenizer)
                engine = right_engine(drafted, gamma, text)
                text.add("a", params)
                tokens, reason, spec = drafted.run(engine, [Request("a", prompt(i), params)])["a"]
                assert (tokens, reason) == (ids[:end], "stop")
                assert text.take("a", finished=True) == whole[: whole.index(stop)]
                assert spec is None or spec["accepted"] <= end - 1


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 17])
def test_length_limits_inside_a_kept_block(drafted, count):
    """By the request's own limit, and by the context's."""
    i = SHORT[1]
    for params, context in (
        (SamplingParams(max_new_tokens=count, ignore_eos=True), 512),
        (SamplingParams(max_new_tokens=400, ignore_eos=True), len(prompt(i)) + count),
    ):
        engine = drafted.alone(bundled_model()).engine(Right(7), 7, max_context=context)
        tokens, reason, spec = drafted.run(engine, [Request("a", prompt(i), params)])["a"]
        assert (tokens, reason) == (GOLDEN[i]["output_ids"][:count], "length")
        check_spec(spec, 7, count)
        assert spec["verified"] == spec["accepted"]


def check_logprobs(drafted, engine, i):
    """Log-probabilities of the emitted tokens are the plain model's, over the whole text at once."""
    engine.add(Request("a", prompt(i), SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=2)))
    found = []
    while engine.has_work():
        for event in engine.step():
            assert len(event.logprobs) == len(event.token_ids)
            found += event.logprobs
    ids = GOLDEN[i]["output_ids"][:20]
    law = drafted.alone(bundled_model()).logits([*prompt(i), *ids[:-1]], 20).double().log_softmax(-1)
    assert [one.token_id for one in found] == ids
    top = law.sort(descending=True)
    for row, one in enumerate(found):
        assert one.logprob == pytest.approx(law[row, ids[row]].item(), abs=1e-4)
        assert [token for token, _ in one.top] == top.indices[row, :2].tolist()
        np.testing.assert_allclose([value for _, value in one.top], top.values[row, :2], atol=1e-4)


def test_logprobs_are_the_targets(drafted, load_draft, folder):
    check_logprobs(drafted, load_draft(folder, gamma=3), SHORT[2])


def test_logprobs_of_kept_blocks_are_the_targets(drafted):
    check_logprobs(drafted, right_engine(drafted, 7), SHORT[2])
