"""Verify policies against reference schedules, worked examples and plain loops."""

import json
import logging
import pathlib

import numpy as np
import pytest
from dspark.runtime.spec.async_policy import LOOKS_EVERY, SLACK, AsyncPolicy
from dspark.runtime.spec.confidence import conditional, survival, threshold_lens
from dspark.runtime.spec.habit import ASKED_EVERY, MAX_PATIENCE, TRY_SHARE, Habit
from dspark.runtime.spec.kept_share import KeptShare
from dspark.runtime.spec.policy import make_policy
from dspark.runtime.spec.schedule import StaticPolicy, SyncPolicy, ThresholdPolicy
from dspark.runtime.spec.sps import AdditiveTable, StaircaseTable

DATA = pathlib.Path(__file__).resolve().parents[2] / "data" / "speculative"


def curve(sps):
    """The table of a list that starts at one row."""
    return StaircaseTable(np.arange(1, len(sps) + 1), np.array(sps))


def full(c):
    return np.full(len(c), len(c[0]) if len(c) else 0)


def check(cases):
    for case in cases:
        c, table, keys = np.array(case["c"]), curve(case["sps"]), list(range(case["R"]))
        sync = SyncPolicy(table).plan(keys, c, full(c))
        assert sync.lens.tolist() == case["sync"]["lens"]
        assert abs(sync.expected - case["sync"]["tau"]) < 1e-9
        policy, history = AsyncPolicy(table), np.array(case["history_c"])
        policy.plan(keys, history, full(c))
        policy.plan(keys, np.full_like(c, 0.5), full(c))
        schedule = policy.plan(keys, c, full(c))
        assert schedule.budget == case["async_K"]
        assert schedule.lens.tolist() == case["async_lens"]


def test_schedules_match_the_oracle():
    cases = json.loads((DATA / "scheduler.json").read_text())["cases"]
    check(cases)
    # The two policies and the mistaken search must be told apart by the data.
    assert any(c["sync"]["lens"] != c["global_search"]["lens"] for c in cases)
    assert any(c["async_lens"] != c["global_search"]["lens"] for c in cases)


def test_schedules_match_the_whole_oracle(shared):
    check(json.loads((shared / "oracle" / "speculative" / "dev_scheduler.json").read_text())["cases"])


def test_the_worked_example():
    data = json.loads((DATA / "worked_examples.json").read_text())["seed"]
    c = np.array([data["c"]])
    assert np.abs(survival(c)[0] - data["survival"]).max() < 1e-12
    schedule = SyncPolicy(curve(data["sps"])).plan(["a"], c, full(c))
    assert schedule.lens.tolist() == data["sync"]["lens"] == [data["keep"]]
    assert abs(schedule.expected - data["sync"]["tau"]) < 1e-12


def test_appendix_a_is_cut_the_same_way_whatever_was_drafted():
    data = json.loads((DATA / "worked_examples.json").read_text())["appendix_a"]
    policy = SyncPolicy(curve(data["sps"]))
    for case in ("case_high", "case_low"):
        c = np.array([data[case]["c"]])
        assert policy.plan(["a"], c, full(c)).lens.tolist() == data[case]["sync"]["lens"] == [0]


def test_an_additive_budget_matches_the_oracle():
    data = json.loads((DATA / "sps_table.json").read_text())["additive"]
    names = ("bs_probes", "alpha_seconds", "m_probes", "theta_seconds")
    table = AdditiveTable(data["bias_seconds"], *[np.array(data[name], dtype=float) for name in names])
    a = np.array(data["survival"])
    c = np.concatenate([a[:, :1], a[:, 1:] / a[:, :-1]], axis=1)
    keys = list(range(len(a)))
    policy = AsyncPolicy(table, lag=1)
    policy.plan(keys, c, full(c))
    schedule = policy.plan(keys, c, full(c))
    assert schedule.budget == data["budget"] == schedule.lens.sum()
    assert (
        abs(schedule.expected * table.steps_per_second(20, np.array([130]))[0] - data["theta"]) < 1e-6 * data["theta"]
    )


