"""Penalties, bias and minimum length in the engine: with any draft the tokens and laws of decoding one at a time.

The reference is a loop in plain Python over whole forwards, one for each token.
"""

import dataclasses
import itertools
import json
import math
import pathlib

import numpy as np
import pytest
import torch
from dspark.runtime import decide, penalised
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.cli import main
from dspark.runtime.decide import Decider, Drafted
from dspark.runtime.outcome import Outcome
from dspark.runtime.random import Purpose
from dspark.runtime.request import Request, SamplingParams, sampling_from_dict, validate_request
from dspark.runtime.sequence import RequestState
from dspark.runtime.spec.rows import PackedRows
from dspark.runtime.spec.schedule import StaticPolicy

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
GOLDEN = [
    item for item in json.loads((DATA / "models" / "golden.json").read_text())["items"] if len(item["prompt_ids"]) <= 40
]
NUM_TOKENS = 12
PLAIN = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
SETTINGS = [
    {"repetition_penalty": 9.0, "frequency_penalty": 1.6, "presence_penalty": 1.3},
    {"repetition_penalty": 0.7, "frequency_penalty": -1.5, "presence_penalty": -0.5},
    {},
    {"min_tokens": 7},
    {"repetition_penalty": 0.8, "presence_penalty": 2.0, "min_tokens": 4},
]


def params_for(i):
    """Settings of prompt ``i``; biases and stop ids are tokens that the model would choose early."""
    likely = GOLDEN[i]["output_ids"]
    extra = {"logit_bias": {likely[0]: -30.0, likely[3]: 2.5}} if i % 2 else {}
    stops = (likely[1], likely[4]) if "min_tokens" in SETTINGS[i] else ()
    return dataclasses.replace(PLAIN, **SETTINGS[i], **extra, stop_token_ids=stops)


