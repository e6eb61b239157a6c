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
from typing import NamedTuple, Protocol

import numpy as np

from .confidence import survival, threshold_lens
from .sps import SpsTable

logger = logging.getLogger(__name__)

MIN_SURVIVAL = 1e-6
"""Drafts that are less likely to survive are not worth a row, whatever the budget."""

USUAL_SHARE = 0.1
"""Weight of the last step in the running mean of survivals that stands in for requests nothing is known about."""

FIRST_PATIENCE, MAX_PATIENCE = 16, 256
"""Steps without a draft until one is drafted to see whether it pays by now; doubled each time it does not."""

ASYNC_LAG = 2
"""Steps between the confidences that set the budget and the step that uses it."""


class Schedule(NamedTuple):
    """What a policy decided for one step."""

    lens: np.ndarray
    """[R] int64 drafts verified."""
    budget: int
    """Drafts the step might hold; the sum of ``lens`` or more."""
    expected: float
    """τ, tokens the step is expected to emit by the current confidences."""


class VerifyPolicy(Protocol):
    """Decides the verified lengths of a step. One instance lives on one rank; the others receive its result."""

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


class AlwaysDrafts:
    """For policies that never save themselves the draft."""

    def wants_draft(self, requests: Sequence[Hashable], max_lens: np.ndarray, other_rows: int = 0) -> bool:
        """See :class:`VerifyPolicy`."""
        return True


class StaticPolicy(AlwaysDrafts):
    """Verify everything that may be verified.

    P2: the lengths are ``max_lens``, which was known before anything was drafted.
    """

    def plan(
        self, requests: Sequence[Hashable], c: np.ndarray | None, max_lens: np.ndarray, other_rows: int = 0
    ) -> Schedule:
        """See :class:`VerifyPolicy`."""
        return _schedule(np.array(max_lens, dtype=np.int64), None if c is None else survival(c), int(max_lens.sum()))


class FixedPolicy:
    """Verify the same number of drafts of every request, or (``None``) draft nothing at all; for measurements.

    P2: the lengths are a constant, or ``max_lens``, which was known before anything was drafted.
    """

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
        return _schedule(lens, None if c is None else survival(c), int(lens.sum()))


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
        return _schedule(lens, survival(c), int(lens.sum()))


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

    The budget K is the argmax of Θ over all K, with the survivals these requests had ``lag`` steps ago (the running
    mean for requests that had none, 1 before there is any): a search over the whole, jagged curve, ready before the
    current drafts exist. Then the K best current drafts are verified.

    P2: K is a function of past steps only, thus a constant as far as the current drafts are concerned. For a constant
    K, taking the K best is admission in falling order of survival until K are taken, and by the argument of
    :class:`SyncPolicy` whether x_{r,k} is among them depends only on drafts admitted before it. A search over K with
    the current survivals would not be lossless, and a budget from the last step would be, but would have to wait for
    it.
    """

    def __init__(self, sps: SpsTable, lag: int = ASYNC_LAG) -> None:
        if lag < 1:
            raise ValueError(f"the budget must come from an earlier step: the lag must be at least 1, got {lag}")
        self.sps = sps
        self._past: deque[dict[Hashable, np.ndarray]] = deque(maxlen=lag)
        self._usual: np.ndarray | None = None
        self._skipped, self._patience = 0, FIRST_PATIENCE

    def wants_draft(self, requests: Sequence[Hashable], max_lens: np.ndarray, other_rows: int = 0) -> bool:
        """Whether drafting is expected to pay, by past survivals alone; now and then it is tried all the same.

        P2: nothing of the current step is known yet, so a step without drafts is one whose lengths are 0 by a constant.
        """
        plain = self.sps.plain_steps_per_second(len(max_lens), other_rows)
        if plain is None or self._usual is None:
            return True
        ranked, _ = _rank(self._known(requests, len(self._usual)), max_lens, MIN_SURVIVAL)
        if _throughput(self.sps, len(max_lens), ranked, other_rows).max() > len(max_lens) * plain:
            self._skipped, self._patience = 0, FIRST_PATIENCE
            return True
        self._skipped += 1
        if self._skipped < self._patience:
            return False
        self._skipped, self._patience = 0, min(2 * self._patience, MAX_PATIENCE)
        return True

    def plan(
        self, requests: Sequence[Hashable], c: np.ndarray | None, max_lens: np.ndarray, other_rows: int = 0
    ) -> Schedule:
        """See :class:`VerifyPolicy`. Every call is one step of the history."""
        a = survival(_required(c))
        known = self._known(requests, a.shape[1]) if len(self._past) == self._past.maxlen else np.ones_like(a)
        ranked, _ = _rank(known, max_lens, MIN_SURVIVAL)
        budget = int(_throughput(self.sps, len(max_lens), ranked, other_rows).argmax())
        self._past.append(dict(zip(requests, a, strict=True)))
        if len(a):
            mean = a.mean(axis=0)
            self._usual = mean if self._usual is None else (1 - USUAL_SHARE) * self._usual + USUAL_SHARE * mean
        ranked, request = _rank(a, max_lens, MIN_SURVIVAL)
        lens = np.bincount(request[:budget], minlength=len(max_lens))
        return Schedule(lens, budget, float(len(max_lens) + ranked[:budget].sum()))

    def _known(self, requests: Sequence[Hashable], gamma: int) -> np.ndarray:
        """[R, γ] the survivals of the oldest remembered step; for requests that were not in it, what is usual, or 1."""
        past = self._past[0] if self._past else {}
        usual = np.ones(gamma) if self._usual is None else self._usual
        return np.array([past.get(key, usual) for key in requests]).reshape(len(requests), gamma)


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


def _schedule(lens: np.ndarray, a: np.ndarray | None, budget: int) -> Schedule:
    if a is None:
        return Schedule(lens, budget, float(len(lens)))
    inside = np.arange(a.shape[1]) < lens[:, None]
    return Schedule(lens, budget, float(len(lens) + a[inside].sum()))
