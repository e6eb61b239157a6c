"""The contract of every draft, kept by those that grow trees: the target's own tokens when greedy, its exact law when
sampled, whatever the shape of the trees, the kind of attention and the layout."""

import json

import numpy as np
import pytest
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.cli import main
from dspark.runtime.draft.growth import TreeShape
from dspark.runtime.draft.none import NoDraft
from dspark.runtime.request import Request, SamplingParams
from dspark.runtime.spec.tree import DraftTree
from dspark.runtime.step import Span, build_step
from scipy.stats import chi2

DYNAMIC = {"tree": "dynamic", "tree_nodes": 12, "tree_topk": 3, "gamma": 4}
STATIC = DYNAMIC | {"tree": "static"}
# case -> target, folder of the draft, options
CASES = {
    "eagle": ("target", "eagle", {}),
    "eagle dynamic": ("target", "eagle", DYNAMIC),
    "eagle static": ("target", "eagle", STATIC),
    "eagle3 dynamic": ("target", "eagle3", DYNAMIC),
    "eagle3_few dynamic": ("target", "eagle3_few", DYNAMIC),
    "llama dynamic": ("llama", "eagle", DYNAMIC),
    "latent": ("v3", None, {"draft": "mtp_v3", "gamma": 2}),
    "latent dynamic": ("v3", None, DYNAMIC | {"draft": "mtp_v3"}),
}


@pytest.fixture
def open_case(dense, prediction_folders):
    """``open_case(name, groups, **options)``: an engine; without a name that of the same target without a draft."""
    folders = {"v3": prediction_folders["mtp_v3"], None: None}

    def make(name, groups=None, plain=False, **options):
        target, draft, own = CASES[name]
        target, draft = (folders[x] if x in folders else getattr(dense, x) for x in (target, draft))
        if plain:
            return dense.load(None, groups, target, **{"draft": "none"} | options)
        return dense.load(draft, groups, target, **own | options)

    return make


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens(dense, open_case, name):
    """With chunks and batches of several sizes, and trees of several shapes."""
    expected, _ = dense.run(open_case(name, plain=True))
    cases = [{}, {"chunk_size": 64, "max_running": 1}]
    if "tree" in CASES[name][2]:
        cases += [{"tree_nodes": 2, "tree_topk": 1, "gamma": 2}, {"tree_nodes": 30, "tree_topk": 6, "gamma": 5}]
    for options in cases:
        got, specs = dense.run(open_case(name, **options))
        assert got == expected, options
        assert sum(spec["accepted"] for spec in specs) > 0 or "few" in name
        for spec in specs:
            assert sum(n * count for n, count in enumerate(spec["accept_histogram"])) == spec["accepted"]
            assert spec["accepted"] <= spec["verified"] <= spec["drafted"]


def on_ranks(rank, world, dense, open_case, name, layout, options):
    return dense.run(open_case(name, Groups.build(Topology(**layout), rank), **options))[0]


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(" dynamic") and "few" not in name])
def test_layouts(dense, open_case, name, run_ranks):
    expected, _ = dense.run(open_case(name, plain=True))
    layouts = [({"tp": 2}, {}), ({"tp": 2, "dp": 2}, {})]
    if name in ("eagle dynamic", "latent dynamic"):
        layouts += [({"pp": 2}, {}), ({"tp": 2, "cp": 2}, {"cp_split": "zigzag"}), ({"tp": 2, "cp": 2}, {})]
    if name == "latent dynamic":
        layouts += [({"tp": 2, "dp": 2, "ep": 2}, {"dispatcher": "normal", "overlap": "tbo", "overlap_min_rows": 1})]
    for layout, options in layouts:
        world = layout.get("tp", 1) * layout.get("pp", 1)
        found = run_ranks(on_ranks, world, dense, open_case, name, layout, options, timeout=120)
        assert found[0] == expected, (layout, options)


DEPTH, NUM_SAMPLES = 3, 400
SAMPLED = SamplingParams(max_new_tokens=DEPTH, ignore_eos=True, temperature=1.2, top_k=3)


