"""Which drafts come first, and what admitting so many of them is worth. Legend: R requests, γ drafts a block."""

from __future__ import annotations

import numpy as np

from .sps import SpsTable

MAX_CURVES = 4096
"""Pieces of a table's curve that are kept ready."""


def rank(a: np.ndarray, max_lens: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
    """Candidates by falling survival, then place, then request: their survivals and their requests.

    A candidate is a draft within ``max_lens`` whose survival, ``a`` [R, γ], is above 0 and at least ``floor``.
    """
    num_requests = len(a)
    if num_requests == 1:  # survivals fall along a block
        ranked = a[0, : max_lens[0]]
        ranked = ranked[: _num_candidates(ranked, floor)]
        return ranked, np.zeros(len(ranked), np.int64)
    flat = _within(a, max_lens)
    order = (-flat).argsort(kind="stable")
    ranked = flat[order]
    count = _num_candidates(ranked, floor)
    return ranked[:count], order[:count] % num_requests if num_requests else order[:count]


def rank_alone(a: np.ndarray, max_lens: np.ndarray, floor: float) -> np.ndarray:
    """The survivals of :func:`rank` alone, for ``a`` that need not fall along a block."""
    rising = np.sort(_within(a, max_lens))
    first = rising.searchsorted(floor, side="left" if floor > 0 else "right")
    return rising[first:][::-1]


def _within(a: np.ndarray, max_lens: np.ndarray) -> np.ndarray:
    """Place by place the survivals ``a`` of all requests, 0 where a draft is not within ``max_lens``."""
    flat, gamma = a.T.ravel(), a.shape[1]
    if int(max_lens.min(initial=gamma)) < gamma:
        flat = np.where((np.arange(gamma)[:, None] < max_lens).ravel(), flat, 0.0)
    return flat


def _num_candidates(ranked: np.ndarray, floor: float) -> int:
    return int(np.count_nonzero(ranked >= floor if floor > 0 else ranked > 0))


class Throughput:
    """Θ by a table ``sps``, whose curve is read once for each number of requests and of other rows."""

    def __init__(self, sps: SpsTable) -> None:
        self.sps = sps
        self._speeds: dict[tuple[int, int], np.ndarray] = {}

    def of(self, num_requests: int, ranked: np.ndarray, other_rows: int) -> np.ndarray:
        """Θ [n + 1] with the first 0, 1, .. n candidates admitted, whose survivals are ``ranked`` [n]."""
        tau = np.empty(len(ranked) + 1)
        tau[0] = num_requests
        tau[1:] = ranked
        return np.add.accumulate(tau) * self._speed(num_requests, other_rows, len(tau))

    def plain(self, num_requests: int, other_rows: int) -> float | None:
        """Tokens a second without a draft, where the table knows."""
        speed = self.sps.plain_steps_per_second(num_requests, other_rows)
        return None if speed is None else num_requests * speed

    def _speed(self, num_requests: int, other_rows: int, count: int) -> np.ndarray:
        """Steps a second [count] with 0, 1, .. drafts in the step."""
        key = (num_requests, other_rows)
        known = self._speeds.get(key)
        if known is None or len(known) < count:
            if len(self._speeds) >= MAX_CURVES:
                self._speeds.clear()
            first = num_requests + other_rows
            known = self._speeds[key] = self.sps.steps_per_second(num_requests, np.arange(first, first + count))
        return known[:count]