def loop_sync(c, sps, max_lens, other_rows):
    """Algorithm 1 as written: a frontier of one candidate a request."""
    lens, tau, rows = [0] * len(c), float(len(c)), len(c) + other_rows
    best = tau * sps[rows - 1]
    while True:
        frontier = [
            (-np.prod(c[r][: lens[r] + 1]), lens[r], r)
            for r in range(len(c))
            if lens[r] < max_lens[r] and np.prod(c[r][: lens[r] + 1]) > 0
        ]
        if not frontier:
            return lens
        negative, _, r = min(frontier)
        if not (tau - negative) * sps[rows] > best:
            return lens
        tau, rows, lens[r] = tau - negative, rows + 1, lens[r] + 1
        best = tau * sps[rows - 1]


def test_sync_is_the_best_first_walk_with_limits_and_other_rows():
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        requests, gamma, other = int(rng.integers(1, 6)), int(rng.integers(1, 6)), int(rng.integers(0, 4))
        c = rng.choice([0.0, 0.3, 0.5, 0.9, 1.0], (requests, gamma))
        max_lens = rng.integers(0, gamma + 1, requests)
        sps = np.where(rng.random(60) < 0.7, 1.0, rng.uniform(0.6, 0.95, 60)).cumprod()
        schedule = SyncPolicy(curve(sps)).plan(list(range(requests)), c, max_lens, other)
        assert schedule.lens.tolist() == loop_sync(c.tolist(), sps.tolist(), max_lens.tolist(), other)
        seen.add(int(schedule.lens.sum()))
    assert len(seen) > 8


def test_async_uses_the_confidences_of_two_steps_ago():
    flat, keys = curve([1.0] * 4 + [0.1] * 20), ["a", "b"]
    low, high = np.full((2, 3), 0.01), np.full((2, 3), 0.99)
    steep = curve([1.0, 1.0, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1])
    policy = AsyncPolicy(steep)
    budgets = [policy.plan(keys, c, full(c)).budget for c in (low, high, high, low, low)]
    first, from_low, from_high = budgets[0], budgets[2], budgets[3]
    assert first == from_high, "the first step has no history and counts every draft as certain"
    assert (
        budgets[1] == from_low == 0
        and from_high == budgets[4] == AsyncPolicy(steep).plan(keys, high, full(high)).budget
    )
    late = AsyncPolicy(flat)
    late.plan(["a"], low[:1], full(low[:1]))
    late.plan(["a"], low[:1], full(low[:1]))
    assert late.plan(["a", "b"], low, full(low)).budget == 2, (
        "a new request counts as certain, up to the drop at 5 rows"
    )


def test_async_believes_what_was_kept_rather_than_what_was_promised():
    """Confidences of 0.9 of which nothing is kept: first fewer drafts are verified, then none are drawn; a step that
    tries again verifies at least one draft of each request, and once those are kept, drafting goes on."""
    table = AdditiveTable(1.0, np.array([1, 4]), np.zeros(2), np.array([1, 16]), np.array([0.0, 3.0]), np.full(2, 1.0))
    policy, keys, c = AsyncPolicy(table), ["a", "b"], np.full((2, 4), 0.9)
    assert [policy.plan(keys, c, full(c)).budget for _ in range(4)][-1] == 8
    budgets = []
    while policy.wants_draft(2, lambda: full(c)):
        schedule = policy.plan(keys, c, full(c))
        policy.landed(schedule.survival, schedule.lens, np.zeros(2, np.int64))
        budgets.append(schedule.budget)
        assert len(budgets) < 200
    assert budgets == sorted(budgets, reverse=True) and budgets[0] == 8
    waited = 1
    while not policy.wants_draft(2, lambda: full(c)):
        waited += 1
        assert waited < 100
    cost = 0.6  # a step with 4 rows takes 1 + 3 * 3 / 15 for the 1 of a step without drafts
    assert waited == round(cost / TRY_SHARE)
    schedule = policy.plan(keys, c, full(c))
    assert schedule.budget >= 2 and schedule.lens.min() >= 1
    for _ in range(200):
        policy.landed(np.full((2, 4), 0.5), np.full(2, 4), np.full(2, 4))
    assert policy.wants_draft(2, lambda: full(c)) and policy.plan(keys, c, full(c)).budget == 8


