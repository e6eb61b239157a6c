"""Sampled continuations with a draft have the law of those without one: two-sample tests that can reject.

The law of whole continuations is too wide to count, so four marginals, the pairs of neighbours and the first two tokens
together are compared, rare values pooled, each by a chi-square test, with Bonferroni's correction over them.
``scripts/soak_speculation.py sampled`` runs the same tests on ten times as many continuations.
"""

import json
import pathlib

import numpy as np
import pytest
from dspark.runtime import decide
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.request import Request, SamplingParams
from scipy.stats import chi2

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "models"
COUNT = 4
LEAST_EXPECTED = 8
FILTERS = {"temperature 1": {}, "top-p": {"top_p": 0.9}, "min-p": {"min_p": 0.1}}
LEVEL = 1e-3


def prompt():
    """A short prompt, cut where the model is unsure of what follows."""
    items = json.loads((DATA / "golden.json").read_text())["items"]
    return tuple(min((item["prompt_ids"] for item in items), key=len)[:6])


def sample(drafted, loaded, draft, size, seed, filters, batch=64):
    """[size, 4] the first tokens of so many continuations; -1 behind an end."""
    engine = loaded.engine(draft, 3, batch, seed=seed, max_context=64, chunk_size=512)
    params = SamplingParams(max_new_tokens=COUNT + 1, temperature=1.0, **filters)
    found = drafted.run(engine, [Request(str(i), prompt(), params) for i in range(size)])
    padded = [[*ids, *[-1] * COUNT][:COUNT] for ids, _, _ in found.values()]
    return np.array(padded), [spec for _, _, spec in found.values()]


def p_value(a, b):
    """Of the chi-square test that the values ``a`` and ``b`` (int arrays) come from one law; rare values are pooled."""
    values, place = np.unique(np.concatenate([a, b]), return_inverse=True)
    table = np.stack([np.bincount(part, minlength=len(values)) for part in (place[: len(a)], place[len(a) :])])
    share = np.array([[len(a)], [len(b)]]) / (len(a) + len(b))
    rare = (table.sum(0) * share.min()) < LEAST_EXPECTED
    table = np.concatenate([table[:, ~rare], table[:, rare].sum(1, keepdims=True)], axis=1)
    table = table[:, table.sum(0) > 0]
    expected = table.sum(0) * share
    return float(chi2.sf(((table - expected) ** 2 / expected).sum(), max(table.shape[1] - 1, 1)))


def same_law(a, b):
    """Bonferroni's p value of the tests on two samples [N, 4]."""
    radix = 1 << 20
    views = [*(lambda s, k=k: s[:, k] for k in range(COUNT))]
    views += [*(lambda s, k=k: s[:, k] * radix + s[:, k + 1] for k in range(COUNT - 1))]
    views.append(lambda s: (s[:, 0] * radix + s[:, 1]) * radix + s[:, 2])
    return min(1.0, len(views) * min(p_value(view(a), view(b)) for view in views))


def compare(drafted, size, filters, seed=1):
    """The p value of the samples with and without a draft, and the share of drafts that were kept."""
    loaded = drafted.alone(bundled_model())
    plain, _ = sample(drafted, loaded, "none", size, seed, filters)
    spec, fields = sample(drafted, loaded, loaded.own, size, seed + 1000, filters)
    kept = sum(f["accepted"] for f in fields) / max(sum(f["verified"] for f in fields), 1)
    return same_law(plain, spec), kept


@pytest.mark.parametrize("name", FILTERS)
def test_the_law_with_a_draft_is_that_without(drafted, name):
    p, _ = compare(drafted, 800, FILTERS[name])
    assert p > LEVEL, f"{name}: p = {p:.1e}"


def test_a_misreported_draft_law_is_rejected(drafted, monkeypatch):
    """The same test when verification is told that drafts came from a flatter law than they did."""
    right = decide.Decider.schedule

    def flatter(self, *args):
        drafted = right(self, *args)
        probs = drafted.probs**0.5
        return drafted._replace(probs=probs / probs.sum(-1, keepdims=True))

    monkeypatch.setattr(decide.Decider, "schedule", flatter)
    p, _ = compare(drafted, 800, {})
    assert p < LEVEL, f"p = {p:.1e}"


def test_the_test_has_its_level_and_power():
    """Two samples of one law pass about as often as they should; of laws a little apart, they do not."""
    rng = np.random.default_rng(0)
    law = rng.dirichlet(np.full(300, 0.1))
    shifted = 0.9 * law + 0.1 * rng.dirichlet(np.full(300, 0.1))
    draw = lambda weights: rng.choice(300, (2000, COUNT), p=weights / weights.sum())
    passed = [same_law(draw(law), draw(law)) for _ in range(40)]
    assert min(passed) > LEVEL and sum(p < 0.5 for p in passed) < 32
    assert same_law(draw(law), draw(shifted)) < 1e-6
