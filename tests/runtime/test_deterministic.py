"""``--deterministic``: a token's logits do not depend on what else is in the step, to the last bit.

Sequences are cut at random into steps of random requests with random lengths, as prefill chunks, decoding and verified
blocks (with drafts that are then rejected and overwritten), and every row is compared with a forward of the sequence
alone. Without the option only the choice must be the same, unless two logits tie within 1e-5; ties are reported.
"""

import pathlib
import random
import warnings

import pytest
import torch
from dspark.layers.kernels import Kernels
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.cache import Cache, CacheLayout
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.models.deepseek_v4 import attention_sizes
from dspark.runtime.request import Request, SamplingParams
from dspark.runtime.step import Span, build_step

pytest.importorskip("numba")

ORACLE = pathlib.Path(__file__).resolve().parent.parent / "data" / "v4" / "mixed_yarn"
FOLDERS = {"bundled": bundled_model(), "oracle": ORACLE}
NUM_SEQUENCES = 6
LENGTHS = (1, 1, 2, 3, 5, 8, 17, 40)
MOST_REJECTED = 7


def sequences(dice, vocab_size, longest):
    return [[dice.randrange(vocab_size) for _ in range(dice.randrange(20, longest))] for _ in range(NUM_SEQUENCES)]


def mixed(loaded, texts, dice):
    """The logits of every sequence, [L, V] each, from steps that mix them at random."""
    config = loaded.config
    layers = tuple(attention_sizes(config, layer) for layer in range(config.num_layers))
    layout = CacheLayout(layers, 1 + MOST_REJECTED, 4)
    pages = len(texts) * max(layout.pages_for(512), 1)
    cache = Cache(layout, len(texts), pages, 512, torch.device("cpu"), torch.float32)
    slots = [cache.acquire() for _ in texts]
    assert all(cache.reserve(slot, len(text) + MOST_REJECTED) for slot, text in zip(slots, texts))
    rows, seen = [[] for _ in texts], [0] * len(texts)
    while any(at < len(text) for at, text in zip(seen, texts)):
        spans, kept = [], []
        for i in dice.sample(range(len(texts)), dice.randrange(1, len(texts) + 1)):
            new = texts[i][seen[i] : seen[i] + dice.choice(LENGTHS)]
            if not new:
                continue
            # Behind a few tokens, drafts that will be rejected.
            num_rejected = dice.randrange(MOST_REJECTED + 1 - len(new)) if len(new) <= 5 else 0
            wrong = [dice.randrange(config.vocab_size) for _ in range(num_rejected)]
            spans.append(Span(slots[i], seen[i], new + wrong, len(new) + num_rejected))
            kept.append((i, len(new), num_rejected))
            seen[i] += len(new)
        if not spans:
            continue
        step = build_step(spans, cache.page_table, layout.ratios, config.vocab_size)
        pieces = loaded.model.forward(step, cache).logits.split([n for one in kept for n in one[1:]])
        for (i, _, _), piece in zip(kept, pieces[::2]):
            rows[i].append(piece)
    return [torch.cat(pieces) for pieces in rows]


def check_choices(got, expected, what):
    """Fail unless both choose the same tokens; ties within 1e-5 are reported."""
    a, b = got.argmax(-1), expected.argmax(-1)
    for row in (a != b).nonzero()[:, 0].tolist():
        gap = float(expected[row, b[row]] - expected[row, a[row]])
        assert gap <= 1e-5, f"{what}: row {row} chooses {int(a[row])}, not {int(b[row])}, {gap:.1e} lower"
        warnings.warn(f"{what}: a tie of {gap:.1e} in row {row}", stacklevel=2)


def compare(drafted, name, deterministic, seed, longest=140):
    """For every sequence of a round: whether all logits are bitwise those of the sequence alone."""
    dice = random.Random(seed)
    loaded = drafted.alone(FOLDERS[name], deterministic)
    texts = sequences(dice, loaded.config.vocab_size, longest)
    same = []
    for got, text in zip(mixed(loaded, texts, dice), texts):
        expected = loaded.logits(text, len(text))
        check_choices(got, expected, f"{name}, seed {seed}")
        same.append(torch.equal(got, expected))
    return same


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("seed", range(3))
def test_logits_are_bitwise_those_of_the_sequence_alone(drafted, name, seed):
    assert all(compare(drafted, name, True, seed)), f"seed {seed}"


