"""The output law of speculation, by exact enumeration over a toy model; and known mistakes that must show as bias.

A toy model gives each request a target law, a draft law and confidences as functions of its tokens so far. All draft
outcomes are enumerated with their probability. The random numbers of verification are integrated out: the choice is
constant between breakpoints, which the tests compute from the formulas, so running the code at one point of every cell
gives the exact law of what it emits. Wrong breakpoints would make the sums wrong, not the test blind.
"""

import copy
import functools
import itertools
import json
import pathlib
import pickle

import numpy as np
import pytest
from dspark.runtime.spec.async_policy import AsyncPolicy
from dspark.runtime.spec.block_verify import verify_blocks
from dspark.runtime.spec.confidence import survival
from dspark.runtime.spec.rows import PackedRows
from dspark.runtime.spec.schedule import StaticPolicy, SyncPolicy, ThresholdPolicy
from dspark.runtime.spec.sps import StaircaseTable
from dspark.runtime.spec.verify import verify_tokens
from safetensors.numpy import load_file

DATA = pathlib.Path(__file__).resolve().parents[2] / "data" / "speculative"
RULES = {"token": verify_tokens, "block": verify_blocks}
EXACT = 1e-12


class Toy:
    """Laws and confidences of R requests as functions of their tokens, random but fixed by a seed."""

    def __init__(self, seed, requests=2, vocab=2, gamma=2):
        self.seed, self.requests, self.vocab, self.gamma = seed, requests, vocab, gamma
        self._made = {}

    def _law(self, *key):
        if key not in self._made:
            rng = np.random.default_rng([self.seed, *[k + 1 for k in key]])
            self._made[key] = rng.dirichlet(np.full(self.vocab, 0.7)), rng.choice([0.05, 0.4, 0.9, 0.99])
        return self._made[key]

    def p(self, r, prefix):
        """Target law of the token behind ``prefix``."""
        return self._law(0, r, len(prefix), *prefix)[0]

    def q(self, r, prefix, drafted):
        """Draft law of the token behind ``prefix`` and the drafts so far."""
        return self._law(1, r, len(prefix), *prefix, 99, *drafted)[0]

    def c(self, r, prefix, before):
        """Confidence of a draft; ``before`` are the drafts it may look at."""
        return self._law(2, r, len(prefix), *prefix, 99, *before)[1]


def breakpoints(p, q, drafts):
    """Values in (0, 1) at which either rule changes its mind: coins per place, and the final draw."""
    length = len(drafts)
    coins, finals, w = [set() for _ in range(length)], set(), 1.0
    weights = [1.0]
    for k, x in enumerate(drafts):
        coins[k].add(min(1.0, p[k][x] / q[k][x]))
        w = min(1.0, w * p[k][x] / q[k][x])
        weights.append(w)
    for k in range(1, length + 1):
        rest = np.maximum(weights[k] * p[k] - q[k], 0).sum() if k < length else 0.0
        coins[k - 1].add(weights[k] if k == length else rest / max(rest + 1 - weights[k], 1e-300))
    laws = list(p)
    for k in range(length):
        laws += [np.maximum(weight * p[k] - q[k], 0) for weight in (1.0, weights[k])]
    for law in laws:
        if law.sum() > 0:
            finals.update((law / law.sum()).cumsum().tolist())
    return coins, finals


def cells(points):
    """Midpoints and widths of the cells of [0, 1) between ``points``."""
    edges = np.array([0.0, *sorted(x for x in points if 0 < x < 1), 1.0])
    # Narrower cells are rounding, and the middle of one next to 1 would round to 1.
    keep = np.diff(edges) > 1e-14
    return ((edges[1:] + edges[:-1]) / 2)[keep], np.diff(edges)[keep]


def emission_law(rule, p, q, drafts):
    """{emitted tokens: probability} for one request with ℓ = len(drafts) drafts, over all coins and final draws."""
    length, vocab = len(drafts), len(p[0])
    coins, finals = breakpoints(p, q, drafts)
    axes = [cells(points) for points in (*coins, finals)]
    grid = np.array(list(itertools.product(*[a[0] for a in axes])))
    weight = np.array([np.prod(widths) for widths in itertools.product(*[a[1] for a in axes])])
    count = len(grid)
    rows = PackedRows.from_lens([length] * count, length)
    verdict = RULES[rule](
        rows,
        np.tile(np.array(p), (count, 1)),
        np.tile(np.array(drafts, dtype=np.int64).reshape(1, length), (count, 1)),
        grid[:, :length],
        grid[:, length],
        np.tile(np.array(q).reshape(1, length, vocab), (count, 1, 1)),
    )
    law = {}
    for tokens, w in zip(verdict.token_lists(), weight):
        law[tuple(tokens)] = law.get(tuple(tokens), 0.0) + w
    return law


