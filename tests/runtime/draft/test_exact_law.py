"""The law of sampled tokens with a draft is that of the plain model, computed exactly for what is not rare.

Short continuations of one prompt are counted by their first tokens and held to exact probabilities, which come from the
model's logits and the definition of the filters. A draft near the target is kept often and rejected often.
"""

import functools

import numpy as np
import pytest
from dspark.layers.draft_heads_host import HostDraftBlock
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.draft.none import NoDraft
from dspark.runtime.request import Request, SamplingParams
from dspark.runtime.spec.verify import verify_tokens
from dspark.runtime.tokenizer import Tokenizer
from scipy.stats import chi2

DEPTH = 4
GAMMA = DEPTH - 1
NUM_SAMPLES = 900
RARE = 0.012
PARAMS = SamplingParams(max_new_tokens=DEPTH, ignore_eos=True, temperature=1.3, top_p=0.9)


@functools.cache
def start():
    return Tokenizer.load(bundled_model(), 0).encode("<|user|>What is")


def next_law(loaded, tokens):
    """float64 [V]: the law behind the prompt and ``tokens``, by the definition of its filter."""
    p = (loaded.logits([*start(), *tokens], 1)[0].double() / PARAMS.temperature).softmax(-1).numpy()
    order = np.argsort(-p, kind="stable")
    kept = order[p[order].cumsum() - p[order] < PARAMS.top_p]
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


@functools.cache
def exact(loaded):
    """Laws behind all prefixes that are not rare, and the mass of each of those prefixes."""
    laws, masses, waiting = {}, {(): 1.0}, [()]
    while waiting:
        prefix = waiting.pop()
        laws[prefix] = next_law(loaded, prefix)
        for token in np.flatnonzero(masses[prefix] * laws[prefix] > RARE).tolist():
            child = (*prefix, token)
            masses[child] = masses[prefix] * laws[prefix][token]
            if len(child) < DEPTH:
                waiting.append(child)
    return laws, masses


def p_value(samples, loaded):
    """Of a chi-square test of ``samples`` against the exact law: a cell for each whole continuation that is not rare,
    and for each prefix one for those that leave the tree behind it."""
    laws, masses = exact(loaded)
    expected = {prefix: mass for prefix, mass in masses.items() if len(prefix) == DEPTH}
    for prefix in laws:
        expected[(*prefix, None)] = masses[prefix] - sum(
            mass for child, mass in masses.items() if child[:-1] == prefix and child
        )
    observed = dict.fromkeys(expected, 0)
    for tokens in samples:
        depth = next((n for n in range(1, DEPTH + 1) if tuple(tokens[:n]) not in masses), None)
        observed[tuple(tokens) if depth is None else (*tokens[: depth - 1], None)] += 1
    cells = [(observed[cell], mass * len(samples)) for cell, mass in expected.items()]
    small = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5] + [tuple(np.sum(small, axis=0))] * bool(small)
    assert len(cells) > 10 and sum(e for _, e in cells) == pytest.approx(len(samples))
    return chi2.sf(sum((o - e) ** 2 / e for o, e in cells if e > 0), len(cells) - 1)


class Near(NoDraft):
    """Draws from the target's laws, bent at random, as it finds them in a table."""

    def __init__(self, laws):
        self.gamma, self.laws, self.seen = GAMMA, laws, {}

    def observe(self, taps, step):
        keys = step.plan.keys
        for token, slot, position in zip(step.tokens.tolist(), keys.slots.tolist(), keys.positions.tolist()):
            self.seen[slot] = [*self.seen.get(slot, [])[:position], token]

    def law(self, tokens):
        p = self.laws.get(tokens, np.full(1536, 1 / 1536))
        q = p * np.random.default_rng([7, *tokens]).uniform(0.1, 2.0, p.shape)
        return 0.9 * q / q.sum() + 0.1 / len(q)

    def propose(self, requests, noise):
        drafts, laws = np.zeros((len(requests.slots), GAMMA), np.int64), np.empty((len(requests.slots), GAMMA, 1536))
        for r, (slot, first, anchor) in enumerate(zip(requests.slots, requests.starts, requests.anchors)):
            tokens = (*self.seen[slot][len(start()) : first], anchor)
            for k in range(GAMMA):
                laws[r, k] = self.law(tokens)
                total = laws[r, k].cumsum()
                drafts[r, k] = np.searchsorted(total, noise.uniforms[r, k] * total[-1], side="right")
                tokens = (*tokens, int(drafts[r, k]))
        return HostDraftBlock(drafts, laws, None)


def sampled(engine):
    """The continuations, and the share of verified drafts that were kept."""
    for i in range(NUM_SAMPLES):
        engine.add(Request(str(i), start(), PARAMS))
    tokens, verified, accepted = {}, 0, 0
    while engine.has_work():
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            if event.spec:
                verified, accepted = verified + event.spec["verified"], accepted + event.spec["accepted"]
    assert all(len(ids) == DEPTH for ids in tokens.values()) and len(tokens) == NUM_SAMPLES
    return list(tokens.values()), accepted / max(verified, 1)


def near_engine(drafted):
    loaded = drafted.alone(bundled_model())
    return loaded.engine(Near(exact(loaded)[0]), GAMMA, max_running=64, chunk_size=512)


def test_a_draft_near_the_target(drafted):
    samples, kept = sampled(near_engine(drafted))
    assert 0.2 < kept < 0.8
    assert p_value(samples, drafted.alone(bundled_model())) > 1e-3


def test_a_wrong_law_of_the_draft_is_caught(drafted):
    engine = near_engine(drafted)

    def with_sharper_laws(rows, probs, drafts, coins, final, laws):
        sharper = None if laws is None else laws**3 / np.maximum((laws**3).sum(-1, keepdims=True), 1e-300)
        return verify_tokens(rows, probs, drafts, coins, final, sharper)

    engine._decider._verify = with_sharper_laws
    samples, _ = sampled(engine)
    assert p_value(samples, drafted.alone(bundled_model())) < 1e-6


def test_the_prediction_layer(drafted, made_up_draft, load_draft):
    engine = load_draft(made_up_draft("mtp"), gamma=GAMMA, max_running=64, chunk_size=512)
    samples, _ = sampled(engine)
    assert p_value(samples, drafted.alone(bundled_model())) > 1e-3
