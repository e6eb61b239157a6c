"""How many drafts of each request are verified: fixed, by threshold, greedily (sync), or under a stale budget (async).

Shapes: R requests, γ drafts a block; numpy on the host. Names follow the paper, section 3.2.2: a_{r,j} is the
survival of draft j of request r, B the rows of the step, τ = R + Σ a the tokens it is expected to emit, Θ = τ·SPS(B)
tokens a second.

Losslessness (promise P2) asks one thing of a policy: whether draft x_{r,k} is verified must not depend on x_{r,k} or on
any later draft of that request, given what came before. Then, at every place that is verified, x_{r,k} still has its
draft law q when it meets the coin, and the coin's arithmetic holds unchanged. Each policy argues this for itself.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Hashable, Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from .confidence import survival, threshold_lens
from .sps import SpsTable

logger = logging.getLogger(__name__)

MIN_SURVIVAL = 1e-6
"""Drafts that are less likely to survive are not worth a row, whatever the budget."""

USUAL_SHARE = 0.1
"""Weight of the last step in the running mean of survivals that stands in for requests nothing is known about."""

TRY_SHARE, MAX_PATIENCE = 0.02, 512
"""While drafting does not pay, it is tried now and then to see whether it does by now: so seldom that this costs at
most this share of the time, and half as often whenever it did not, down to once in so many steps."""

FIRST_PROMISES, PROMISES_FADE = 4.0, 0.95
"""Kept promises that every place begins with and goes back to, and how much of the experience a step leaves."""

ASYNC_LAG = 2
"""Steps between the confidences that set the budget and the step that uses it."""


class Schedule(NamedTuple):
    """What a policy decided for one step."""

    lens: np.ndarray
    """[R] int64 drafts verified."""
    budget: int
    """Drafts the step might hold; the sum of ``lens`` or more."""
    expected: float | None = None
    """τ, tokens the step is expected to emit by the current confidences, for policies that read these."""
    survival: np.ndarray | None = None
    """[R, γ] the survivals that the lengths go by, for policies that want to hear in :meth:`VerifyPolicy.landed` what
    became of them."""


class VerifyPolicy(Protocol):
    """Decides the verified lengths of a step. One instance lives on one rank; the others receive its result."""

    reads_confidences: ClassVar[bool]
    """Whether :meth:`plan` looks at confidences; else it may be given ``None``."""

    def wants_draft(self, requests: Sequence[Hashable], max_lens: np.ndarray, other_rows: int = 0) -> bool:
        """Whether a step is worth drafting for at all; asked before anything is drafted. Arguments as ``plan``."""
        ...

    def plan(
        self, requests: Sequence[Hashable], c: np.ndarray | None, max_lens: np.ndarray, other_rows: int = 0
    ) -> Schedule:
        """The lengths of one step.

        Args:
            requests: R keys, never reused for another request.
            c: [R, γ] conditional confidences of the current drafts, ``None`` when the draft has no confidence head.
            max_lens: [R] int64 the most that may be verified (γ, tokens left to emit, cache), known before drafting.
            other_rows: rows of the step that are not of these requests (prefill chunks).
        """
        ...

    def landed(self, survival: np.ndarray, lens: np.ndarray, accepted: np.ndarray) -> None:
        """Hear that of a step with ``survival`` [R, γ] and ``lens`` [R] verified, ``accepted`` [R] drafts were kept."""
        ...


class Unmoved:
    """For policies that do not learn from what was kept."""

    def landed(self, survival: np.ndarray, lens: np.ndarray, accepted: np.ndarray) -> None:
        """See :class:`VerifyPolicy`."""


class AlwaysDrafts(Unmoved):
    """For policies that never save themselves the draft."""

    reads_confidences = True

    def wants_draft(self, requests: Sequence[Hashable], max_lens: np.ndarray, other_rows: int = 0) -> bool:
        """See :class:`VerifyPolicy`."""
        return True


class StaticPolicy(AlwaysDrafts):
    """Verify everything that may be verified.

    P2: the lengths are ``max_lens``, which was known before anything was drafted.
    """

    reads_confidences = False

    def plan(
        self, requests: Sequence[Hashable], c: np.ndarray | None, max_lens: np.ndarray, other_rows: int = 0
    ) -> Schedule:
        """See :class:`VerifyPolicy`."""
        return Schedule(max_lens, int(max_lens.sum()))


class FixedPolicy(Unmoved):
    """Verify the same number of drafts of every request, or (``None``) draft nothing at all; for measurements.

    P2: the lengths are a constant, or ``max_lens``, which was known before anything was drafted.
    """

    reads_confidences = False

    def __init__(self, length: int | None) -> None:
        self.length = length

    def wants_draft(self, requests: Sequence[Hashable], max_lens: np.ndarray, other_rows: int = 0) -> bool:
        """See :class:`VerifyPolicy`."""
        return self.length is not None

    def plan(
        self, requests: Sequence[Hashable], c: np.ndarray | None, max_lens: np.ndarray, other_rows: int = 0
    ) -> Schedule:
        """See :class:`VerifyPolicy`."""
        lens = np.minimum(max_lens, self.length or 0)
        return Schedule(lens, int(lens.sum()))


class ThresholdPolicy(AlwaysDrafts):
    """Verify the drafts before the first whose confidence is below a fixed threshold; for experiments.

    P2: x_k is verified iff c_1..c_k all reach the threshold, and c_k is a function of x_0..x_{k-1}.
    """

    def __init__(self, threshold: float) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise ValueError(f"the confidence threshold must lie in 0..1, got {threshold}")
        self.threshold = threshold

    def plan(
        self, requests: Sequence[Hashable], c: np.ndarray | None, max_lens: np.ndarray, other_rows: int = 0
    ) -> Schedule:
        """See :class:`VerifyPolicy`."""
        c = _required(c)
        lens = np.minimum(threshold_lens(c, self.threshold), max_lens)
        inside = np.arange(c.shape[1]) < lens[:, None]
        return Schedule(lens, int(lens.sum()), float(len(lens) + survival(c)[inside].sum()))


class SyncPolicy(AlwaysDrafts):
    """Algorithm 1: admit drafts of all requests by falling survival while Θ strictly rises, stop at the first that
    fails.

    P2: survival falls along a block, and equal survivals are taken by place, so the order visits the drafts of a
    request one after the other, and the next candidate is always the best among the requests' first drafts not yet
    admitted. Its survival is a function of drafts before it, which are admitted already; so are the Θ before and
    after it. Hence whether x_{r,k} is admitted depends only on drafts that were admitted before it. Looking further,
    for a later rise of Θ, would break this: the later terms depend on x_{r,k} (paper, Appendix A), so the search
    stops at the first failure even where the measured curve is jagged.
    """

    def __init__(self, sps: SpsTable) -> None:
        self.sps = sps

    def plan(
        self, requests: Sequence[Hashable], c: np.ndarray | None, max_lens: np.ndarray, other_rows: int = 0
    ) -> Schedule:
        """See :class:`VerifyPolicy`."""
        a = survival(_required(c))
        ranked, request = _rank(a, max_lens, 0.0)
        theta = _throughput(self.sps, len(max_lens), ranked, other_rows)
        falls = theta[1:] <= theta[:-1]
        count = int(falls.argmax()) if falls.any() else len(ranked)
        lens = np.bincount(request[:count], minlength=len(max_lens))
        return Schedule(lens, count, float(len(max_lens) + ranked[:count].sum()))


class AsyncPolicy:
    """Production form (paper section 5.2): a budget from confidences two steps old, spent on the best current drafts.

    The budget K is the argmax of Θ over all K, with the survivals these requests had ``lag`` steps ago, or in the first
    step if that is later (the running mean for requests that had none, 1 before there is any), corrected by what was
    kept of such promises so far: a search over the whole, jagged curve, ready before the current drafts exist. Then the
    K best current drafts are verified.

    P2: K is a function of past steps only, thus a constant as far as the current drafts are concerned. For a constant
    K, taking the K best is admission in falling order of survival until K are taken, and by the argument of
    :class:`SyncPolicy` whether x_{r,k} is among them depends only on drafts admitted before it. A search over K with
    the current survivals would not be lossless, and a budget from the last step would be, but would have to wait for
    it. What was kept is known only when a step has ended, and moves K, never the order of admission.
    """

    reads_confidences = True

    def __init__(self, sps: SpsTable, lag: int = ASYNC_LAG) -> None:
        if lag < 1:
            raise ValueError(f"the budget must come from an earlier step: the lag must be at least 1, got {lag}")
        self.sps = sps
        self._past: deque[dict[Hashable, np.ndarray]] = deque(maxlen=lag)
        self._usual: np.ndarray | None = None
        self._kept = KeptShare()
        self._skipped, self._failed, self._tries = 0, 0, False
        self._skipping_for: tuple[int, int] | None = None  # requests and other rows of the step skipped last
        self._patience = 0

    def wants_draft(self, requests: Sequence[Hashable], max_lens: np.ndarray, other_rows: int = 0) -> bool:
        """Whether drafting is expected to pay, by past survivals alone; now and then it is tried all the same.

        P2: nothing of the current step is known yet, so a step without drafts is one whose lengths are 0 by a constant.
        """
        shape = (len(requests), other_rows)
        if shape != self._skipping_for:
            if self._pays(requests, max_lens, other_rows):
                self._skipped, self._failed, self._skipping_for, self._tries = 0, 0, None, False
                return True
            self._skipping_for, self._patience = shape, self._steps_between_tries(len(requests), other_rows)
        self._skipped += 1
        self._tries = self._skipped >= self._patience
        if self._tries:
            self._skipped, self._failed, self._skipping_for = 0, self._failed + 1, None
        return self._tries

    def _pays(self, requests: Sequence[Hashable], max_lens: np.ndarray, other_rows: int) -> bool:
        plain = self.sps.plain_steps_per_second(len(max_lens), other_rows)
        if plain is None or self._usual is None:
            return True
        theta = self._throughput(self._known(requests, len(self._usual)), max_lens, other_rows)
        return bool(theta.max() > len(max_lens) * plain)

    def _steps_between_tries(self, num_requests: int, other_rows: int) -> int:
        """A try verifies one draft of each request, and takes so much longer than a step that does not draft."""
        rows = np.array([other_rows + 2 * num_requests])
        plain = self.sps.plain_steps_per_second(num_requests, other_rows)
        extra = plain / float(self.sps.steps_per_second(num_requests, rows)[0]) - 1.0
        return int(min(max(extra, 0.0) / TRY_SHARE * 2**self._failed, MAX_PATIENCE)) + 1

    def plan(
        self, requests: Sequence[Hashable], c: np.ndarray | None, max_lens: np.ndarray, other_rows: int = 0
    ) -> Schedule:
        """See :class:`VerifyPolicy`. Every call is one step of the history."""
        a = survival(_required(c))
        known = self._known(requests, a.shape[1])
        budget = int(self._throughput(known, max_lens, other_rows).argmax())
        if self._tries:  # it would learn nothing from a step that verifies nothing
            budget = max(budget, len(max_lens))
        self._past.append(dict(zip(requests, a, strict=True)))
        if len(a):
            mean = a.mean(axis=0)
            self._usual = mean if self._usual is None else (1 - USUAL_SHARE) * self._usual + USUAL_SHARE * mean
        ranked, request = _rank(a, max_lens, MIN_SURVIVAL)
        lens = np.bincount(request[:budget], minlength=len(max_lens))
        return Schedule(lens, budget, float(len(max_lens) + ranked[:budget].sum()), a)

    def landed(self, survival: np.ndarray, lens: np.ndarray, accepted: np.ndarray) -> None:
        """See :class:`VerifyPolicy`."""
        self._kept.add(survival, lens, accepted)

    def _throughput(self, known: np.ndarray, max_lens: np.ndarray, other_rows: int) -> np.ndarray:
        """Θ by the budget, for survivals ``known`` [R, γ]."""
        ranked, _ = _rank(self._kept.correct(known), max_lens, MIN_SURVIVAL)
        return _throughput(self.sps, len(max_lens), ranked, other_rows)

    def _known(self, requests: Sequence[Hashable], gamma: int) -> np.ndarray:
        """[R, γ] the survivals of the oldest remembered step; for requests that were not in it, what is usual, or 1."""
        past = self._past[0] if self._past else {}
        usual = np.ones(gamma) if self._usual is None else self._usual
        return np.array([past.get(key, usual) for key in requests]).reshape(len(requests), gamma)


class KeptShare:
    """How much of what survivals promised was kept, by place, over the last steps.

    Confidences are calibrated on other texts than the one that is being written; where they promise too much, a budget
    that trusts them verifies drafts that do not pay.
    """

    def __init__(self) -> None:
        self._promised: np.ndarray | None = None  # [γ] sums that fade, with some kept promises to begin with
        self._kept: np.ndarray | None = None

    def add(self, survival: np.ndarray, lens: np.ndarray, accepted: np.ndarray) -> None:
        """A step with ``survival`` [R, γ] of which ``lens`` [R] drafts were verified and ``accepted`` [R] kept."""
        places = np.arange(survival.shape[1])
        if self._promised is None or self._kept is None:
            self._promised = self._kept = np.full(len(places), FIRST_PROMISES)
        fresh = (1 - PROMISES_FADE) * FIRST_PROMISES
        self._promised = PROMISES_FADE * self._promised + fresh + (survival * (places < lens[:, None])).sum(axis=0)
        self._kept = PROMISES_FADE * self._kept + fresh + (places < accepted[:, None]).sum(axis=0)

    def correct(self, survival: np.ndarray) -> np.ndarray:
        """``survival`` [R, γ] as experience would have it."""
        if self._promised is None or self._kept is None:
            return survival
        return np.minimum(survival * (self._kept / self._promised), 1.0)


def make_policy(mode: str, sps: SpsTable | None = None, threshold: float | None = None) -> VerifyPolicy:
    """The policy of ``--verify mode``; ``threshold`` trims in static mode.

    Without a table nothing is trimmed, in any mode, and the log says so: with no measured cost extra rows would look
    free. Raises ``ValueError`` for an unknown mode, or a threshold outside static mode.
    """
    if mode not in ("static", "sync", "async"):
        raise ValueError(f"the verify mode must be static, sync or async, got {mode!r}")
    if mode == "static":
        return StaticPolicy() if threshold is None else ThresholdPolicy(threshold)
    if threshold is not None:
        raise ValueError(f"a confidence threshold ({threshold}) belongs to the verify mode static, not {mode}")
    if sps is None:
        logger.warning("verify mode %s has no SPS table: every draft is verified; measure one with profile-sps", mode)
        return StaticPolicy()
    return SyncPolicy(sps) if mode == "sync" else AsyncPolicy(sps)


def _required(c: np.ndarray | None) -> np.ndarray:
    if c is None:
        raise ValueError("this verify mode needs confidences, but the draft has no confidence head; use static")
    return c


def _rank(a: np.ndarray, max_lens: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
    """Candidates by falling survival, then place, then request: their survivals and their requests.

    A candidate is a draft within ``max_lens`` whose survival is above 0 and at least ``floor``.
    """
    num_requests, gamma = a.shape
    flat = a.T.ravel()
    if int(max_lens.min(initial=gamma)) < gamma:
        flat = np.where((np.arange(gamma)[:, None] < max_lens).ravel(), flat, 0.0)
    order = (-flat).argsort(kind="stable")
    ranked = flat[order]
    count = int(np.searchsorted(-ranked, -floor, side="right" if floor > 0 else "left"))
    return ranked[:count], order[:count] % num_requests if num_requests else order[:count]


def _throughput(sps: SpsTable, num_requests: int, ranked: np.ndarray, other_rows: int) -> np.ndarray:
    """Θ with the first 0, 1, .. n candidates admitted."""
    tau = np.empty(len(ranked) + 1)
    tau[0] = num_requests
    tau[1:] = ranked
    tau = np.add.accumulate(tau)
    rows = np.arange(other_rows + num_requests, other_rows + num_requests + len(tau))
    return tau * sps.steps_per_second(num_requests, rows)