def completed(toy, r, prefix, count):
    """[V ** count] the law of the first ``count`` tokens when the target goes on behind ``prefix``."""
    law = np.zeros([toy.vocab] * count)
    head = prefix[:count]
    for tail in itertools.product(range(toy.vocab), repeat=count - len(head)):
        tokens, mass = head, 1.0
        for x in tail:
            mass *= toy.p(r, tokens)[x]
            tokens = (*tokens, x)
        law[tokens] += mass
    return law.ravel()


def product(toy, prefixes, count):
    """The joint law of requests that go on by themselves behind ``prefixes``."""
    return functools.reduce(np.multiply.outer, [completed(toy, r, x, count) for r, x in enumerate(prefixes)])


def confidences(toy, prefixes, drafts, peek=False):
    """[R, γ] the confidences of the drafts; with ``peek``, wrongly, of what they are themselves."""
    see = 1 if peek else 0
    table = [[toy.c(r, prefixes[r], d[: k + see]) for k in range(toy.gamma)] for r, d in drafts.items()]
    return np.array(table).reshape(len(table), toy.gamma)


def speculate(toy, rule, policy, cycles=1, count=2, peek=False, limit=None):
    """[V ** count] * R the joint law of each request's first ``count`` tokens after ``cycles`` rounds.

    Requests that have ``count`` tokens leave the batch; what is missing after the last round the target adds. A policy
    hears what was kept of every round.
    """

    @functools.cache
    def one(r, prefix, drafts):
        p = [toy.p(r, prefix + drafts[:k]) for k in range(len(drafts) + 1)]
        q = [toy.q(r, prefix, drafts[:k]) for k in range(len(drafts))]
        return emission_law(rule, p, q, drafts)

    def key(state):
        return state[0], pickle.dumps(state[1])

    states = {key(((((),) * toy.requests), policy)): (((),) * toy.requests, policy, 1.0)}
    for cycle in range(cycles):
        after = {}
        for prefixes, before, mass in states.values():
            live = [r for r in range(toy.requests) if len(prefixes[r]) < count]
            for outcome in itertools.product(itertools.product(range(toy.vocab), repeat=toy.gamma), repeat=len(live)):
                drafts = dict(zip(live, outcome))
                drawn = mass
                for r, d in drafts.items():
                    drawn *= np.prod([toy.q(r, prefixes[r], d[:k])[d[k]] for k in range(toy.gamma)])
                acting = copy.deepcopy(before)
                allowed = np.full(len(live), toy.gamma) if limit is None else np.array([limit[r] for r in live])
                schedule = acting.plan(live, confidences(toy, prefixes, drafts, peek), allowed)
                lens, promised = schedule.lens, getattr(schedule, "survival", None)
                options = [one(r, prefixes[r], drafts[r][:n]).items() for r, n in zip(live, lens)]
                for picks in itertools.product(*options):
                    new, weight = list(prefixes), drawn
                    for r, (emitted, chance) in zip(live, picks):
                        new[r], weight = (prefixes[r] + emitted)[:count], weight * chance
                    state = (tuple(new), acting)
                    if promised is not None and cycle + 1 < cycles:
                        state = (tuple(new), copy.deepcopy(acting))
                        state[1].landed(promised, lens, np.array([len(emitted) - 1 for emitted, _ in picks]))
                    old = after.get(key(state), (0, 0, 0.0))
                    after[key(state)] = (*state, old[2] + weight)
        states = after
    return sum(mass * product(toy, prefixes, count) for prefixes, _, mass in states.values())


def target(toy, count=2):
    """What :func:`speculate` must equal."""
    return product(toy, ((),) * toy.requests, count)


