"""Sequential temperature scaling: one temperature per place, so that survival estimates mean what they say.

Source: paper section 3.2.1. Left to right over the places of a block, the temperature T_k is taken from a grid that
minimises the ECE of the cumulative product Π_{i<=k} σ(z_i / T_i) against "drafts 1..k were all kept", with the earlier
temperatures fixed. Applied as c_k = σ(z_k / T_k). Scaling c_k by a constant keeps it a function of x_0..x_{k-1}.

Samples come from blocks that were verified whole, with temperatures 1. Shapes: N blocks, γ drafts a block.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...eplb.files.safe import replacing
from .confidence import conditional, survival
from .reliability import auroc, brier, ece, reliability

GRID = np.logspace(-1.0, 1.0, 41)
NUM_BINS = 15


@dataclass(frozen=True)
class CalibrationSamples:
    """What calibration learns from, one row a fully verified block."""

    logits: np.ndarray
    """[N, γ] raw confidence logits."""
    kept: np.ndarray
    """[N, γ] bool, whether drafts 1..k were all kept."""
    valid: np.ndarray
    """[N, γ] bool, false behind a token that ended the request: nobody can say what came next."""

    @classmethod
    def from_blocks(
        cls, logits: np.ndarray, accepted: np.ndarray, emitted: np.ndarray | None = None
    ) -> CalibrationSamples:
        """Samples of blocks of which ``accepted`` [N] drafts were kept before any cut.

        ``emitted`` [N] the tokens that came out: of a block that was cut (fewer than accepted + 1) the places behind
        the cut are not valid.
        """
        accepted = np.asarray(accepted)[:, None]
        places = np.arange(logits.shape[1])
        kept = places < accepted
        valid = np.ones_like(kept)
        if emitted is not None:
            ended = np.asarray(emitted)[:, None]
            valid = (ended > accepted) | (places < ended)
        return cls(np.asarray(logits, dtype=np.float64), kept, valid)

    @classmethod
    def concatenate(cls, parts: list[CalibrationSamples]) -> CalibrationSamples:
        """All samples of several collections with the same γ."""
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("logits", "kept", "valid")))


@dataclass(frozen=True)
class StsFit:
    """Fitted temperatures and the calibration error of the survivals before and after, per place."""

    temperatures: np.ndarray
    """[γ]."""
    ece_before: np.ndarray
    """[γ] with temperatures 1."""
    ece_after: np.ndarray
    """[γ]."""
    num_samples: int
    dataset: str = ""

    def to_json(self) -> dict[str, Any]:
        """The file form."""
        return {
            "temperatures": self.temperatures.tolist(),
            "dataset": self.dataset,
            "num_samples": self.num_samples,
            "ece_before": self.ece_before.tolist(),
            "ece_after": self.ece_after.tolist(),
        }

    def save(self, path: str | Path) -> None:
        """Write the file that :func:`load_temperatures` reads."""
        with replacing(Path(path)) as part:
            part.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")


def fit(samples: CalibrationSamples, dataset: str = "", grid: np.ndarray = GRID, num_bins: int = NUM_BINS) -> StsFit:
    """Fit one temperature a place from ``grid``; of equally good ones the smaller.

    Raises ``ValueError`` when a place has no valid sample.
    """
    num_places = samples.logits.shape[1]
    before, after, temperatures = np.empty(num_places), np.empty(num_places), np.empty(num_places)
    raw = survival(conditional(samples.logits))
    prefix = np.ones(len(samples.logits))
    for k in range(num_places):
        use = samples.valid[:, k]
        if not use.any():
            raise ValueError(f"no calibration sample reaches place {k + 1} of {num_places}")
        outcomes = samples.kept[use, k]
        before[k] = ece(raw[use, k], outcomes, num_bins)
        candidates = [prefix * conditional(samples.logits[:, k], temperature) for temperature in grid]
        errors = [ece(candidate[use], outcomes, num_bins) for candidate in candidates]
        best = int(np.argmin(errors))
        temperatures[k], after[k], prefix = grid[best], errors[best], candidates[best]
    return StsFit(temperatures, before, after, len(samples.logits), dataset)


def load_temperatures(path: str | Path, gamma: int) -> np.ndarray:
    """[γ] float64 from a fit's file.

    Raises ``ValueError`` naming the file when it is no such file, or holds another number of places than ``gamma``.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    values = data.get("temperatures") if isinstance(data, dict) else None
    if not isinstance(values, list) or not all(type(v) in (int, float) for v in values):
        raise ValueError(f"{path}: no list of numbers under the key temperatures")
    if len(values) != gamma:
        raise ValueError(
            f"{path}: {len(values)} temperatures for blocks of {gamma} drafts; calibrate with --gamma {gamma}"
        )
    if not all(0 < v <= sys.float_info.max for v in values):
        raise ValueError(f"{path}: temperatures must be positive and finite, got {values}")
    return np.asarray(values, dtype=np.float64)


def report(
    samples: CalibrationSamples, temperatures: np.ndarray | None = None, num_bins: int = NUM_BINS
) -> dict[str, Any]:
    """Calibration of the survivals per place, JSON-ready: ``ece``, ``auroc``, ``brier``, ``samples``, ``diagram``.

    ``diagram`` holds per place the bins' ``counts``, ``confidence`` and ``frequency`` (``None`` in empty bins).
    """
    a = survival(conditional(samples.logits, temperatures))
    out: dict[str, list[Any]] = {name: [] for name in ("ece", "auroc", "brier", "samples", "diagram")}
    for k in range(a.shape[1]):
        use = samples.valid[:, k]
        probs, outcomes = a[use, k], samples.kept[use, k]
        curve = reliability(probs, outcomes, num_bins)
        out["ece"].append(curve.ece())
        out["auroc"].append(auroc(probs, outcomes))
        out["brier"].append(brier(probs, outcomes))
        out["samples"].append(int(use.sum()))
        out["diagram"].append(
            {
                "counts": curve.counts.tolist(),
                "confidence": [None if np.isnan(x) else float(x) for x in curve.confidence],
                "frequency": [None if np.isnan(x) else float(x) for x in curve.frequency],
            }
        )
    return out
