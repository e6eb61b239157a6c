"""The log of a run as pictures, where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import json
import pathlib
from typing import Any


def read_log(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a run's log."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def draw_curves(log: list[dict[str, Any]], path: pathlib.Path) -> bool:
    """Draw losses and, where evaluations were logged, expected accepted lengths to the PNG ``path``.

    Returns whether it was drawn: without matplotlib, or without anything logged, there is no picture.
    """
    losses = [line for line in log if "loss" in line]
    if importlib.util.find_spec("matplotlib") is None or not losses:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    evaluations = [line for line in log if "eval" in line]
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name in [key for key in losses[0] if key not in ("step", "lr", "steps_per_s", "grad_norm")]:
        left.plot([line["step"] for line in losses], [line[name] for line in losses], label=name)
    left.set(xlabel="step", ylabel="loss", yscale="log")
    left.legend()
    for source in sorted({source for line in evaluations for source in line["eval"]}):
        seen = [line for line in evaluations if source in line["eval"]]
        lengths = [line["eval"][source]["expected_length"] for line in seen]
        right.plot([line["step"] for line in seen], lengths, marker="o", label=source)
    right.set(xlabel="step", ylabel="expected accepted length, held-out text")
    if evaluations:
        right.legend()
    partial = path.with_suffix(".partial")
    figure.savefig(partial, format="png", dpi=120)
    partial.replace(path)
    return True
