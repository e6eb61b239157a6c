"""Show what loads look like, and how a map or a deployment copes with them.

Without a map: tokens, idle and hottest experts of every layer. With --map: the balance of its GPUs. With --gpus (and
--redundant): what no placement could beat, and with --min-balance the smallest redundancy that reaches it.

Example: dspark eplb inspect loads.npz --gpus 32 --redundant 32 --min-balance 0.95
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import numpy as np

from ..bounds import smallest_redundancy, upper_bounds
from ..files import read_map
from ..placement import Placement
from ..report import Spread, layer_figures, layer_lines, why_lines
from ..shape import Shape
from .flags import add_deployment_flags, add_output_flags, add_reading_flags, add_redundant_flag, loads_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's flags."""
    parser.add_argument("files", nargs="*", metavar="FILE", help="expert loads: .npz .json .csv .pt .jsonl")
    parser.add_argument("--load", nargs="+", default=[], metavar="FILE", help="the same")
    add_reading_flags(parser)
    add_deployment_flags(parser)
    add_redundant_flag(parser)
    parser.add_argument("--map", metavar="MAP", help="a map to score on these loads")
    parser.add_argument(
        "--min-balance", type=float, metavar="X", help="exit with 1 if a layer cannot reach or has less"
    )
    parser.add_argument("--all-layers", action="store_true", help="a line for every layer")
    add_output_flags(parser, "heat map of the loads by layer and GPU, or by layer and expert without a map")


def run(args: argparse.Namespace) -> int:
    """Report; returns the exit status."""
    loads = loads_of(args, [*args.files, *args.load])
    load = loads.total(args.decay)
    result: dict[str, Any] = {
        "windows": loads.num_windows,
        "num_layers": len(load),
        "num_experts": load.shape[1],
        "tokens": float(loads.load.sum()),
        "idle_layers": np.flatnonzero(~load.any(1)).tolist(),
        "layers": expert_figures(load),
    }
    lines = [
        f"{loads.num_windows} windows of {len(load)} layers x {load.shape[1]} experts, {loads.load.sum():.0f} tokens"
    ]
    if result["idle_layers"]:
        lines.append(f"layers without any token (a plan leaves them in order): {result['idle_layers']}")
    reached = None
    if args.map:
        reached = _with_map(args, load, result, lines)
    elif args.gpus:
        reached = _with_gpus(args, load, result, lines)
    else:
        if args.min_balance is not None:
            raise ValueError("--min-balance needs --map or --gpus")
        lines += ["", *expert_lines(result["layers"], None if args.all_layers else 8)]
    if args.plot:
        from ..plot import plot_loads

        columns = _map(args, load).gpu_load(load) if args.map else load
        result["files"] = [str(plot_loads(args.plot, columns, "GPU" if args.map else "expert"))]
        lines += [f"wrote {path}" for path in result["files"]]
    print(json.dumps(result) if args.json else "\n".join(lines))
    if args.min_balance is not None and reached is not None and reached < args.min_balance:
        print(f"eplb: {reached:.4f} is below --min-balance {args.min_balance}", file=sys.stderr)
        return 1
    return 0


def _map(args: argparse.Namespace, load: np.ndarray) -> Placement:
    return read_map(args.map).placement(args.gpus, args.nodes, args.groups, load.shape[1])


def _with_map(args: argparse.Namespace, load: np.ndarray, result: dict[str, Any], lines: list[str]) -> float:
    placement = _map(args, load)
    balance, bounds = placement.balance(load), upper_bounds(load, placement.shape)
    result["balance"] = Spread.of(balance)._asdict()
    result["layers"] = layer_figures(placement, load, bounds)
    lines.append(f"balance of {args.map} on {placement.shape.num_gpus} GPUs: {Spread.of(balance).text()}")
    lines += ["", *layer_lines(result["layers"], None if args.all_layers else 8)]
    lines += ["", *why_lines(bounds, balance)] if why_lines(bounds, balance) else []
    return float(balance.min())


def _with_gpus(args: argparse.Namespace, load: np.ndarray, result: dict[str, Any], lines: list[str]) -> float:
    shape = Shape(load.shape[1], load.shape[1] + (args.redundant or 0), args.gpus, args.nodes or 1, args.groups or 1)
    bounds = upper_bounds(load, shape)
    best = np.array([bound.balance for bound in bounds])
    result["best_possible"] = Spread.of(best)._asdict()
    for one, bound in zip(result["layers"], bounds):
        one.update(best_possible=bound.balance, reason=bound.reason, why=bound.detail)
    lines.append(f"no placement with {shape.num_redundant} redundant slots can beat: {Spread.of(best).text()}")
    lines += why_lines(bounds, best)
    if args.min_balance is not None:
        needed = smallest_redundancy(load, shape, args.min_balance)
        result["redundancy"] = needed._asdict()
        lines.append(
            f"a balance of {args.min_balance} in every layer: impossible below {needed.proven} redundant slots, "
            + (f"reached with {needed.found}" if needed.found is not None else f"not reached (best {needed.best:.4f})")
            if needed.proven is not None
            else f"a balance of {args.min_balance} in every layer is impossible with any redundancy that was tried"
        )
    return float(best.min())


def expert_figures(load: np.ndarray) -> list[dict[str, Any]]:
    """One object a layer: tokens, idle experts, the hottest ones, and the largest load over the mean."""
    figures = []
    for layer, row in enumerate(load):
        total = row.sum()
        hottest = np.argsort(-row, kind="stable")[:3]
        figures.append(
            {
                "layer": layer,
                "tokens": float(total),
                "idle_experts": int((row == 0).sum()),
                "max_over_mean": float(row.max() / row.mean()) if total else 0.0,
                "hottest": [{"expert": int(e), "share": float(row[e] / total) if total else 0.0} for e in hottest],
            }
        )
    return figures


def expert_lines(figures: list[dict[str, Any]], most: int | None) -> list[str]:
    """The figures as a table; only the ``most`` most uneven layers where that is given."""
    chosen = figures
    if most is not None and len(figures) > most:
        chosen = sorted(sorted(figures, key=lambda one: -one["max_over_mean"])[:most], key=lambda one: one["layer"])
    lines = [f"{'layer':>5} {'tokens':>12} {'idle':>5} {'max/mean':>9}  hottest experts (share of tokens)"]
    for one in chosen:
        hottest = ", ".join(f"{hot['expert']} ({100 * hot['share']:.1f} %)" for hot in one["hottest"])
        lines.append(
            f"{one['layer']:>5} {one['tokens']:>12.0f} {one['idle_experts']:>5} {one['max_over_mean']:>9.2f}  {hottest}"
        )
    if len(chosen) < len(figures):
        lines.append(f"      the {len(chosen)} most uneven of {len(figures)} layers; --all-layers shows all")
    return lines