def exact_law(engine, prompt):
    """float64 {tokens: probability} of the first tokens behind ``prompt``, from whole forwards of the target."""
    law = {(): 1.0}
    for _ in range(DEPTH):
        longer = {}
        for tokens, mass in law.items():
            p = (next_logits(engine, [*prompt, *tokens]).double() / SAMPLED.temperature).softmax(-1)
            top = p.topk(SAMPLED.top_k)
            for token, share in zip(top.indices.tolist(), (top.values / top.values.sum()).tolist()):
                longer[(*tokens, token)] = mass * share
        law = longer
    return law


def next_logits(engine, tokens):
    slot = engine.cache.acquire()
    assert engine.cache.reserve(slot, len(tokens))
    table, ratios = engine.cache.page_table, engine.cache.layout.ratios
    step = build_step([Span(slot, 0, tokens, 1)], table, ratios, engine.model.config.vocab_size)
    logits = engine.model.forward(step, engine.cache).logits[0]
    engine.cache.release(slot)
    return logits


def p_value(dense, engine, law):
    """Of a chi-square test of sampled continuations of a prompt against ``law``."""
    for i in range(NUM_SAMPLES):
        engine.add(Request(str(i), dense.prompts[0], SAMPLED))
    tokens, kept = {}, 0
    while engine.has_work():
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            kept += event.spec["accepted"] if event.spec else 0
    assert kept > 0
    seen = dict.fromkeys(law, 0)
    for ids in tokens.values():
        seen[tuple(ids)] += 1
    cells = [(seen[ids], mass * NUM_SAMPLES) for ids, mass in law.items()]
    common = [cell for cell in cells if cell[1] >= 5]
    common.append(tuple(np.sum([cell for cell in cells if cell[1] < 5], axis=0)))
    return chi2.sf(sum((o - e) ** 2 / e for o, e in common if e), len(common) - 1)


@pytest.mark.parametrize("name", ["eagle", "eagle dynamic", "eagle static", "latent dynamic"])
def test_sampled_law(dense, open_case, name):
    law = exact_law(open_case(name, plain=True), dense.prompts[0])
    engine = open_case(name, max_running=64, chunk_size=704)
    assert p_value(dense, engine, law) > 1e-3


class Right(NoDraft):
    """Proposes trees with the continuations of ``texts`` on one branch, not the first, among others that are wrong."""

    grows_trees = True

    def __init__(self, texts, depth, vocab):
        self.gamma, self.texts, self.vocab, self.seen = depth, texts, vocab, {}
        self.tree = TreeShape(True, 3 * depth, 3, depth)

    def observe(self, taps, step):
        rows = step.plan.keys
        tokens = step.plan.gather(step.tokens).tolist()
        for token, slot, position in zip(tokens, rows.slots.tolist(), rows.positions.tolist()):
            self.seen[slot] = [*self.seen.get(slot, [])[:position], token]

    def propose(self, requests, noise):
        trees = []
        for slot, start, anchor in zip(requests.slots, requests.starts, requests.anchors):
            text = [*self.seen[slot][:start], anchor]
            rest = next(one[len(text) :] for one in self.texts if one[: len(text)] == text)[: self.gamma]
            tokens, parents, above = [anchor], [-1], 0
            for token in rest:
                tokens += [(token + 1) % self.vocab, (token + 2) % self.vocab, token]
                parents += [above] * 3
                above = len(tokens) - 1
            trees.append(DraftTree(np.array(tokens), np.array(parents)))
        return tuple(trees)


def right_engine(dense, depth, **options):
    """An engine whose trees always hold the target's continuation, and that continuation."""
    expected, _ = dense.run(dense.load(), num_new=40)
    engine = dense.load(
        dense.eagle, **{"tree": "dynamic", "gamma": depth, "tree_nodes": 3 * depth, "tree_topk": 3} | options
    )
    texts = [[*ids, *expected[str(i)]] for i, ids in enumerate(dense.prompts)]
    engine._drafting.drafter = Right(texts, depth, 24)
    return engine, expected


