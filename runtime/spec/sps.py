"""SPS(B): how many steps a second the engine makes when a step has B rows, from a measured table.

Two file forms are read, both JSON. The staircase: ``batch_tokens`` (rising) and ``steps_per_sec``; also under the names
``sample_batch_tokens`` and ``sample_steps_per_sec``. The additive form: seconds = ``bias_seconds`` + α(requests) +
θ(rows), with α piecewise linear over ``bs_probes`` (``alpha_seconds``) and θ over ``m_probes`` (``theta_seconds``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...eplb.files.safe import replacing


class SpsTable(Protocol):
    """A measured cost curve."""

    def steps_per_second(self, num_requests: int, rows: np.ndarray) -> np.ndarray:
        """Steps a second [n] for steps of ``rows`` [n] rows in all, ``num_requests`` requests among them."""
        ...

    def plain_steps_per_second(self, num_requests: int, other_rows: int) -> float | None:
        """Steps a second of ``num_requests`` requests and ``other_rows`` more rows when nothing is drafted; ``None``
        where that was not measured."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The table in its file form."""
        ...


@dataclass(frozen=True)
class StaircaseTable:
    """The speed of the largest probe that is not above B; of the smallest probe below that one.

    ``batch_tokens`` rows, strictly rising; ``steps_per_sec`` positive. Raises ``ValueError`` otherwise.
    """

    batch_tokens: np.ndarray
    steps_per_sec: np.ndarray

    def __post_init__(self) -> None:
        _check_curve("batch_tokens", self.batch_tokens, "steps_per_sec", self.steps_per_sec, above=0.0)

    def steps_per_second(self, num_requests: int, rows: np.ndarray) -> np.ndarray:
        """See :class:`SpsTable`; the number of requests does not matter."""
        place = np.searchsorted(self.batch_tokens, rows, side="right") - 1
        return self.steps_per_sec[np.maximum(place, 0)]

    def plain_steps_per_second(self, num_requests: int, other_rows: int) -> None:
        """See :class:`SpsTable`: this form has no such measurement."""

    def to_json(self) -> dict[str, Any]:
        """See :class:`SpsTable`."""
        return {
            "sample_batch_tokens": [int(x) for x in self.batch_tokens],
            "sample_steps_per_sec": [float(x) for x in self.steps_per_sec],
        }


@dataclass(frozen=True)
class AdditiveTable:
    """Seconds of a step = bias + α(requests) + θ(rows), each linear between probes and constant outside them.

    ``plain_seconds``, if measured: of steps without a draft, for the numbers of requests in ``bs_probes``. All seconds
    at least 0. Raises ``ValueError`` otherwise, and where a step would take no time.
    """

    bias_seconds: float
    bs_probes: np.ndarray
    alpha_seconds: np.ndarray
    m_probes: np.ndarray
    theta_seconds: np.ndarray
    plain_seconds: np.ndarray | None = None

    def __post_init__(self) -> None:
        _check_curve("bs_probes", self.bs_probes, "alpha_seconds", self.alpha_seconds)
        _check_curve("m_probes", self.m_probes, "theta_seconds", self.theta_seconds)
        if self.plain_seconds is not None:
            _check_curve("bs_probes", self.bs_probes, "plain_seconds", self.plain_seconds, above=0.0)
        least = self.bias_seconds + self.alpha_seconds.min() + self.theta_seconds.min()
        if not (self.bias_seconds >= 0 and least > 0):
            raise ValueError(
                f"the SPS table has bias_seconds {self.bias_seconds} and a shortest step of {least} s; steps take time"
            )

    def step_seconds(self, num_requests: int, rows: np.ndarray) -> np.ndarray:
        """Seconds [n] of steps of ``rows`` [n] rows for ``num_requests`` requests."""
        alpha = np.interp(num_requests, self.bs_probes, self.alpha_seconds)
        return self.bias_seconds + alpha + np.interp(rows, self.m_probes, self.theta_seconds)

    def steps_per_second(self, num_requests: int, rows: np.ndarray) -> np.ndarray:
        """See :class:`SpsTable`."""
        return 1.0 / self.step_seconds(num_requests, rows)

    def plain_steps_per_second(self, num_requests: int, other_rows: int) -> float | None:
        """See :class:`SpsTable`; rows of other requests cost what they cost in a step that drafts."""
        if self.plain_seconds is None:
            return None
        extra = np.interp([num_requests, num_requests + other_rows], self.m_probes, self.theta_seconds)
        return 1.0 / float(np.interp(num_requests, self.bs_probes, self.plain_seconds) + extra[1] - extra[0])

    def to_json(self) -> dict[str, Any]:
        """See :class:`SpsTable`."""
        return {
            "bias_seconds": float(self.bias_seconds),
            "bs_probes": [int(x) for x in self.bs_probes],
            "alpha_seconds": [float(x) for x in self.alpha_seconds],
            "m_probes": [int(x) for x in self.m_probes],
            "theta_seconds": [float(x) for x in self.theta_seconds],
        } | ({} if self.plain_seconds is None else {"plain_seconds": [float(x) for x in self.plain_seconds]})


