"""How many drafts of each request are verified: fixed, by threshold, or greedily (sync).

Shapes: R requests, γ drafts a block; numpy on the host. Names follow the paper, section 3.2.2: a_{r,j} is the
survival of draft j of request r, B the rows of the step, τ = R + Σ a the tokens it is expected to emit, Θ = τ·SPS(B)
tokens a second.

Losslessness (promise P2) asks one thing of a policy: whether draft x_{r,k} is verified must not depend on x_{r,k} or on
any later draft of that request, given what came before. Then, at every place that is verified, x_{r,k} still has its
draft law q when it meets the coin, and the coin's arithmetic holds unchanged. Each policy argues this for itself.
The asynchronous one is in :mod:`.async_policy`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from .admission import Throughput, rank
from .confidence import survival, threshold_lens
from .sps import SpsTable


class Schedule(NamedTuple):
    """What a policy decided for one step."""

    lens: np.ndarray
    """[R] int64 drafts verified."""
    survival: np.ndarray | None = None
    """[R, γ] the survivals that the lengths go by, where they go by any; handed back in :meth:`VerifyPolicy.landed`."""
    budget: int | None = None
    """Drafts that the step might hold, the sum of ``lens`` or more, for policies that set it before they see the
    current drafts."""

    @property
    def expected(self) -> float | None:
        """τ, tokens that the step is expected to emit by its survivals, if it has these."""
        if self.survival is None:
            return None
        inside = np.arange(self.survival.shape[1]) < self.lens[:, None]
        return float(len(self.lens) + self.survival[inside].sum())


class VerifyPolicy(Protocol):
    """Decides the verified lengths of a step. One instance lives on one rank; the others receive its result."""

    @property
    def reads_confidences(self) -> bool:
        """Whether the next :meth:`plan` looks at confidences; else it may be given ``None``."""
        ...

    def wants_draft(self, num_requests: int, max_lens: Callable[[], np.ndarray], other_rows: int = 0) -> bool:
        """Whether a step of R requests is worth drafting for at all; asked before anything is drafted.

        ``max_lens`` and ``other_rows`` as in :meth:`plan`, the former only when called for.
        """
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

    def wants_draft(self, num_requests: int, max_lens: Callable[[], np.ndarray], other_rows: int = 0) -> bool:
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
        return Schedule(max_lens)


class FixedPolicy(Unmoved):
    """Verify the same number of drafts of every request, or (``None``) draft nothing at all; for measurements.

    P2: the lengths are a constant, or ``max_lens``, which was known before anything was drafted.
    """

    reads_confidences = False

    def __init__(self, length: int | None) -> None:
        self.length = length

    def wants_draft(self, num_requests: int, max_lens: Callable[[], np.ndarray], other_rows: int = 0) -> bool:
        """See :class:`VerifyPolicy`."""
        return self.length is not None

    def plan(
        self, requests: Sequence[Hashable], c: np.ndarray | None, max_lens: np.ndarray, other_rows: int = 0
    ) -> Schedule:
        """See :class:`VerifyPolicy`."""
        return Schedule(np.minimum(max_lens, self.length or 0))


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
        c = required(c)
        return Schedule(np.minimum(threshold_lens(c, self.threshold), max_lens), survival(c))


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
        self._throughput = Throughput(sps)

    def plan(
        self, requests: Sequence[Hashable], c: np.ndarray | None, max_lens: np.ndarray, other_rows: int = 0
    ) -> Schedule:
        """See :class:`VerifyPolicy`."""
        a = survival(required(c))
        ranked, request = rank(a, max_lens, 0.0)
        theta = self._throughput.of(len(max_lens), ranked, other_rows)
        falls = theta[1:] <= theta[:-1]
        count = int(falls.argmax()) if falls.any() else len(ranked)
        return Schedule(np.bincount(request[:count], minlength=len(max_lens)), a)


def required(c: np.ndarray | None) -> np.ndarray:
    """``c``; ``ValueError`` if there are no confidences."""
    if c is None:
        raise ValueError("this verify mode needs confidences, but the draft has no confidence head; use static")
    return c
