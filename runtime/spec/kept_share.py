"""What became of what confidences promised. Legend: R requests, γ drafts a block."""

from __future__ import annotations

import numpy as np

FIRST_PROMISES, PROMISES_FADE = 4.0, 0.98
"""Kept promises that every place begins with and goes back to, and how much of the experience a step leaves."""

SUMMED_EVERY = 8
"""Steps whose news are summed up together."""


class KeptShare:
    """How much of what survivals promised was kept, by place, over the last steps.

    Confidences are calibrated on other texts than the one that is being written; where they promise too much, a budget
    that trusts them verifies drafts that do not pay.
    """

    def __init__(self) -> None:
        self._news: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._sums: np.ndarray | None = None  # [2, γ] promised and kept, which fade, with some kept promises at first
        self._share: np.ndarray | None = None  # of the one in the other

    def add(self, survival: np.ndarray, lens: np.ndarray, accepted: np.ndarray) -> None:
        """A step with ``survival`` [R, γ] of which ``lens`` [R] drafts were verified and ``accepted`` [R] kept."""
        self._news.append((survival, lens, accepted))
        if self._share is None or len(self._news) == SUMMED_EVERY:
            self._sum_up()

    def _sum_up(self) -> None:
        fade = PROMISES_FADE ** len(self._news)
        survival, lens, accepted = map(np.concatenate, zip(*self._news))
        self._news.clear()
        places = np.arange(survival.shape[1])
        sums = np.full((2, len(places)), FIRST_PROMISES) if self._sums is None else self._sums
        fresh = [(survival * (places < lens[:, None])).sum(axis=0), (places < accepted[:, None]).sum(axis=0)]
        self._sums = fade * sums + (1 - fade) * FIRST_PROMISES + fresh
        self._share = self._sums[1] / self._sums[0]

    def correct(self, survival: np.ndarray) -> np.ndarray:
        """``survival`` [R, γ] as experience would have it."""
        return survival if self._share is None else np.minimum(survival * self._share, 1.0)
