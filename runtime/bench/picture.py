"""Bar charts of benchmark figures, where the optional matplotlib is installed."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence


def check_picture(path: str | None) -> None:
    """Raise ``ValueError`` if ``path`` is wanted but cannot be drawn: before the long work, not after it."""
    if path is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError("--picture needs matplotlib: pip install 'dspark[plot]', or leave it out") from error
    if not pathlib.Path(path).resolve().parent.is_dir():
        raise ValueError(f"--picture {path}: there is no folder {pathlib.Path(path).resolve().parent}")


def save_bars(
    path: str, title: str, unit: str, groups: Sequence[str], series: Mapping[str, Sequence[float]], note: str
) -> None:
    """One bar for each group and series, ``series[name][group]``, with its value on top; ``note`` below the chart."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.8 + 1.1 * len(groups) * len(series), 4.2), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        bars = axes.bar([group + i * width for group in range(len(groups))], values, width * 0.92, label=name)
        axes.bar_label(bars, fmt="%.4g", fontsize=8)
    axes.set_xticks([group + width * (len(series) - 1) / 2 for group in range(len(groups))], groups)
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=10)
    axes.set_ylim(top=1.15 * max(max(values) for values in series.values()))
    axes.legend(fontsize=8)
    figure.text(0.01, -0.01, note, fontsize=6, va="top")
    figure.savefig(path, dpi=150, bbox_inches="tight")


def save_lines(
    path: str, title: str, x_name: str, y_name: str, curves: Mapping[str, Sequence[tuple[float, float]]]
) -> None:
    """One line with markers for each of ``curves``, points (x, y)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves.items():
        axes.plot(*zip(*points), marker="o", markersize=3, label=name)
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def save_reliability(path: str, before: Sequence[Mapping], after: Sequence[Mapping]) -> None:
    """Reliability diagrams per place, before and after: how often drafts survived against the estimate."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    for axes, diagrams, title in zip(figure.subplots(1, 2), (before, after), ("before", "after")):
        axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        for place, diagram in enumerate(diagrams, start=1):
            pairs = zip(diagram["confidence"], diagram["frequency"])
            points = [(x, y) for x, y in pairs if x is not None and y is not None]
            if points:
                axes.plot(*zip(*points), marker="o", markersize=3, label=f"drafts 1..{place}")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("estimated survival")
        axes.set_ylabel("survived")
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
