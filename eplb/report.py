"""What a placement amounts to under loads: figures per layer and in all, as text and as JSON.

Shapes: L layers, E experts, G GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .bounds import Bound
from .dispatch import ReplicaSplit
from .placement import Placement, balance_of

SPLITS = ("even", "nearest", "weighted")


class Spread(NamedTuple):
    """Balance over the layers: mean and worst, and which layer is the worst."""

    mean: float
    worst: float
    worst_layer: int

    @classmethod
    def of(cls, balance: np.ndarray) -> Spread:
        """Of one balance a layer."""
        return cls(float(balance.mean()), float(balance.min()), int(balance.argmin()))

    def text(self) -> str:
        """For people."""
        return f"mean {self.mean:.4f}, worst {self.worst:.4f} (layer {self.worst_layer})"


def split_load(placement: Placement, load: np.ndarray, split: str) -> np.ndarray:
    """Load of every GPU, [L, G], for ``load`` [L, E] split over copies evenly, to the nearest or weighted.

    ``nearest`` takes every expert's tokens to come evenly from all GPUs. ``weighted`` needs whole numbers.
    """
    if split == "even":
        return placement.gpu_load(load)
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; there are {', '.join(SPLITS)}")
    found = np.empty((placement.num_layers, placement.shape.num_gpus))
    for layer in range(placement.num_layers):
        one = ReplicaSplit(placement, layer)
        quota = one.weighted(load[layer].astype(np.int64)) if split == "weighted" else one.nearest_quota(load[layer])
        found[layer] = one.gpu_load(quota)
    return found


def cross_node_share(placement: Placement, load: np.ndarray) -> np.ndarray:
    """Share of the tokens whose nearest copy is on another node, [L], when they come evenly from all GPUs."""
    shape = placement.shape
    node = np.arange(shape.num_gpus) // shape.gpus_per_node
    found = np.zeros(placement.num_layers)
    for layer in range(placement.num_layers):
        host = ReplicaSplit(placement, layer).nearest() // shape.slots_per_gpu
        away = (node[host] != node[:, None]).mean(0)
        total = load[layer].sum()
        found[layer] = away @ load[layer] / total if total else 0.0
    return found


def layer_figures(
    placement: Placement, load: np.ndarray, bounds: Sequence[Bound] | None = None
) -> list[dict[str, Any]]:
    """One object a layer: tokens, balance, imbalance, the hottest experts with their copies, bound and reason."""
    gpu_load = placement.gpu_load(load)
    balance, crossing = balance_of(gpu_load), cross_node_share(placement, load)
    duplicates = placement.num_duplicates
    figures = []
    for layer, row in enumerate(load):
        hottest = np.argsort(-row, kind="stable")[:3]
        mean = gpu_load[layer].mean()
        one = {
            "layer": layer,
            "tokens": float(row.sum()),
            "balance": float(balance[layer]),
            "imbalance": float((gpu_load[layer].max() - mean) / mean) if mean else 0.0,
            "cross_node_share": float(crossing[layer]),
            "wasted_slots": int(duplicates[layer]),
            "hottest": [
                {
                    "expert": int(e),
                    "share": float(row[e] / row.sum()) if mean else 0.0,
                    "copies": int(placement.counts[layer, e]),
                }
                for e in hottest
            ],
        }
        if bounds is not None:
            one["best_possible"], one["reason"] = bounds[layer].balance, bounds[layer].reason
            one["why"] = bounds[layer].detail
        figures.append(one)
    return figures


def layer_lines(figures: Sequence[dict[str, Any]], most: int | None = None) -> list[str]:
    """The figures as a table; only the ``most`` least balanced layers where that is given."""
    chosen = list(figures)
    if most is not None and len(chosen) > most:
        chosen = sorted(sorted(chosen, key=lambda one: one["balance"])[:most], key=lambda one: one["layer"])
    bounded = bool(chosen) and "reason" in chosen[0]
    lines = [
        f"{'layer':>5} {'tokens':>12} {'balance':>8} {'max/mean-1':>10} {'off node':>8} {'wasted':>6}  "
        + (f"{'best':>6} {'limit':<10} " if bounded else "")
        + "hottest experts (share of tokens, copies)"
    ]
    for one in chosen:
        hottest = ", ".join(f"{hot['expert']} ({100 * hot['share']:.1f} %, {hot['copies']})" for hot in one["hottest"])
        limit = f"{one['best_possible']:>6.4f} {one['reason']:<10} " if bounded else ""
        lines.append(
            f"{one['layer']:>5} {one['tokens']:>12.0f} {one['balance']:>8.4f} {one['imbalance']:>10.4f} "
            f"{100 * one['cross_node_share']:>6.1f} % {one['wasted_slots']:>6}  {limit}{hottest}"
        )
    if len(chosen) < len(figures):
        lines.append(f"      the {len(chosen)} least balanced of {len(figures)} layers; --all-layers shows all")
    return lines


def why_lines(bounds: Sequence[Bound], balance: np.ndarray, most: int = 5) -> list[str]:
    """The reasons for the widest gaps to a balance of 1, worded."""
    named = [n for n in np.argsort(balance, kind="stable") if bounds[n].reason != "none"]
    lines = [f"layer {n}: at best {bounds[n].balance:.4f}, because {bounds[n].detail}" for n in named[:most]]
    if len(named) > most:
        lines.append(f"(and {len(named) - most} more layers with a limit)")
    return lines


def size_text(num_bytes: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