@pytest.mark.parametrize("depth", [1, 4, 7])
def test_the_targets_own_continuation_is_always_kept(dense, depth):
    """To the last node of its path; the draft is told of just the tokens that were kept, in the right order."""
    engine, expected = right_engine(dense, depth)
    got, specs = dense.run(engine, num_new=40)
    assert got == expected
    for number, spec in enumerate(sorted(specs, key=lambda spec: -spec["verify_ct"])):
        assert spec["verified"] == 3 * spec["accepted"] > 0
        assert sum(spec["accept_histogram"][:depth]) <= 1, number


@pytest.mark.parametrize("stop_at", [2, 5, 9])
def test_stop_ids_and_limits_inside_a_path(dense, stop_at):
    engine, expected = right_engine(dense, 7)
    ids = expected["0"]
    end = ids.index(ids[stop_at]) + 1
    for params, reason in (
        (SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=(ids[stop_at],)), "stop"),
        (SamplingParams(max_new_tokens=end, ignore_eos=True), "length"),
    ):
        engine.add(Request(reason, dense.prompts[0], params))
        got, ends = [], []
        while engine.has_work():
            for event in engine.step():
                got += event.token_ids
                ends += [event.finish_reason] if event.finish_reason else []
        assert (got, ends) == (ids[:end], [reason])
    assert engine.cache.bytes_in_use == 0


def test_logprobs_and_penalties_are_those_of_single_steps(dense):
    """Every node is judged behind the tokens on its own path, whatever its siblings are."""
    params = {"logprobs": 2, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "min_tokens": 6}
    found = []
    for engine in (dense.load(), dense.load(dense.eagle, **DYNAMIC), right_engine(dense, 4)[0]):
        for i, ids in enumerate(dense.prompts):
            if isinstance(engine.drafter, Right):
                engine.drafter.texts = [[*one, *found[0][str(n)][0]] for n, one in enumerate(dense.prompts)]
            engine.add(Request(str(i), ids, SamplingParams(max_new_tokens=16, ignore_eos=True, **params)))
        results = {}
        while engine.has_work():
            for event in engine.step():
                tokens, laws = results.setdefault(event.request_id, ([], []))
                tokens += event.token_ids
                laws += [one.logprob for one in event.logprobs]
        found.append(results)
    for other in found[1:]:
        assert {k: v[0] for k, v in other.items()} == {k: v[0] for k, v in found[0].items()}
        for name, (_, laws) in other.items():
            np.testing.assert_allclose(laws, found[0][name][1], atol=2e-5)


def test_rejected_branches_leave_nothing(dense):
    """The cache holds, for the tokens that were kept, what decoding them one by one holds."""
    engines = [dense.load(max_running=1), right_engine(dense, 4, max_running=1)[0]]
    pools = []
    for engine in engines:
        engine.add(Request("a", dense.prompts[0], SamplingParams(max_new_tokens=18, ignore_eos=True)))
        while engine.has_work():
            engine.step()
        page = engine.cache.page_table[0, 0]
        pools.append([layer.entries[page, : 11 + 17] for layer in engine.cache.layers])
    for plain, kept in zip(*pools):
        assert (plain - kept).abs().max() < 2e-5


def test_memory_runs_out(dense):
    """Pages that trees need are counted: requests lose their memory and go on, and the tokens stay the same."""
    prompts = [tuple(np.random.default_rng(n).integers(0, 24, 238 + n).tolist()) for n in range(3)]
    results = []
    for folder, options in ((None, {}), (dense.eagle, DYNAMIC | {"cache_pages": 3, "admission": "0"})):
        engine = dense.load(folder, max_context=300, chunk_size=256, **options)
        for i, ids in enumerate(prompts):
            engine.add(Request(str(i), ids, SamplingParams(max_new_tokens=16, ignore_eos=True)))
        tokens = {}
        while engine.has_work():
            for event in engine.step():
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
        results.append(tokens)
    assert engine.counts.retracted > 0 and results[0] == results[1]


