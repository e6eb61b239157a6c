"""How well probabilities match outcomes: reliability curves, ECE, AUROC and Brier score.

Shapes: N samples; ``probs`` float in [0, 1], ``outcomes`` 0 or 1 (bool or float). Numpy, float64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Reliability(NamedTuple):
    """One reliability diagram: equal bins of [0, 1]; the means are NaN in empty bins."""

    counts: np.ndarray
    """[bins] samples."""
    confidence: np.ndarray
    """[bins] mean of the probabilities."""
    frequency: np.ndarray
    """[bins] mean of the outcomes."""

    def ece(self) -> float:
        """Expected calibration error: the mean distance of confidence and frequency, weighted by samples."""
        filled = self.counts > 0
        weights = self.counts[filled] / max(self.counts.sum(), 1)
        return float((weights * np.abs(self.confidence - self.frequency)[filled]).sum())


def reliability(probs: np.ndarray, outcomes: np.ndarray, num_bins: int = 15) -> Reliability:
    """Sort samples into ``num_bins`` equal bins [i/n, (i+1)/n), the last one closed."""
    place = _bins(probs, num_bins)
    counts = np.bincount(place, minlength=num_bins)
    sums = [np.bincount(place, values, num_bins) for values in (probs, np.asarray(outcomes, dtype=np.float64))]
    with np.errstate(invalid="ignore"):
        means = [total / counts for total in sums]
    return Reliability(counts, *means)


def ece(probs: np.ndarray, outcomes: np.ndarray, num_bins: int = 15) -> float:
    """Expected calibration error over equal bins; 0 for no samples."""
    place = _bins(probs, num_bins)
    gap = np.bincount(place, probs - np.asarray(outcomes, dtype=np.float64), num_bins)
    return float(np.abs(gap).sum() / max(len(probs), 1))


def auroc(probs: np.ndarray, outcomes: np.ndarray, num_bins: int | None = None) -> float:
    """The chance that a positive sample has the higher probability, ties counted half; NaN if one class is missing.

    ``num_bins`` first rounds the probabilities to that many equal bins (1000 in DeepSpec's evaluation).
    """
    scores = probs if num_bins is None else _bins(probs, num_bins)
    positive = np.asarray(outcomes, dtype=np.float64) > 0
    num_positive = int(positive.sum())
    num_negative = len(positive) - num_positive
    if num_positive == 0 or num_negative == 0:
        return float("nan")
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    middle_rank = np.cumsum(counts) - (counts - 1) / 2
    rank_sum = middle_rank[place][positive].sum()
    return float((rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def brier(probs: np.ndarray, outcomes: np.ndarray) -> float:
    """Mean squared distance of probability and outcome; NaN for no samples."""
    return float(np.square(probs - outcomes).mean()) if len(probs) else float("nan")


def _bins(probs: np.ndarray, num_bins: int) -> np.ndarray:
    return np.minimum((np.asarray(probs) * num_bins).astype(np.int64), num_bins - 1)