@pytest.mark.parametrize("name", FOLDERS)
def test_without_it_the_choices_are_the_same(drafted, name):
    """Whatever else is in the step."""
    for seed in range(2):
        compare(drafted, name, False, seed, 300)


def test_it_needs_compiled_kernels():
    with pytest.raises(ValueError, match="--deterministic needs compiled kernels"):
        Kernels("torch", deterministic=True)


class Watch:
    """Keeps the logits that a rank decides by, for every row whose tokens so far were kept."""

    def __init__(self, engine):
        self.rows, self._judge = {}, engine._decider.judge
        engine._decider.judge = self

    def __call__(self, states, num_decoding, logits, drafted):
        table = self._judge(states, num_decoding, logits, drafted)
        row = 0
        for state, length, outcome in zip(states, drafted.lens.tolist(), table.tolist()):
            for k in range(outcome[3] + 1):
                self.rows[state.request.request_id, len(state.tokens) + k] = logits[row + k].clone()
            row += length + 1
        return table


def on_layout(rank, world, drafted, sizes, options, prompts, texts, deterministic):
    """Rows whose logits are not bitwise ``texts``' own: (rows, those that differ, the largest difference), or None."""
    loaded = drafted.Loaded(bundled_model(), Groups.build(Topology(**sizes), rank), deterministic)
    engine = loaded.engine(drafted.Replay(texts[0], 4, loaded.config.vocab_size, 0.3), 4, 3, chunk_size=16, **options)
    watch = Watch(engine) if engine._decider else None
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    found = drafted.run(engine, [Request(name, tuple(ids), params) for name, ids in prompts.items()])
    assert all([*prompts[name], *ids] == texts[0][name] for name, (ids, _, _) in found.items())
    if watch is None:
        return None
    errors = [float((row - texts[1][name][at - 1]).abs().max()) for (name, at), row in watch.rows.items()]
    return len(errors), sum(error > 0 for error in errors), max(errors, default=0.0)


def greedy_texts(drafted, prompts, deterministic):
    """Prompts with their continuations, and the logits of those texts alone."""
    loaded = drafted.alone(bundled_model(), deterministic)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    found = drafted.run(loaded.engine(), [Request(name, tuple(ids), params) for name, ids in prompts.items()])
    texts = {name: [*prompts[name], *ids] for name, (ids, _, _) in found.items()}
    return texts, {name: loaded.logits(text, len(text)) for name, text in texts.items()}


LAYOUTS = [
    ({"tp": 1, "pp": 2}, {}),
    ({"tp": 2}, {}),
    ({"tp": 2, "ep": 2}, {}),
    ({"tp": 2, "dp": 2}, {}),
    ({"tp": 2, "cp": 2}, {"cp_split": "zigzag"}),
    ({"tp": 4, "dp": 2, "ep": 2}, {}),
    ({"tp": 4, "dp": 2, "cp": 2, "ep": 4}, {}),
]


@pytest.mark.parametrize("sizes,options", LAYOUTS, ids=lambda v: "-".join(f"{k}{n}" for k, n in v.items()))
def test_layouts_are_bitwise_alike(drafted, run_ranks, sizes, options):
    dice = random.Random(3)
    prompts = {str(i): [dice.randrange(1536) for _ in range(5 + 9 * i)] for i in range(5)}
    texts = greedy_texts(drafted, prompts, True)
    world = sizes["tp"] * sizes.get("pp", 1)
    results = run_ranks(on_layout, world, drafted, sizes, options, prompts, texts, True, timeout=200)
    results = [result for result in results if result]
    assert sum(rows for rows, _, _ in results) >= 5 * 8
    assert all(largest == 0 for _, _, largest in results), results


def test_without_it_sums_over_ranks_are_rounded_otherwise(drafted, run_ranks):
    """Or the test above would show nothing."""
    prompts = {"a": list(range(40, 70))}
    texts = greedy_texts(drafted, prompts, False)
    results = run_ranks(on_layout, 2, drafted, {"tp": 2}, {}, prompts, texts, False, timeout=200)
    assert any(result and 0 < result[2] < 1e-4 for result in results), results