def test_a_habit_is_asked_again_after_a_while_or_in_another_shape():
    habit, asked = Habit(), []

    def goes_on(shape, pays, cost=1.0):
        return habit.goes_on(shape, lambda: asked.append(shape) or pays, lambda: cost)

    assert [goes_on(1, True) for _ in range(2 * ASKED_EVERY)] == [True] * 2 * ASKED_EVERY and asked == [1, 1]
    wait = int(1 / TRY_SHARE)
    for times in (1, 2, 4):  # each failed try doubles the wait
        assert [goes_on(2, False) for _ in range(times * wait)] == [False] * times * wait
        assert not habit.is_trying and goes_on(2, False) and habit.is_trying
    assert asked == [1, 1, 2, 2, 2]
    assert goes_on(1, True) and not habit.is_trying
    assert [goes_on(2, False) for _ in range(wait + 1)] == [False] * wait + [True], "what paid in between starts anew"


def test_tries_come_whatever_the_shapes_do_and_however_many_have_failed():
    for shapes in ([3, 4], [1]):
        habit, tries = Habit(), []
        for step in range(200 * MAX_PATIENCE):
            if habit.goes_on(shapes[step % len(shapes)], lambda: False, lambda: 1.0):
                tries.append(step)
        waits = np.diff(tries)
        assert waits[0] == 2 * int(1 / TRY_SHARE) + 1 and waits.max() == waits[-1] == MAX_PATIENCE + 1
        assert len(tries) > 190
    cheap = Habit()
    assert all(cheap.goes_on(1, lambda: False, lambda: 0.0) for _ in range(3000)), "each step is a try that fails"


def test_corrected_survivals_stay_probabilities():
    kept = KeptShare()
    a = np.full((3, 2), 0.5)
    assert np.array_equal(kept.correct(a), a)
    for _ in range(400):
        kept.add(a, np.array([2, 1, 0]), np.array([2, 1, 0]))
    assert np.abs(kept.correct(a) - 1.0).max() < 0.2 and kept.correct(np.ones((1, 2))).max() == 1.0
    for _ in range(1000):
        kept.add(a, np.array([0, 0, 0]), np.zeros(3, np.int64))
    assert np.abs(kept.correct(a) - a).max() < 1e-6, "without news it is forgotten"


def test_async_spends_the_budget_on_the_best_current_drafts():
    policy = AsyncPolicy(curve([1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.1, 0.1]))
    c = np.array([[0.5, 0.9, 0.9], [0.9, 0.9, 0.1]])
    schedule = policy.plan([0, 1], c, full(c))
    assert schedule.budget == 2 and schedule.lens.tolist() == [0, 2]
    assert abs(schedule.expected - (2 + 0.9 + 0.81)) < 1e-12
    assert policy.plan([0, 1], c, np.array([3, 0])).lens.tolist() == [2, 0]
    with pytest.raises(ValueError, match="got 0"):
        AsyncPolicy(curve([1.0]), lag=0)


def test_async_with_slack_verifies_everything_unseen_while_trimming_gains_little():
    """The fourth draft costs a fifth of the speed, for which a budget of 3 gains 8 % with drafts that survive by 0.9
    each, and 28 % with poor ones."""
    table, c, poor = curve([1.0, 1.0, 1.0, 1.0, 0.78]), np.full((1, 4), 0.9), np.full((1, 4), 0.1)
    keen, easy = AsyncPolicy(table, slack=0.02), AsyncPolicy(table, slack=0.1)
    assert [keen.plan([0], c, full(c)).lens.tolist() for _ in range(3)] == [[3]] * 3
    looked, lens = [], []
    for step in range(2 * LOOKS_EVERY + 3):
        looked.append(easy.reads_confidences)
        schedule = easy.plan([0], (poor if step else c) if looked[-1] else None, full(c))
        lens.append(int(schedule.lens[0]))
        assert (schedule.budget is not None) is looked[-1] and schedule.survival.shape == (1, 4)
    looks = [step for step, look in enumerate(looked) if look]
    assert looks == [0, LOOKS_EVERY, 2 * LOOKS_EVERY, 2 * LOOKS_EVERY + 1, 2 * LOOKS_EVERY + 2]
    assert lens == [4] * 2 * LOOKS_EVERY + [3] * 3, "poor drafts count from the second look on, then at every step"


