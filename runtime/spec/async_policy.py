"""The asynchronous policy: a budget from earlier steps, and whether to draft at all. See :mod:`.schedule`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from .admission import Throughput, rank, rank_alone
from .confidence import survival
from .habit import Habit
from .kept_share import KeptShare
from .schedule import Schedule, required
from .sps import SpsTable

MIN_SURVIVAL = 1e-6
"""Drafts that are less likely to survive are not worth a row, whatever the budget."""

ASYNC_LAG = 2
"""Steps between the confidences that set the budget and the step that uses it; in the second step of all, one."""

LEAST_GAIN = 0.2
"""What drafting must promise, in tokens a second, to be worth it. Requests whose drafts are kept end sooner than the
others, which then run in smaller batches: a batch that gains less than this ends later than without a draft."""

USUAL_STEPS = 50
"""Drafting steps that the running mean of survivals, which says whether drafting pays, reaches back; a look counts for
the steps without one before it."""

SLACK, LOOKS_EVERY = 0.08, 8
"""Where the best budget promises at most this share of tokens a second more than verifying everything, everything is
verified, and the confidences are looked at again after so many steps, or when there are more requests or other rows.
Looking takes time, and a budget from earlier steps never fits the current drafts as well as it fitted those."""


class AsyncPolicy:
    """Production form (paper section 5.2): a budget from earlier confidences, spent on the best current drafts.

    The budget K is the argmax of Θ over all K, with the survivals these requests had ``lag`` steps ago, or in the first
    step if that is later (the running mean for requests that had none, 1 before there is any), corrected by what was
    kept of such promises so far: a search over the whole, jagged curve, ready before the current drafts exist. Then the
    K best current drafts are verified.

    Whether to draft at all is decided by what is usual. What a request's last drafts promised says how many to verify,
    but not that it is time to stop: the next ones may be as good as most.

    With ``slack`` above 0, everything is verified, for some steps without a look at the confidences, while the best
    budget is not better by more than that share; the survivals of those steps are taken to be the usual ones, what was
    kept of them counts, and the last look stands for all of them where a budget asks for earlier survivals. The paper
    has no slack.

    P2: K is a function of past steps only, thus a constant as far as the current drafts are concerned. For a constant
    K, taking the K best is admission in falling order of survival until K are taken, and by the argument of
    :class:`.schedule.SyncPolicy` whether x_{r,k} is among them depends only on drafts admitted before it. A search over
    K with the current survivals would not be lossless, and a budget from the last step would be, but would have to wait
    for it. What was kept is known only when a step has ended, and moves K, never the order of admission. A step without
    drafts is one whose lengths are 0 by a constant, and one that verifies everything has lengths that were known before
    anything was drafted; which of the two a step is, past steps say.
    """

    def __init__(self, sps: SpsTable, lag: int = ASYNC_LAG, slack: float = 0.0) -> None:
        if lag < 1:
            raise ValueError(f"the budget must come from an earlier step: the lag must be at least 1, got {lag}")
        self._throughput, self._slack = Throughput(sps), slack
        self._unlooked, self._skipped = 0, 0  # steps without a look: still to come, and since the last look
        self._granted = (0, 0)  # requests, at most, and other rows of the steps that these are
        self._past: deque[dict[Hashable, np.ndarray]] = deque(maxlen=lag)
        self._usual = Usual()
        self._kept = KeptShare()
        self._habit = Habit()

    @property
    def reads_confidences(self) -> bool:
        """See :class:`.schedule.VerifyPolicy`: not in steps that verify everything."""
        return self._unlooked == 0

    def wants_draft(self, num_requests: int, max_lens: Callable[[], np.ndarray], other_rows: int = 0) -> bool:
        """See :class:`.schedule.VerifyPolicy`; now and then drafting is tried though it is not expected to pay."""
        shape = (num_requests, other_rows)
        goes_on = self._habit.goes_on(
            shape,
            lambda: self._pays(max_lens(), other_rows),
            lambda: self._cost_of_try(num_requests, other_rows),
        )
        most_requests, same_rows = self._granted
        fits = num_requests <= most_requests and other_rows == same_rows
        if not fits or not goes_on or self._habit.is_trying:  # a try is there to look
            self._unlooked = 0
        return goes_on

    def _pays(self, max_lens: np.ndarray, other_rows: int) -> bool:
        plain = self._throughput.plain(len(max_lens), other_rows)
        mean = self._usual.mean()
        if plain is None or mean is None:
            return True
        usual = np.tile(mean, (len(max_lens), 1))
        gained = LEAST_GAIN if len(max_lens) > 1 else 0.0
        return bool(self._theta(usual, max_lens, other_rows).max() > (1.0 + gained) * plain)

    def _cost_of_try(self, num_requests: int, other_rows: int) -> float:
        """In steps that do not draft: how much longer one takes that verifies a draft of each request."""
        sps, rows = self._throughput.sps, np.array([other_rows + 2 * num_requests])
        plain = sps.plain_steps_per_second(num_requests, other_rows)
        return plain / float(sps.steps_per_second(num_requests, rows)[0]) - 1.0

    def plan(
        self, requests: Sequence[Hashable], c: np.ndarray | None, max_lens: np.ndarray, other_rows: int = 0
    ) -> Schedule:
        """See :class:`.schedule.VerifyPolicy`. Every call is one step of the history; one that does not look at the
        confidences repeats the last look."""
        if self._unlooked:
            self._unlooked -= 1
            self._skipped += 1
            self._past.append(self._past[-1])
            return Schedule(max_lens, np.repeat(self._usual.mean()[None], len(max_lens), axis=0))
        a = survival(required(c))
        theta = self._theta(self._known(requests, a.shape[1]), max_lens, other_rows)
        self._past.append(dict(zip(requests, a, strict=True)))
        if len(a):
            self._usual.add(a, 1 + self._skipped)
        self._skipped = 0
        if self._is_flat(theta, int(max_lens.sum())):
            self._unlooked, self._granted = LOOKS_EVERY - 1, (len(max_lens), other_rows)
            return Schedule(max_lens, a, len(theta) - 1)
        budget = int(theta.argmax())
        if self._habit.is_trying:  # it would learn nothing from a step that verifies nothing
            budget = max(budget, len(max_lens))
        _, request = rank(a, max_lens, MIN_SURVIVAL)
        return Schedule(np.bincount(request[:budget], minlength=len(max_lens)), a, budget)

    def _is_flat(self, theta: np.ndarray, num_drafts: int) -> bool:
        """Whether verifying all ``num_drafts`` comes within the slack of the best of ``theta``, which may lack some."""
        if not self._slack or not 1 < len(theta) == 1 + num_drafts:
            return False
        return bool(theta.max() <= (1.0 + self._slack) * theta[-1])

    def landed(self, survival: np.ndarray, lens: np.ndarray, accepted: np.ndarray) -> None:
        """See :class:`.schedule.VerifyPolicy`."""
        self._kept.add(survival, lens, accepted)

    def _theta(self, known: np.ndarray, max_lens: np.ndarray, other_rows: int) -> np.ndarray:
        """Θ by the budget, for survivals ``known`` [R, γ]."""
        ranked = rank_alone(self._kept.correct(known), max_lens, MIN_SURVIVAL)
        return self._throughput.of(len(max_lens), ranked, other_rows)

    def _known(self, requests: Sequence[Hashable], gamma: int) -> np.ndarray:
        """[R, γ] the survivals of the oldest remembered step; for requests that were not in it, what is usual, or 1."""
        past = self._past[0] if self._past else {}
        rows = [past.get(key) for key in requests]
        if any(row is None for row in rows):
            mean = self._usual.mean()
            usual = np.ones(gamma) if mean is None else mean
            rows = [usual if row is None else row for row in rows]
        return np.array(rows).reshape(len(rows), gamma)


class Usual:
    """The running mean of survivals over the last steps, worked out when it is asked for."""

    def __init__(self) -> None:
        self._news: list[tuple[np.ndarray, int]] = []
        self._mean: np.ndarray | None = None
        self._num_steps = 0  # that it is the mean of

    def add(self, survival: np.ndarray, num_steps: int) -> None:
        """The survivals [R, γ], of one request at least, of a step that stands for ``num_steps``."""
        self._news.append((survival, num_steps))
        if len(self._news) == USUAL_STEPS:
            self.mean()

    def mean(self) -> np.ndarray | None:
        """[γ] of all requests; None before there was a step."""
        for of_requests, num_steps in self._news:
            self._num_steps = min(self._num_steps + num_steps, USUAL_STEPS)
            of_step, mean = of_requests.mean(axis=0), 0.0 if self._mean is None else self._mean
            self._mean = mean + (of_step - mean) * num_steps / self._num_steps
        self._news.clear()
        return self._mean
