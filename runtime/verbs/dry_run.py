"""What a command would be on a cluster: its layout, groups, node crossings and memory per rank. Nothing is started.

Example: dspark dry-run --world 16 --gpus-per-node 8 -- generate --pp 2 --ep 8 --prompt hello
"""

from __future__ import annotations

import argparse
import importlib
import pathlib

from ..checkpoint import bundled_model
from ..cli import EXIT_OK, EXIT_USAGE, VERBS, Parser
from ..ranks_table import groups_table
from .bench import BENCHMARKS
from .check import ITEM_SIZES, as_text, check
from .layout import topology_from_args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's flags."""
    parser.add_argument("--world", type=int, required=True, metavar="N", help="ranks altogether")
    parser.add_argument("--gpus-per-node", type=int, required=True, metavar="N", help="ranks of a node")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- VERB ...", help="the command to look at")


def run(args: argparse.Namespace) -> int:
    """Print the tables; status 2 where the checkpoint or the layout would be refused."""
    options = parse_command(args.command[1:] if args.command[:1] == ["--"] else args.command)
    if "pp" not in options:
        print("this command runs on one rank; it has no layout")
        return EXIT_OK
    # As a launcher would tell: a last node that is not full is no mistake.
    nodes = [rank // args.gpus_per_node for rank in range(args.world)]
    topology = topology_from_args(options, args.world, None, nodes)
    print("\n".join(groups_table(topology)) + "\n")
    folder = pathlib.Path(options.model) if getattr(options, "model", None) else bundled_model()
    dtype = getattr(options, "dtype", "auto")
    sizes = (getattr(options, "max_running", 1), getattr(options, "max_context", None))
    report = check(folder, topology, ITEM_SIZES["float32" if dtype == "auto" else dtype], *sizes)
    print("\n".join(as_text(report)))
    return EXIT_OK if report["ok"] else EXIT_USAGE


def parse_command(command: list[str]) -> argparse.Namespace:
    """The options of a dspark command, by its own parser; raises ``ValueError`` for what that refuses."""
    if not command or command[0] not in VERBS:
        raise ValueError(f"which command? give one of {', '.join(VERBS)} and its options behind --")
    place, package, rest = VERBS[command[0]][0], __package__.rpartition(".")[0], command[1:]
    if command[0] == "bench" and rest and rest[0] in BENCHMARKS:
        place, package, rest = BENCHMARKS[rest[0]][0], __package__, rest[1:]
    module = importlib.import_module(place, package)
    parser = Parser(prog=f"dspark {command[0]}", allow_abbrev=False)
    module.add_arguments(parser)
    return parser.parse_args(rest)