@pytest.mark.parametrize("slack", [0.0, SLACK])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_async_stops_drafting_when_drafts_are_no_longer_kept(num_requests, slack):
    """Verified rows cost next to nothing, so everything is verified; a draft takes .7 of a plain step."""
    table = AdditiveTable(1.7, np.array([1, 8]), np.zeros(2), np.array([1, 64]), np.array([0.0, 0.05]), np.full(2, 1.0))
    policy, keys, max_lens = AsyncPolicy(table, slack=slack), list(range(num_requests)), np.full(num_requests, 5)
    numbers, looked = np.random.default_rng(0), 0

    def drafts(kept_share):
        nonlocal looked
        if not policy.wants_draft(num_requests, lambda: max_lens):
            return False
        looked += policy.reads_confidences
        c = np.full((num_requests, 5), kept_share) if policy.reads_confidences else None
        schedule = policy.plan(keys, c, max_lens)
        kept = (numbers.random((num_requests, 5)) < kept_share).cumprod(axis=1).sum(axis=1)
        policy.landed(schedule.survival, schedule.lens, np.minimum(kept, schedule.lens))
        return True

    assert all(drafts(0.9) for _ in range(200))
    assert looked == 200 if slack == 0 else looked == 200 / LOOKS_EVERY
    stopped = next(step for step in range(1000) if not drafts(0.25))
    assert stopped < 200


def test_async_with_slack_looks_again_in_another_shape_and_at_drafts_without_hope():
    flat_alone = AdditiveTable(
        1.0, np.array([1, 8]), np.array([0.0, 1.0]), np.array([1, 6, 8, 48]), np.array([0.0, 0.01, 0.02, 40.0])
    )
    policy, alone, many = AsyncPolicy(flat_alone, slack=SLACK), np.full((1, 5), 0.9), np.full((8, 5), 0.3)
    for _ in range(3):
        assert policy.wants_draft(1, lambda: full(alone))
        assert policy.plan([0], alone if policy.reads_confidences else None, full(alone)).lens.tolist() == [5]
    assert not policy.reads_confidences
    policy.wants_draft(8, lambda: full(many))
    assert policy.reads_confidences
    for _ in range(3):
        lens = policy.plan(list(range(8)), many, full(many)).lens
    assert lens.sum() < 8

    hopeless = np.array([[1e-7, 0.5, 0.5, 0.5, 0.5]])
    policy = AsyncPolicy(curve([1.0, 0.97, 0.5, 0.4, 0.3, 0.25]), slack=SLACK)
    assert [policy.plan([0], hopeless, full(hopeless)).lens.sum() for _ in range(9)] == [0] * 9


@pytest.mark.parametrize(
    "gain,drafts_alone,drafts_together", [(1.0, False, False), (1.15, True, False), (1.25, True, True)]
)
def test_async_drafts_for_a_batch_where_a_fifth_is_gained(gain, drafts_alone, drafts_together):
    """A draft that is always kept doubles the tokens of a step; a step with it takes 2 / gain times as long."""
    for num_requests, drafts in ((1, drafts_alone), (2, drafts_together)):
        round_seconds = 2.0 / gain
        table = AdditiveTable(
            round_seconds, np.array([1, 2]), np.zeros(2), np.array([1, 4]), np.zeros(2), plain_seconds=np.ones(2)
        )
        policy, max_lens = AsyncPolicy(table), np.ones(num_requests, np.int64)
        for _ in range(9):
            policy.wants_draft(num_requests, lambda max_lens=max_lens: max_lens)
            policy.plan(list(range(num_requests)), np.ones((num_requests, 1)), max_lens)
        assert policy.wants_draft(num_requests, lambda max_lens=max_lens: max_lens) is drafts