ADDITIVE_KEYS = ("bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds")
STAIRCASE_KEYS = (("batch_tokens", "steps_per_sec"), ("sample_batch_tokens", "sample_steps_per_sec"))


def table_from_json(data: dict[str, Any]) -> SpsTable:
    """The table in either form; other keys (where and when it was measured) are not read.

    Raises ``ValueError`` when neither form is complete or a curve is not valid.
    """
    if all(key in data for key in ADDITIVE_KEYS):
        curves = [_array(key, data[key]) for key in ADDITIVE_KEYS[1:]]
        plain = _array("plain_seconds", data["plain_seconds"]) if "plain_seconds" in data else None
        return AdditiveTable(float(_array("bias_seconds", data["bias_seconds"], ndim=0)), *curves, plain)
    for tokens, speed in STAIRCASE_KEYS:
        if tokens in data and speed in data:
            return StaircaseTable(_array(tokens, data[tokens]), _array(speed, data[speed]))
    forms = " or ".join(", ".join(keys) for keys in (ADDITIVE_KEYS, *STAIRCASE_KEYS))
    raise ValueError(f"an SPS table needs the keys {forms}; this one has {', '.join(sorted(data)) or 'none'}")


def load_table(path: str | Path) -> SpsTable:
    """Read a table file. Raises ``ValueError`` naming the file when it is not JSON or not a table."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("an SPS table is a JSON object")
        return table_from_json(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def save_table(path: str | Path, table: SpsTable, measured: dict[str, Any] | None = None) -> None:
    """Write a table, with ``measured`` (layout, device, method) beside it under that key."""
    data = table.to_json() | ({"measured": measured} if measured else {})
    with replacing(Path(path)) as part:
        part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def fit_additive(
    num_requests: Sequence[int],
    rows: Sequence[int],
    seconds: Sequence[float],
    bin_rows: int = 64,
    plain_seconds: Sequence[float] | None = None,
) -> AdditiveTable:
    """The additive form by least squares from timed steps of ``num_requests`` requests and ``rows`` rows.

    α has a knot at every number of requests that occurs, θ at the smallest number of rows in every ``bin_rows`` rows.
    ``plain_seconds``: of steps without a draft, one for each number of requests that occurs, rising.
    Only the sum of bias, α and θ is measured; α and θ start at 0. Negative values that noise produces become 0.
    """
    rows, seconds = _samples(rows, seconds)
    requests = np.asarray(num_requests, dtype=np.int64)
    if requests.shape != rows.shape:
        raise ValueError(f"{requests.size} numbers of requests for {rows.size} timed steps")
    bs_probes = np.unique(requests)
    bins = rows // bin_rows
    m_probes = np.append([rows[bins == b].min() for b in np.unique(bins)], rows.max())
    m_probes = np.unique(m_probes)
    alpha = _hats(requests, bs_probes)[:, 1:]
    theta = _hats(rows, m_probes)[:, 1:]
    design = np.concatenate([np.ones((len(rows), 1)), alpha, theta], axis=1)
    fitted = np.linalg.lstsq(design, seconds, rcond=None)[0]
    fitted = np.maximum(fitted, 0.0)
    knots = len(bs_probes)
    plain = None if plain_seconds is None else np.asarray(plain_seconds, dtype=np.float64)
    alphas, thetas = np.append(0.0, fitted[1:knots]), np.append(0.0, fitted[knots:])
    return AdditiveTable(float(fitted[0]), bs_probes, alphas, m_probes, thetas, plain)


def _hats(x: np.ndarray, probes: np.ndarray) -> np.ndarray:
    """[n, probes] the weights with which linear interpolation mixes the probes' values at ``x``."""
    return np.stack([np.interp(x, probes, unit) for unit in np.eye(len(probes))], axis=1)


def _samples(rows: Sequence[int], seconds: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    counts, times = np.asarray(rows, dtype=np.int64), np.asarray(seconds, dtype=np.float64)
    if counts.shape != times.shape or counts.size == 0:
        raise ValueError(
            f"an SPS fit needs one time for each step and at least one, got {counts.size} and {times.size}"
        )
    if not (np.isfinite(times) & (times > 0)).all():
        raise ValueError("an SPS fit needs positive finite seconds")
    return counts, times


def _array(name: str, values: Any, ndim: int = 1) -> np.ndarray:
    kind = "a list of numbers" if ndim else "a number"
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is not {kind}") from error
    if array.ndim != ndim:
        raise ValueError(f"{name} is not {kind}")
    return array


def _check_curve(x_name: str, x: np.ndarray, y_name: str, y: np.ndarray, above: float | None = None) -> None:
    if x.ndim != 1 or x.shape != y.shape or x.size == 0:
        raise ValueError(f"{x_name} and {y_name} must be lists of one length, got {x.shape} and {y.shape}")
    if not np.isfinite(x).all() or not (np.diff(x) > 0).all():
        raise ValueError(f"{x_name} must be finite and rise strictly, got {x.tolist()}")
    if not np.isfinite(y).all() or (y.min() < 0 if above is None else y.min() <= above):
        raise ValueError(
            f"{y_name} must be finite and {'not negative' if above is None else 'positive'}, got {y.tolist()}"
        )