def test_refusals(dense):
    tree = {"tree": "dynamic"}
    for options, message in (
        (tree | {"draft": "ngram"}, "--tree dynamic: the draft ngram proposes blocks only; .* eagle, eagle3, mtp_v3"),
        (tree | {"draft": "none"}, "--tree dynamic is for a draft, but there is none"),
        (tree | {"verify": "sync"}, "--verify sync is for blocks, but --tree dynamic"),
        (tree | {"block_verify": True}, "--block-verify is for blocks"),
        ({"tree_nodes": 8}, "--tree-nodes 8 changes nothing without --tree"),
        (tree | {"tree_topk": 30}, "--tree-topk is 30, but the vocabulary has 24"),
        (tree | {"tree_nodes": 411}, "--tree-nodes is 411, but 5 levels .* of 10 children .* 410"),
        (tree | {"cp_keys": "ring"}, "--cp-keys ring passes them on"),
        (tree | {"tree_topk": 0}, "--tree-topk is 0"),
    ):
        folder = None if "draft" in options else dense.eagle
        with pytest.raises(ValueError, match=message):
            dense.load(folder, **options)
    sliding = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "layer_types": None}
    target = dense.write("sliding", dense.config | sliding, dense.tensors)
    with pytest.raises(ValueError, match="--tree dynamic is for layers of the kinds .* the model has sliding gqa"):
        dense.load(dense.eagle, target=target, **tree)


def test_bench_accept_compares_chains_and_trees(dense, tmp_path, capsys):
    """From the command line: one run, the same tokens, and every kept draft on a path."""
    prompts = tmp_path / "some.jsonl"
    prompts.write_text("".join(json.dumps({"token_ids": list(ids)}) + "\n" for ids in dense.prompts))
    drafts = ",".join(f"eagle={dense.eagle}{kind}" for kind in ("", "@dynamic", "@static")) + ",ngram"
    flags = ["--gamma", "4", "--tree-nodes", "12", "--tree-topk", "3", "--temperature", "0", "--max-new-tokens", "16"]
    options = ["--model", str(dense.target), "--draft", drafts, "--prompts", str(prompts), "--json", *flags]
    assert main(["bench", "accept", *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["drafts"]) == ["eagle", "eagle@dynamic", "eagle@static", "ngram"] and result["greedy_ids_equal"]
    for label in ("eagle@dynamic", "eagle@static"):
        found = result["drafts"][label]["some@0"]
        assert found["verified"] == found["drafted"] > 4 * found["verify_ct"] and len(found["accept_histogram"]) == 5
        assert found["accepted"] == sum(n * count for n, count in enumerate(found["accept_histogram"])) > 0
    assert main(["bench", "accept", "--model", str(dense.target), "--draft", "ngram@dynamic"]) == 2


def test_generate_from_the_command_line(dense, tmp_path):
    source, plain, drafted = (tmp_path / f"{name}.jsonl" for name in ("in", "plain", "drafted"))
    source.write_text("".join(json.dumps({"token_ids": list(ids)}) + "\n" for ids in dense.prompts))
    base = ["generate", "--model", str(dense.target), "--input", str(source), "--max-new-tokens", "12"]
    base += ["--ignore-eos", "--temperature", "0"]
    tree = ["--draft-model", str(dense.eagle), "--tree", "dynamic", "--tree-depth", "3", "--tree-nodes", "9"]
    assert main([*base, "--output", str(plain)]) == 0
    assert main([*base, "--output", str(drafted), *tree, "--tree-topk", "3"]) == 0
    results = [[json.loads(line) for line in path.read_text().splitlines()] for path in (plain, drafted)]
    ids = [{one["id"]: one["token_ids"] for one in result} for result in results]
    assert ids[0] == ids[1] and len(ids[0]) == 5
    assert all(len(one["spec"]["accept_histogram"]) == 4 for one in results[1])