def one_by_one(row, prompt, output, params):
    """The logits [V] float64 that the token behind ``prompt`` and ``output`` is chosen from."""
    out = [float(x) for x in row]
    for token in {*prompt, *output}:
        out[token] = (
            out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        )
    for token in set(output):
        out[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in params.logit_bias:
        out[token] += bias
    if len(output) < params.min_tokens:
        for token in params.stop_token_ids:
            out[token] = -math.inf
    return np.array(out)


def decode(loaded, prompt, params):
    """Greedy ids, and each one's log-probability by the model's own law."""
    output, logprobs = [], []
    while len(output) < params.max_new_tokens and not (output and output[-1] in params.stop_token_ids):
        row = loaded.logits([*prompt, *output], 1)[0]
        token = int(one_by_one(row, prompt, output, params).argmax())
        logprobs.append(float(row.double().log_softmax(-1)[token]))
        output.append(token)
    return output, logprobs


@pytest.fixture(scope="module")
def expected():
    """Filled by the first test that asks: prompt number -> what :func:`decode` gives."""
    return {}


def reference(loaded, expected):
    for i in range(len(SETTINGS)):
        if i not in expected:
            expected[i] = decode(loaded, GOLDEN[i]["prompt_ids"], params_for(i))
    return expected


def replay(drafted, loaded, expected, wrong=0.0):
    texts = {str(i): [*GOLDEN[i]["prompt_ids"], *ids] for i, (ids, _) in expected.items()}
    return drafted.Replay(texts, 7, loaded.config.vocab_size, wrong)


def requests():
    return [Request(str(i), tuple(GOLDEN[i]["prompt_ids"]), params_for(i)) for i in range(len(SETTINGS))]


def check(drafted, loaded, expected, found, what):
    for i, (ids, _) in expected.items():
        prompt, params = GOLDEN[i]["prompt_ids"], params_for(i)

        def row_of(logits, tokens, prompt=prompt, params=params):
            return one_by_one(logits, prompt, tokens[len(prompt) :], params)

        drafted.check_ids(loaded, prompt, ids, found[str(i)][0], f"prompt {i}, {what}", row_of)


def test_the_settings_matter(drafted, expected):
    reference(drafted.alone(bundled_model()), expected)
    changed = [expected[i][0] != GOLDEN[i]["output_ids"][:NUM_TOKENS] for i in range(len(SETTINGS))]
    assert changed == [True, True, False, True, True]
    lengths = [len(expected[i][0]) for i in (3, 4)]
    assert all(params_for(i).min_tokens < length for i, length in zip((3, 4), lengths))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("draft", ["none", "random", "own", "right", "noisy"])
def test_greedy_tokens_are_those_of_one_at_a_time(drafted, expected, draft, batch):
    loaded = drafted.alone(bundled_model())
    reference(loaded, expected)
    made = {
        "right": lambda: replay(drafted, loaded, expected),
        "noisy": lambda: replay(drafted, loaded, expected, wrong=0.3),
        "own": lambda: loaded.own,
    }.get(draft, lambda: draft)()
    found = drafted.run(loaded.engine(made, 7, batch, chunk_size=16), requests())
    check(drafted, loaded, expected, found, f"draft {draft}, batch {batch}")
    # Where a stop id ends a block, the drafts behind it were verified for nothing.
    specs = [spec for _, reason, spec in found.values() if reason == "length"]
    if draft == "right":
        assert all(spec["accepted"] == spec["verified"] > 0 for spec in specs)
    if draft == "noisy":
        assert all(0 < spec["accepted"] < spec["verified"] for spec in specs)


def test_one_penalty_for_a_whole_block_would_be_noticed(drafted, expected, monkeypatch):
    """The mistake: every row of a block penalised as if no draft before it were written."""
    loaded, right = drafted.alone(bundled_model()), penalised.penalise
    reference(loaded, expected)

    def same_for_all(logits, rows, drafts, written, params):
        blind = dataclasses.replace(rows)
        blind.__dict__["offset"] = np.zeros_like(rows.offset)
        return right(logits, blind, drafts, written, params)

    monkeypatch.setattr(penalised, "penalise", same_for_all)
    found = drafted.run(loaded.engine(replay(drafted, loaded, expected), 7), requests())
    assert found["1"][0] != expected[1][0] and found["2"][0] == expected[2][0]


def test_without_penalties_nothing_is_computed(drafted, monkeypatch):
    def fail(*_):
        raise AssertionError("no request of this step has penalties")

    monkeypatch.setattr(penalised, "penalise", fail)
    loaded = drafted.alone(bundled_model())
    one = Request("0", tuple(GOLDEN[0]["prompt_ids"]), PLAIN)
    found = drafted.run(loaded.engine("random", 3), [one])
    assert found["0"][0] == GOLDEN[0]["output_ids"][:NUM_TOKENS]
    state = RequestState.start(one, 64, (), 0, 0, 0, 0)
    logits = torch.randn(1, 8)
    assert penalised.penalised(logits, [state], PackedRows.from_lens([0], 0), np.zeros((1, 0), np.int64)) is logits


def test_only_rows_of_requests_that_ask_are_changed():
    logits = torch.randn(5, 16)
    before = logits.clone()
    params = [PLAIN, dataclasses.replace(PLAIN, frequency_penalty=1.0)]
    states = [RequestState.start(Request(str(i), (1, 2), p), 64, (), 0, 2, i, 0) for i, p in enumerate(params)]
    for state in states:
        state.tokens += [3, 3, 4]
    out = penalised.penalised(logits, states, PackedRows.from_lens([1, 2], 2), np.array([[3, 5], [3, 5]]))
    assert torch.equal(logits, before) and torch.equal(out[:2], logits[:2])
    wanted = torch.zeros(3, 16)
    wanted[0, [3, 4]] = torch.tensor([2.0, 1.0])
    wanted[1, [3, 4]] = torch.tensor([3.0, 1.0])
    wanted[2, [3, 4, 5]] = torch.tensor([3.0, 1.0, 1.0])
    torch.testing.assert_close(logits[2:] - out[2:], wanted, atol=1e-6, rtol=0)


def test_log_probabilities_stay_the_models_own(drafted, expected):
    loaded = drafted.alone(bundled_model())
    reference(loaded, expected)
    for draft in ("none", replay(drafted, loaded, expected, wrong=0.2)):
        engine = loaded.engine(draft, 7)
        for one in requests():
            engine.add(dataclasses.replace(one, params=dataclasses.replace(one.params, logprobs=0)))
        found = {str(i): [] for i in expected}
        while engine.has_work():
            for event in engine.step():
                found[event.request_id] += [entry.logprob for entry in event.logprobs]
        for i, (_, logprobs) in expected.items():
            np.testing.assert_allclose(found[str(i)], logprobs, atol=1e-4, rtol=0)


# The law of sampled tokens, exactly: a toy of V tokens of which the last is a stop id, blocks of two drafts.

V, GAMMA, COUNT = 3, 2, 3
TOY = SamplingParams(
    max_new_tokens=COUNT,
    temperature=0.8,
    repetition_penalty=1.5,
    frequency_penalty=0.9,
    presence_penalty=0.4,
    logit_bias={1: 0.7},
    min_tokens=2,
    stop_token_ids=(V - 1,),
)
PROMPT = (0, 1)


def toy_logits(output):
    return np.random.default_rng([7, len(output), *output]).normal(size=V) * 1.5


def toy_p(output):
    """The law behind ``output``, one token at a time."""
    scaled = one_by_one(toy_logits(output), PROMPT, list(output), TOY) / TOY.temperature
    masses = np.exp(scaled - scaled.max())
    return masses / masses.sum()


def toy_q(output):
    return np.random.default_rng([8, len(output), *output]).dirichlet(np.ones(V))


def ended(output):
    return len(output) == COUNT or output[-1:] == (V - 1,)


def go_on(output, mass, law):
    """Add what the target says behind ``output``."""
    if ended(output):
        law[output] = law.get(output, 0.0) + mass
        return
    for token, p in enumerate(toy_p(output)):
        if p > 0:
            go_on((*output, token), mass * p, law)


def cells(points):
    """Midpoints and widths of the pieces of [0, 1) between ``points``."""
    edges = np.array([0.0, *sorted(x for x in points if 0 < x < 1), 1.0])
    keep = np.diff(edges) > 1e-14
    return ((edges[1:] + edges[:-1]) / 2)[keep], np.diff(edges)[keep]


def toy_rounds(output):
    """Every (drafts, probability, coins, final draw) behind ``output``, the random numbers by pieces."""
    for drafts in itertools.product(range(V), repeat=GAMMA):
        p = [toy_p((*output, *drafts[:k])) for k in range(GAMMA + 1)]
        q = [toy_q((*output, *drafts[:k])) for k in range(GAMMA)]
        coins = [{p[k][drafts[k]] / q[k][drafts[k]]} for k in range(GAMMA)]
        laws = [*p, *(np.maximum(p[k] - q[k], 0.0) for k in range(GAMMA))]
        finals = {x for law in laws for x in (law.cumsum() / law.sum()).tolist()}
        axes = [cells(points) for points in (*coins, finals)]
        drawn = q[0][drafts[0]] * q[1][drafts[1]]
        for values, widths in zip(
            itertools.product(*(points for points, _ in axes)), itertools.product(*(sizes for _, sizes in axes))
        ):
            yield drafts, drawn * math.prod(widths), values[:GAMMA], values[GAMMA]


def speculated(monkeypatch):
    """The law of whole outputs when the first token is given and one block is verified by the engine's judge."""
    cases = [(x, toy_p(())[x], *one) for x in range(V) if toy_p(())[x] > 0 for one in toy_rounds((x,))]
    states = []
    for number, case in enumerate(cases):
        states.append(RequestState.start(Request(str(number), PROMPT, TOY), 64, (), 0, GAMMA, number, 0))
        states[-1].tokens.append(case[0])
    drafts = np.array([case[2] for case in cases])
    outputs = [[(x, *d[:k]) for k in range(GAMMA + 1)] for x, _, d, *_ in cases]
    logits = torch.tensor(np.array([toy_logits(output) for block in outputs for output in block]))
    probs = np.array([[toy_q(output) for output in block[:GAMMA]] for block in outputs])
    numbers = {Purpose.ACCEPT: np.array([case[4] for case in cases]), Purpose.TARGET: np.array([[c[5]] for c in cases])}
    monkeypatch.setattr(decide, "_block_uniforms", lambda states, width, purpose: numbers[purpose])
    drafted = Drafted(drafts, np.full(len(cases), GAMMA), probs, proposed=np.full(len(cases), GAMMA))
    table = Decider(GAMMA, StaticPolicy()).judge(states, len(states), logits, drafted)
    law = {}
    for (x, first, _, mass, _, _), row in zip(cases, table.tolist()):
        go_on((x, *Outcome.from_row(row).tokens)[:COUNT], first * mass, law)
    return law


def test_the_sampled_law_is_that_of_one_at_a_time(monkeypatch):
    expected = {}
    go_on((), 1.0, expected)
    assert min(len(output) for output in expected) == COUNT and abs(sum(expected.values()) - 1) < 1e-12
    law = speculated(monkeypatch)
    assert law.keys() == expected.keys()
    assert max(abs(law[output] - expected[output]) for output in law) < 1e-12
    # The same with penalties that do not see the drafts: another law.
    right = penalised.penalise

    def blind(logits, rows, drafts, written, params):
        return right(logits, rows, torch.zeros_like(drafts), written, params)

    monkeypatch.setattr(penalised, "penalise", blind)
    biased = speculated(monkeypatch)
    assert max(abs(biased.get(output, 0.0) - expected[output]) for output in expected) > 1e-3


BAD = [
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 1e-30),
    ("repetition_penalty", 101),
    ("repetition_penalty", float("nan")),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", "much"),
    ("min_tokens", -1),
    ("min_tokens", 65),
    ("min_tokens", 1.5),
    ("logit_bias", 3),
    ("logit_bias", [1, 2]),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {True: 1.0}),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {1: float("inf")}),
    ("logit_bias", {1: "1"}),
    ("logit_bias", [(1, 2.0), (1, "x")]),
    ("logit_bias", dict.fromkeys(range(1025), 0.0)),
    ("logit_bias", {"9" * 5000: 0.0}),
]


