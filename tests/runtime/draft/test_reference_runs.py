"""Drafts on a dense target against runs of other code: states, logits, what is kept and what comes out."""

import numpy as np
import pytest
import torch
from dspark.layers.attention.plan import build_plan
from dspark.runtime.request import Request, SamplingParams

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def folders(dense):
    """Checkpoints of the drafts by name."""
    made = {}
    for name in ("dspark", "dflash", "eagle3"):
        meta, tensors = dense.stored(name)
        tensors = {k.removeprefix("draft."): v for k, v in tensors.items() if k.startswith("draft.")}
        made[name] = dense.write(f"stored_{name}", meta["draft"] | {"dtype": "float32"}, tensors)
    return made


def run(engine, requests):
    tokens = {one.request_id: [] for one in requests}
    for one in requests:
        engine.add(one)
    while engine.has_work():
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return tokens


class Watch:
    """Notes every block of an engine's drafter, and what became of it."""

    def __init__(self, engine):
        self.blocks, self.verdicts, drafter = [], [], engine.drafter
        forward = drafter.forward

        def noted(requests):
            hidden, logits = forward(requests)
            self.blocks.append((requests.starts[0], requests.anchors[0], hidden[0], logits[0]))
            return hidden, logits

        drafter.forward = noted
        engine.record(lambda confidence, lens, kept, emitted: self.verdicts.append((confidence, int(kept[0]))))


def test_dspark_against_its_own_code(dense, folders):
    """Every cycle of a greedy run: where it starts, states, logits, confidences, what is kept, what comes out."""
    meta, golden = dense.stored("dspark")
    prompt, expected = golden["prompt"].tolist(), golden["greedy_rollout"].tolist()
    engine = dense.load(folders["dspark"])
    watch = Watch(engine)
    request = Request("a", tuple(prompt), SamplingParams(max_new_tokens=meta["output_len"], ignore_eos=True))
    tokens = run(engine, [request])
    assert [*prompt, *tokens["a"]] == expected[: len(prompt) + meta["output_len"]]
    cycles = meta["cycles"][: len(watch.blocks)]
    assert [(start, anchor) for start, anchor, _, _ in watch.blocks] == [(c["start"], c["anchor"]) for c in cycles]
    # The last block is cut by the length limit, and a last single token needs none.
    num_whole = len(cycles) - 1
    assert [kept for _, kept in watch.verdicts[:num_whole]] == [c["accepted"] for c in cycles[:num_whole]]
    for n in range(4):
        _, _, hidden, logits = watch.blocks[n]
        assert (hidden - golden[f"cycle{n}.block_hidden"]).abs().max() < TOLERANCE
        assert (logits - golden[f"cycle{n}.base_logits"]).abs().max() < TOLERANCE
        assert np.abs(watch.verdicts[n][0][0] - golden[f"cycle{n}.conf"].numpy()).max() < TOLERANCE


def test_ends_of_dspark_against_its_own_code(dense, folders):
    """At a stop token inside a block, at a length, and with blocks that are trimmed by confidence."""
    meta, golden = dense.stored("dspark")
    prompt = golden["prompt"].tolist()

    def output(engine, **params):
        tokens = run(engine, [Request("a", tuple(prompt), SamplingParams(ignore_eos=True, **params))])
        return [*prompt, *tokens["a"]]

    engine = dense.load(folders["dspark"])
    stop = (meta["stop"]["stop_token"],)
    assert output(engine, max_new_tokens=40, stop_token_ids=stop) == meta["stop"]["output"]
    assert output(engine, max_new_tokens=7) == meta["max_new_tokens_7"]
    engine, lens, kept = dense.load(folders["dspark"], confidence_threshold=0.5), [], []
    engine.record(
        lambda confidence, given, accepted, emitted: (lens.append(int(given[0])), kept.append(int(accepted[0])))
    )
    assert output(engine, max_new_tokens=40) == golden["greedy_rollout"].tolist()[: len(prompt) + 40]
    trimmed = meta["confidence_threshold_0.5"]
    # Behind the last whole cycle the blocks are cut by the length.
    whole = len(lens) - 1
    assert whole > 25 and lens[:whole] == trimmed["proposed"][:whole] and kept[:whole] == trimmed["accepted"][:whole]


def tapped(engine):
    """The features that the drafter of an engine is told of, step by step."""
    found, observe = [], engine.drafter.observe

    def noted(taps, step):
        found.append(taps)
        observe(taps, step)

    engine.drafter.observe = noted
    return found


@pytest.mark.parametrize("name", ["dspark", "dflash"])
def test_features_against_other_code(name, dense, folders):
    """What is injected of the prompt and of each verified step, up to the rejected rows."""
    _, golden = dense.stored(name)
    prompt = dense.stored("dspark")[1]["prompt"].tolist()
    engine = dense.load(folders[name], chunk_size=64)
    taps = tapped(engine)
    run(engine, [Request("a", tuple(prompt), SamplingParams(max_new_tokens=20, ignore_eos=True))])
    for n in range(4):
        expected = golden[f"cycle{n}.context_hidden"]
        assert (taps[n][: len(expected)] - expected).abs().max() < TOLERANCE


def test_dflash_against_its_own_code(dense, folders):
    meta, golden = dense.stored("dflash")
    prompt = dense.stored("dspark")[1]["prompt"].tolist()
    engine = dense.load(folders["dflash"])
    watch, num_new = Watch(engine), len(meta["output"]) - len(prompt)
    tokens = run(engine, [Request("a", tuple(prompt), SamplingParams(max_new_tokens=num_new, ignore_eos=True))])
    assert [*prompt, *tokens["a"]] == meta["output"]
    for n in range(4):
        start, _, hidden, _ = watch.blocks[n]
        assert start == golden[f"cycle{n}.position_ids"][-6]
        assert (hidden - golden[f"cycle{n}.block_hidden"][1:]).abs().max() < TOLERANCE


def test_eagle3_against_its_own_code(dense, folders):
    """The first row of a chain behind 11 given features, and four greedy steps of the chain."""
    _, golden = dense.stored("eagle3")
    engine = dense.load(folders["eagle3"], gamma=4)
    drafter, ids, features = engine.drafter, golden["shifted_ids"].tolist(), golden["features"]
    rows = np.stack([np.arange(11), np.zeros(11), np.zeros(11), np.full(11, 11), np.arange(11)]).astype(np.int64)
    with torch.inference_mode():
        plan = build_plan(rows, drafter.cache.page_table, (1,))
        hidden, logits = drafter.forward(torch.tensor(ids), drafter.features(features), plan, (11,))
        assert (hidden - golden["prefill_hidden"]).abs().max() < TOLERANCE
        state, tokens = hidden[-1:], []
        for n in range(4):
            tokens.append(int(logits[-1].argmax()))
            assert tokens[n] == golden["chain_tokens"][n]
            assert (logits[-1] - golden["chain_logits"][n]).abs().max() < TOLERANCE
            at = np.array([[11 + n], [0], [11 + n], [12 + n], [0]])
            plan = build_plan(at, drafter.cache.page_table, (1,))
            state, logits = drafter.forward(torch.tensor(tokens[-1:]), state, plan, (1,))
            if n < 3:
                assert (state[0] - golden["chain_hidden"][n + 1]).abs().max() < TOLERANCE