def jagged(seed):
    """A measured curve with drops and plateaus, as real ones have."""
    rng = np.random.default_rng(seed)
    drops = np.where(rng.random(8) < 0.5, 1.0, rng.uniform(0.5, 0.9, 8))
    return StaircaseTable(np.arange(1, 9), drops.cumprod())


def aged(seed, toy, lag=2):
    """An async policy with a history: two steps of these requests, at the second of which one was not there yet."""
    policy, rng = AsyncPolicy(jagged(seed), lag), np.random.default_rng(seed)
    for step in range(lag):
        present = list(range(toy.requests)) if step != 1 else list(range(toy.requests - 1))
        c = rng.uniform(0.2, 1.0, (len(present), toy.gamma))
        schedule = policy.plan(present, c, np.full(len(present), toy.gamma))
        policy.landed(schedule.survival, schedule.lens, rng.integers(0, schedule.lens + 1))
    return policy


class SearchOnCurrent:
    """The mistake of Appendix A: the best budget over the whole curve, found with the current confidences."""

    def __init__(self, sps):
        self.sps = sps

    def plan(self, requests, c, max_lens, other_rows=0):
        a, gamma = survival(c), c.shape[1]
        order = np.argsort(-a.T.ravel(), kind="stable")
        tau = len(requests) + np.append(0.0, a.T.ravel()[order].cumsum())
        theta = tau * self.sps.steps_per_second(len(requests), len(requests) + np.arange(len(tau)))
        lens = np.bincount(order[: theta.argmax()] % len(requests), minlength=len(requests))
        assert lens.max() <= gamma
        return type("Schedule", (), {"lens": lens})


POLICIES = {
    "static": lambda seed, toy: StaticPolicy(),
    "threshold": lambda seed, toy: ThresholdPolicy(0.5),
    "sync": lambda seed, toy: SyncPolicy(jagged(seed)),
    "async": aged,
}


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("mode", list(POLICIES))
def test_two_tokens_of_two_requests_have_the_target_law(mode, rule):
    trimmed = set()
    for seed in range(8):
        toy = Toy(seed)
        policy = POLICIES[mode](seed, toy)
        assert np.abs(speculate(toy, rule, policy) - target(toy)).max() < EXACT, seed
        drafts = {0: (0, 0), 1: (0, 1)}
        c = confidences(toy, ((), ()), drafts)
        trimmed.add(tuple(copy.deepcopy(policy).plan([0, 1], c, np.array([2, 2])).lens.tolist()))
    assert mode == "static" or len(trimmed) > 2, "the policy must have trimmed in different ways"


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("mode", list(POLICIES))
def test_three_tokens_over_two_rounds_have_the_target_law(mode, rule):
    for seed in (11, 12):
        toy = Toy(seed)
        policy = aged(seed, toy, lag=1) if mode == "async" else POLICIES[mode](seed, toy)
        joint = speculate(toy, rule, policy, cycles=2, count=3)
        assert np.abs(joint - target(toy, 3)).max() < EXACT


def test_three_requests_with_different_limits_have_the_target_law():
    toy = Toy(21, requests=3)
    for policy in (SyncPolicy(jagged(21)), aged(21, toy)):
        joint = speculate(toy, "token", policy, limit=(2, 1, 0))
        assert np.abs(joint - target(toy)).max() < EXACT


def test_vocabulary_of_three():
    toy = Toy(31, vocab=3)
    for rule in RULES:
        assert np.abs(speculate(toy, rule, SyncPolicy(jagged(31))) - target(toy)).max() < EXACT


class SlackByCurrent(AsyncPolicy):
    """A mistake: whether everything is verified is decided with the current confidences."""

    def plan(self, requests, c, max_lens, other_rows=0):
        schedule = super().plan(requests, c, max_lens, other_rows)
        flat = self._is_flat(self._theta(survival(c), max_lens, other_rows), int(max_lens.sum()))
        return schedule._replace(lens=max_lens) if flat else schedule


def looking(seed, toy, slack, kind=AsyncPolicy):
    """An aged policy whose next step looks at confidences, and may verify everything by those before."""
    policy = aged(seed, toy)
    policy.__class__, policy._slack = kind, slack
    assert policy.reads_confidences
    return policy