def test_sync_stops_at_a_tie():
    c = np.array([[1.0, 1.0]])
    schedule = SyncPolicy(curve([1.0, 0.5, 0.5])).plan([0], c, full(c))
    assert schedule.lens.tolist() == [0] and schedule.expected == 1.0


def test_certain_drafts_are_taken_in_order():
    for policy in (SyncPolicy(curve([1.0] * 5 + [0.01] * 9)), AsyncPolicy(curve([1.0] * 5 + [0.01] * 9))):
        c = np.ones((2, 4))
        assert policy.plan([0, 1], c, full(c)).lens.tolist() == [2, 1]


def test_threshold_cuts_before_the_first_low_confidence():
    c = np.array([[0.9, 0.4, 0.9], [0.3, 0.9, 0.9], [0.5, 0.5, 0.5]])
    assert threshold_lens(c, 0.5).tolist() == [1, 0, 3]
    assert threshold_lens(c, 0.0).tolist() == [3, 3, 3]
    schedule = ThresholdPolicy(0.5).plan([0, 1, 2], c, np.array([3, 3, 2]))
    assert schedule.lens.tolist() == [1, 0, 2] and abs(schedule.expected - (3 + 0.9 + 0.5 + 0.25)) < 1e-12
    with pytest.raises(ValueError, match=r"1\.5"):
        ThresholdPolicy(1.5)


def test_nan_confidence_admits_nothing_behind_it():
    c = np.array([[0.9, np.nan, 0.9]])
    for policy in (SyncPolicy(curve([1.0] * 9)), AsyncPolicy(curve([1.0] * 9)), ThresholdPolicy(0.0)):
        assert policy.plan([0], c, full(c)).lens.tolist() == [1]


def test_no_requests_and_no_drafts():
    for policy in (StaticPolicy(), SyncPolicy(curve([1.0] * 9)), AsyncPolicy(curve([1.0] * 9)), ThresholdPolicy(0.5)):
        assert policy.plan([], np.empty((0, 3)), np.empty(0, dtype=int)).lens.tolist() == []
        assert policy.plan([0, 1], np.empty((2, 0)), np.zeros(2, dtype=int)).lens.tolist() == [0, 0]


def test_modes_and_the_missing_table(caplog):
    table = curve([1.0, 0.5])
    assert isinstance(make_policy("static"), StaticPolicy)
    assert isinstance(make_policy("static", threshold=0.3), ThresholdPolicy)
    assert isinstance(make_policy("sync", table), SyncPolicy) and isinstance(make_policy("async", table), AsyncPolicy)
    for mode in ("sync", "async"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            policy = make_policy(mode)
        assert "every draft is verified" in caplog.text
        assert policy.plan([0], None, np.array([4])).lens.tolist() == [4], "nothing is trimmed"
    with pytest.raises(ValueError, match="'sometimes'"):
        make_policy("sometimes")
    with pytest.raises(ValueError, match="0.5"):
        make_policy("sync", table, threshold=0.5)
    for policy in (SyncPolicy(table), AsyncPolicy(table), ThresholdPolicy(0.5)):
        with pytest.raises(ValueError, match="no confidence head"):
            policy.plan([0], None, np.array([4]))


def test_confidence_is_the_logistic_function():
    z = np.array([[-800.0, -2.0, 0.0, 3.0, 800.0]])
    with np.errstate(over="ignore"):
        assert np.abs(conditional(z) - 1 / (1 + np.exp(-z))).max() < 1e-15
        halved = conditional(z, np.array([1.0, 2.0, 4.0, 0.5, 1.0]))
    assert np.abs(halved - 1 / (1 + np.exp(-np.clip([-800, -1, 0, 6, 800], -700, None)))).max() < 1e-15
