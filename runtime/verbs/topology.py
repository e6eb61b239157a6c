"""Rank tables of a layout, without starting any process.

Example: dspark topology --world 16 --dp 2 --cp 4 --ep 16 --gpus-per-node 8
"""

from __future__ import annotations

import argparse
import json

from ...parallel.launch import detect
from ...parallel.topology import AXES, MAX_RANKS, Topology
from ..ranks_table import ranks_table
from .layout import add_layout_flags, topology_from_args

# What the usual server holds, for tables made away from the cluster.
USUAL_GPUS_PER_NODE = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's flags."""
    parser.add_argument(
        "--world", type=int, default=None, metavar="N", help="number of ranks (default: the launcher's, else tp * pp)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add_layout_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the tables (rank 0 only, if ranks were started); raises ``ValueError`` for an impossible layout."""
    info = detect() if args.world is None else None
    launched = info is not None and info.launcher != "single"
    if args.world is not None:
        world = args.world
    elif launched:
        world = info.world
    elif args.tp is not None:
        world = args.tp * args.pp
    else:
        raise ValueError("how many ranks? give --world N, or --tp N, or start the ranks with torchrun, srun or mpirun")
    gpus_per_node = (info.local_size if launched else None) or USUAL_GPUS_PER_NODE
    # Nobody said where the ranks live, so a last node that is not full is no mistake.
    nodes = [rank // gpus_per_node for rank in range(min(world, MAX_RANKS))]
    topology = topology_from_args(args, world, gpus_per_node, nodes)
    if not launched or info.rank == 0:
        print(json.dumps(as_json(topology)) if args.json else ranks_table(topology))
    return 0


def as_json(topology: Topology) -> dict:
    """``sizes``, ``groups`` (rank lists by axis), ``coords`` (one object a rank) and ``crosses_nodes`` (by axis)."""
    return {
        "sizes": topology.sizes,
        "groups": {axis: [list(ranks) for ranks in topology.groups[axis]] for axis in AXES},
        "coords": [topology.coords(rank)._asdict() for rank in range(topology.world)],
        "crosses_nodes": {axis: topology.crosses_nodes(axis) for axis in AXES},
    }