@pytest.mark.parametrize("rule", ["token", "block"])
def test_looks_that_may_lead_to_verifying_everything_keep_the_target_law(rule):
    granted = []
    for seed in range(12):
        toy = Toy(seed)
        policy = looking(seed, toy, slack=0.3)
        assert np.abs(speculate(toy, rule, policy) - target(toy)).max() < EXACT, seed
        policy.plan([0, 1], confidences(toy, ((), ()), {0: (0, 0), 1: (0, 1)}), np.array([2, 2]))
        granted.append(not policy.reads_confidences)
    assert 2 < sum(granted) < 10
    toy = Toy(21, requests=3)
    joint = speculate(toy, rule, looking(21, toy, slack=0.3), limit=(2, 1, 0))
    assert np.abs(joint - target(toy)).max() < EXACT


def test_a_slack_by_current_confidences_is_caught():
    biases = []
    for seed in (1, 20, 46, 49):
        toy = Toy(seed)
        for slack in (0.1, 0.3):
            policy = looking(seed, toy, slack, SlackByCurrent)
            biases.append(np.abs(speculate(toy, "token", policy) - target(toy)).max())
    assert max(biases) > 1e-2, biases


@pytest.mark.parametrize("rule", ["token", "block"])
def test_joint_law_matches_the_oracle(rule):
    data = load_file(DATA / "rejection_exact.safetensors")
    p, q = [data["P1"], data["P2"], data["P3"]], [data["Q1"], data["Q2"]]
    for length in (0, 1, 2):
        joint = np.zeros((3, 3, 3))
        for drafts in itertools.product(range(3), repeat=length):
            laws = [p[k][drafts[:k]] for k in range(length + 1)], [q[k][drafts[:k]] for k in range(length)]
            drawn = np.prod([law[x] for law, x in zip(laws[1], drafts)])
            for emitted, chance in emission_law(rule, *laws, drafts).items():
                rest = data["joint"][emitted] if emitted else data["joint"]
                joint[emitted] += drawn * chance * rest / rest.sum()
        assert np.abs(joint - data["joint"]).max() < EXACT


def test_block_verification_keeps_more():
    for seed in range(6):
        toy = Toy(seed, requests=1, vocab=3, gamma=2)
        kept = dict.fromkeys(RULES, 0.0)
        for drafts in itertools.product(range(3), repeat=2):
            p = [toy.p(0, drafts[:k]) for k in range(3)]
            q = [toy.q(0, (), drafts[:k]) for k in range(2)]
            drawn = q[0][drafts[0]] * q[1][drafts[1]]
            for rule in RULES:
                kept[rule] += drawn * sum(w * (len(e) - 1) for e, w in emission_law(rule, p, q, drafts).items())
        assert kept["block"] >= kept["token"] - EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_search_with_current_confidences_is_caught(rule):
    """Curves with one drop, where a search sees past the drop what the next confidences will be."""
    biases = []
    for seed in range(12):
        toy = Toy(seed)
        for drop in (0.65, 0.6, 0.55, 0.5):
            curve = StaircaseTable(np.array([1, 3]), np.array([1.0, drop]))
            biases.append(np.abs(speculate(toy, rule, SearchOnCurrent(curve)) - target(toy)).max())
            if biases[-1] > 1e-3:
                right = speculate(toy, rule, SyncPolicy(curve))
                assert np.abs(right - target(toy)).max() < EXACT
    assert max(biases) > 1e-2 and sum(b > 1e-3 for b in biases) >= 3, biases


@pytest.mark.parametrize("mode", ["sync", "async", "threshold"])
def test_confidences_that_see_their_own_draft_are_caught(mode):
    biases = []
    for seed in range(16):
        toy = Toy(seed)
        policy = POLICIES[mode](seed, toy)
        biases.append(np.abs(speculate(toy, "token", policy, peek=True) - target(toy)).max())
    assert max(biases) > 1e-2 and sum(b > 1e-3 for b in biases) >= 5, biases


class Example(Toy):
    """One request with the constants of a worked example, V = 2; only the first token matters."""

    def __init__(self, p, q, confidence, gamma):
        super().__init__(0, requests=1, vocab=2, gamma=gamma)
        self._p, self._q, self._confidence = np.array(p), np.array(q), confidence

    def p(self, r, prefix):
        return self._p

    def q(self, r, prefix, drafted):
        return self._q

    def c(self, r, prefix, before):
        return self._confidence(before)


