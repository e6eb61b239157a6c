"""Pictures of loads, balance and moves, as PNG. matplotlib (the extra ``plot``) is imported when one is drawn.

Shapes: L layers, G GPUs, S windows.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from .files.safe import replacing
from .moves import Transfer
from .placement import balance_of
from .shape import Shape


def _figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("pictures need matplotlib: pip install 'dspark[plot]'") from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _save(figure: Any, path: str | pathlib.Path) -> pathlib.Path:
    path = pathlib.Path(path)
    if path.suffix != ".png":
        raise ValueError(f"pictures are written as .png, not as {path.name!r}")
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=110)
    return path


def plot_plan(path: str | pathlib.Path, before: np.ndarray, after: np.ndarray, best: Sequence[float]) -> pathlib.Path:
    """Loads of the GPUs before and after, [L, G] each, over their mean; balance by layer with the ``best`` possible."""
    figure, axes = _figure(1, 3, (16, 6), width_ratios=(1, 1, 1.1))
    most = max(1.02, float(np.percentile(_over_mean(before), 99.5)), float(_over_mean(after).max()))
    for axis, load, title in ((axes[0, 0], before, "before"), (axes[0, 1], after, "after")):
        image = _heat(axis, _over_mean(load), f"{title}: load of GPU / mean", "GPU", most)
    figure.colorbar(image, ax=axes[0, 1], shrink=0.8)
    axis = axes[0, 2]
    layers = np.arange(len(before))
    axis.plot(layers, best, color="0.6", linestyle="--", linewidth=1, label="no placement can beat")
    axis.plot(layers, balance_of(before), color="tab:red", marker=".", linewidth=1, label="before")
    axis.plot(layers, balance_of(after), color="tab:blue", marker=".", linewidth=1, label="after")
    axis.set(xlabel="layer", ylabel="balance (mean / fullest)", title="balance by layer")
    low = min(float(balance_of(before).min()), float(balance_of(after).min()), min(best), 0.999)
    axis.set_ylim(low - 0.05 * (1 - low), 1 + 0.05 * (1 - low))
    axis.grid(alpha=0.3)
    _legend(axis)
    return _save(figure, path)


def _legend(axis: Any) -> None:
    """Below the axis, where it hides nothing."""
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncol=3, frameon=False)


def _over_mean(load: np.ndarray) -> np.ndarray:
    mean = load.mean(1, keepdims=True)
    return np.divide(load, mean, out=np.ones_like(load), where=mean > 0)


def _heat(axis: Any, values: np.ndarray, title: str, columns: str, most: float) -> Any:
    """A heat map whose white is 1: blue below, red above, up to ``most`` either way."""
    width = max(most - 1, 1e-9)
    image = axis.imshow(values, aspect="auto", cmap="RdBu_r", vmin=1 - width, vmax=1 + width, interpolation="nearest")
    axis.set(xlabel=columns, ylabel="layer", title=title)
    return image


def plot_loads(path: str | pathlib.Path, load: np.ndarray, columns: str) -> pathlib.Path:
    """Loads by layer and ``columns`` (GPU or expert), over their mean; the most loaded of each layer beside it."""
    figure, axes = _figure(1, 2, (13, 6), width_ratios=(2, 1), sharey=True)
    values = _over_mean(load)
    image = axes[0, 0].imshow(
        values, aspect="auto", cmap="magma", vmin=0, vmax=float(np.percentile(values, 99.5)), interpolation="nearest"
    )
    axes[0, 0].set(xlabel=columns, ylabel="layer", title=f"load of {columns} / mean")
    figure.colorbar(image, ax=axes[0, 0], shrink=0.8)
    axes[0, 1].barh(np.arange(len(values)), values.max(1), color="tab:red")
    axes[0, 1].set(xlabel="largest / mean", title=f"most loaded {columns}")
    axes[0, 1].grid(alpha=0.3, axis="x")
    return _save(figure, path)


def plot_moves(path: str | pathlib.Path, moves: Sequence[Transfer], num_layers: int, shape: Shape) -> pathlib.Path:
    """Moved experts by layer, within and across nodes; a matrix of who sends how many to whom."""
    figure, axes = _figure(1, 2, (14, 6))
    within, across = np.zeros((2, num_layers))
    sent = np.zeros((shape.num_gpus, shape.num_gpus))
    for move in moves:
        (across if move.crosses_node else within)[move.layer] += 1
        sent[move.source_gpu, move.target_gpu] += 1
    layers = np.arange(num_layers)
    axes[0, 0].bar(layers, within, color="tab:blue", label=f"within a node ({within.sum():.0f})")
    axes[0, 0].bar(layers, across, bottom=within, color="tab:orange", label=f"across nodes ({across.sum():.0f})")
    axes[0, 0].set(xlabel="layer", ylabel="moved experts", title="moves by layer")
    axes[0, 0].grid(alpha=0.3, axis="y")
    _legend(axes[0, 0])
    image = axes[0, 1].imshow(sent, cmap="Blues", interpolation="nearest")
    for edge in range(shape.gpus_per_node, shape.num_gpus, shape.gpus_per_node):
        axes[0, 1].axhline(edge - 0.5, color="0.7", linewidth=0.8)
        axes[0, 1].axvline(edge - 0.5, color="0.7", linewidth=0.8)
    axes[0, 1].set(xlabel="receiving GPU", ylabel="sending GPU", title="experts sent, all layers")
    figure.colorbar(image, ax=axes[0, 1], shrink=0.8)
    return _save(figure, path)


def plot_balance(path: str | pathlib.Path, balance: np.ndarray, split: str) -> pathlib.Path:
    """Balance [S, L] by layer (range over the windows) and over the windows (mean and range over the layers)."""
    figure, axes = _figure(1, 2, (14, 5), sharey=True)
    for axis, values, name in ((axes[0, 0], balance, "layer"), (axes[0, 1], balance.T, "window")):
        place = np.arange(values.shape[1])
        axis.fill_between(place, values.min(0), values.max(0), color="tab:blue", alpha=0.25, label="least to greatest")
        axis.plot(place, values.mean(0), color="tab:blue", marker=".", linewidth=1, label="mean")
        axis.set(xlabel=name, title=f"balance by {name}, {split} split")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(alpha=0.3)
        _legend(axis)
    axes[0, 0].set(ylabel="balance (mean / fullest)")
    return _save(figure, path)