@pytest.mark.parametrize("name,value", BAD, ids=lambda v: str(v)[:20])
def test_values_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}.*; allowed: ") as error:
        SamplingParams(**{name: value}).validate()
    assert len(str(error.value)) < 300


def test_biases_in_every_form_are_the_same():
    wanted = SamplingParams(logit_bias=((2, -1.0), (17, 5)))
    assert wanted == SamplingParams(logit_bias={17: 5, 2: -1.0})
    assert wanted == sampling_from_dict(json.loads('{"logit_bias": {"17": 5, "2": -1.0}}'), SamplingParams())
    assert wanted == SamplingParams(**json.loads(json.dumps(dataclasses.asdict(wanted))))
    assert wanted.penalises and not SamplingParams().penalises and hash(wanted)
    request = Request("r", (1,), wanted)
    validate_request(request, vocab_size=18, max_context=9)
    with pytest.raises(ValueError, match="'r'.*logit_bias id 17 .* vocabulary of 17"):
        validate_request(request, vocab_size=17, max_context=9)


def test_flags_and_lines_of_a_file(tmp_path, capsys):
    banned = GOLDEN[0]["output_ids"][0]
    ids = {"token_ids": GOLDEN[0]["prompt_ids"]}
    lines = [{**ids}, {**ids, "logit_bias": {str(banned): 0}}, {**ids, "min_tokens": 9}]
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    flags = ["--max-new-tokens", "3", "--draft", "none", "--ignore-eos", "--json"]
    assert main(["generate", "--input", str(file), "--logit-bias", f"{banned}=-100", *flags]) == 0
    first, second, third = json.loads(capsys.readouterr().out)["outputs"]
    assert banned not in first["token_ids"] and second["token_ids"] == GOLDEN[0]["output_ids"][:3]
    assert "min_tokens is 9; allowed: at most max_new_tokens, 3" in third["error"]