def test_appendix_a():
    data = json.loads((DATA / "worked_examples.json").read_text())["appendix_a"]
    sps = StaircaseTable(np.arange(1, 4), np.array(data["sps"]))
    second = (data["c2_if_x1_is_A"], data["c2_if_x1_is_B"])
    toy = Example(
        data["p_target"], data["p_draft"], lambda before: data["a1"] if not before else second[before[0]], gamma=2
    )
    first = speculate(toy, "token", SyncPolicy(sps), count=1)
    assert np.abs(first - data["first_token_law_early_stop"]).max() < EXACT
    searched = speculate(toy, "token", SearchOnCurrent(sps), count=1)
    assert np.abs(searched - data["first_token_law_global_search"]).max() < EXACT
    assert np.abs(searched - data["p_target"]).max() > 0.1


def test_alignment_counterexample():
    data = json.loads((DATA / "worked_examples.json").read_text())["seed_alignment_counterexample"]
    sps = StaircaseTable(np.arange(1, 3), np.array(data["sps"]))
    own = (data["c1_if_x1_is_A"], data["c1_if_x1_is_B"])
    peeking = Example(data["p_target"], data["p_draft"], lambda before: own[before[0]], gamma=1)
    wrong = speculate(peeking, "token", SyncPolicy(sps), count=1, peek=True)
    assert np.abs(wrong - data["first_token_law_seed_alignment"]).max() < EXACT
    for c1 in (0.8, 0.3):
        toy = Example(data["p_target"], data["p_draft"], lambda before, c1=c1: c1, gamma=1)
        right = speculate(toy, "token", SyncPolicy(sps), count=1)
        assert np.abs(right - data[f"first_token_law_paper_alignment_c1_{c1}".replace(".", "p")]).max() < EXACT


def streams_law(p, q, shared):
    """[V, V] the law of two tokens, one draft; ``shared`` maps its draft, coin and final draw to streams."""
    vocab = len(q)
    points = set(np.cumsum(q).tolist())
    for x in range(vocab):
        coins, finals = breakpoints(p, [q], (x,))
        points |= coins[0] | finals
    mids, widths = cells(points)
    names = sorted(set(shared.values()))
    joint = np.zeros((vocab, vocab))
    for place in itertools.product(range(len(mids)), repeat=len(names)):
        u = {name: mids[i] for name, i in zip(names, place)}
        weight = np.prod(widths[list(place)])
        x = int(np.searchsorted(np.cumsum(q), u[shared["draft"]], side="right"))
        verdict = verify_tokens(
            PackedRows.from_lens([1], 1),
            np.array([p[0], p[1]]),
            np.array([[x]]),
            np.array([[u[shared["coin"]]]]),
            np.array([u[shared["final"]]]),
            q[None, None],
        )
        tokens = verdict.token_lists()[0]
        if len(tokens) == 2:
            joint[tuple(tokens)] += weight
        else:
            joint[tokens[0]] += weight * p[1]
    return joint


def test_shared_noise_streams_are_caught():
    rng = np.random.default_rng(5)
    p, q = rng.dirichlet(np.ones(3), 2), rng.dirichlet(np.ones(3))
    want = np.outer(p[0], p[1])
    apart = streams_law(p, q, {"draft": "a", "coin": "b", "final": "c"})
    assert np.abs(apart - want).max() < EXACT
    for shared in (
        {"draft": "a", "coin": "a", "final": "c"},
        {"draft": "a", "coin": "b", "final": "a"},
        {"draft": "a", "coin": "b", "final": "b"},
    ):
        assert np.abs(streams_law(p, q, shared) - want).max() > 1e-2, shared


def test_a_law_other_than_the_drawn_one_is_caught():
    """The likeliest draft judged as if it had been drawn from the whole law, and as the one-point law it had."""
    rng = np.random.default_rng(7)
    p, q = rng.dirichlet(np.ones(3), 2), rng.dirichlet(np.ones(3))
    x = int(q.argmax())
    for law, bias in ((np.eye(3)[x], False), (q, True)):
        joint = np.zeros((3, 3))
        for emitted, chance in emission_law("token", list(p), [law], (x,)).items():
            joint[emitted] += chance if len(emitted) == 2 else chance * p[1]
        error = np.abs(joint - np.outer(p[0], p[1])).max()
        assert error > 1e-2 if bias else error < EXACT
