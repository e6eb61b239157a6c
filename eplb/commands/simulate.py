"""Score a map on loads that it was not made from: per layer and over time.

Splits of an expert's tokens over its copies: even, nearest (same GPU, else same node) or weighted anew in every window.

Example: dspark eplb simulate --map map.json --gpus 32 --load tomorrow.npz --split weighted
"""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np

from ..files import read_map
from ..placement import balance_of
from ..report import SPLITS, Spread, layer_figures, layer_lines, split_load
from .flags import add_deployment_flags, add_load_flags, add_output_flags, loads_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's flags."""
    parser.add_argument("--map", required=True, metavar="MAP", help="the map to score")
    add_load_flags(parser)
    add_deployment_flags(parser)
    parser.add_argument("--split", choices=SPLITS, default="even", help="how tokens choose among copies (even)")
    parser.add_argument("--min-balance", type=float, metavar="X", help="exit with 1 if the mean of a window is below")
    parser.add_argument("--all-layers", action="store_true", help="a line for every layer")
    add_output_flags(parser, "balance by layer and over the windows")


def run(args: argparse.Namespace) -> int:
    """Score and report; returns the exit status."""
    loads = loads_of(args)
    placement = read_map(args.map).placement(args.gpus, args.nodes, args.groups, loads.load.shape[2])
    if loads.load.shape[1] != placement.num_layers:
        raise ValueError(f"the loads have {loads.load.shape[1]} layers, the map {placement.num_layers}")
    balance = np.stack([balance_of(split_load(placement, load, args.split)) for load in loads.load])
    total = loads.total(args.decay)
    figures = layer_figures(placement, total)
    for one, values in zip(figures, balance.T):
        one["balance_over_windows"] = Spread.of(values)._asdict()
    windows = [Spread.of(row) for row in balance]
    result = {
        "split": args.split,
        "balance": {"mean": float(balance.mean()), "worst": float(balance.min())},
        "windows": [window._asdict() for window in windows],
        "layers": figures,
    }
    lines = [f"{args.split} split, {len(windows)} windows: mean {balance.mean():.4f}, worst {balance.min():.4f}"]
    lines += [f"window {n:>3}: {window.text()}" for n, window in enumerate(windows)]
    lines += ["", "all windows together, split evenly:", *layer_lines(figures, None if args.all_layers else 8)]
    if args.plot:
        from ..plot import plot_balance

        result["files"] = [str(plot_balance(args.plot, balance, args.split))]
        lines += [f"wrote {path}" for path in result["files"]]
    print(json.dumps(result) if args.json else "\n".join(lines))
    low = min(windows, key=lambda window: window.mean)
    if args.min_balance is not None and low.mean < args.min_balance:
        print(f"eplb: a window has a mean balance of {low.mean:.4f}, below {args.min_balance}", file=sys.stderr)
        return 1
    return 0
