"""Compare two maps of the same deployment: slots that differ, experts that must move, copies gained and lost.

Reordering experts within a GPU changes slots but moves nothing.

Example: dspark eplb diff old.json new.json --gpus 32
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from ..files import read_map
from ..moves import difference, transfers
from ..placement import Placement
from .flags import add_deployment_flags, add_output_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's flags."""
    parser.add_argument("first", metavar="A", help="the old map")
    parser.add_argument("second", metavar="B", help="the new map")
    add_deployment_flags(parser)
    add_output_flags(parser, "moved experts by layer, and who sends to whom")


def run(args: argparse.Namespace) -> int:
    """Compare; returns the exit status."""
    old, new = read_pair(args.first, args.second, args)
    found = difference(old, new)
    moves = transfers(old, new)
    crossing = sum(move.crosses_node for move in moves)
    per_layer = np.stack(found, 1)
    result = {
        "changed_physical_slots": int(found.changed_slots.sum()),
        "num_slots": int(old.slots.size),
        "moved_experts": int(found.moved.sum()),
        "across_nodes": crossing,
        "new_copies": int(found.new_copies.sum()),
        "removed_copies": int(found.removed_copies.sum()),
        "layers": [dict(zip(found._fields, map(int, row)), layer=layer) for layer, row in enumerate(per_layer)],
    }
    lines = [
        f"changed_physical_slots={result['changed_physical_slots']}/{result['num_slots']}",
        f"moved experts: {result['moved_experts']} ({100 * found.moved.sum() / old.slots.size:.2f} % of the slots), "
        f"{len(moves) - crossing} within and {crossing} across nodes",
        f"copies: {result['new_copies']} new, {result['removed_copies']} removed",
        "",
        f"{'layer':>5} {'changed':>8} {'moved':>6} {'new':>5} {'removed':>8}",
    ]
    lines += [
        f"{layer:>5} {row[0]:>8} {row[1]:>6} {row[2]:>5} {row[3]:>8}" for layer, row in enumerate(per_layer) if row[0]
    ]
    if args.plot:
        from ..plot import plot_moves

        result["files"] = [str(plot_moves(args.plot, moves, old.num_layers, old.shape))]
        lines += [f"wrote {path}" for path in result["files"]]
    print(json.dumps(result) if args.json else "\n".join(lines))
    return 0


def read_pair(first: str, second: str, args: argparse.Namespace) -> tuple[Placement, Placement]:
    """Two maps on the deployment that the flags and the files give."""
    files = read_map(first), read_map(second)
    known = {name: next((getattr(file, name) for file in files if getattr(file, name)), None) for name in _SIZES}
    experts = known["num_experts"] or max(int(file.slots.max()) for file in files) + 1
    old, new = (
        file.placement(
            args.gpus or known["num_gpus"],
            args.nodes or known["num_nodes"],
            args.groups or known["num_groups"],
            experts,
        )
        for file in files
    )
    return old, new


_SIZES = ("num_experts", "num_gpus", "num_nodes", "num_groups")
