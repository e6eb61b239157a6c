"""Balance experts over GPUs, for this or any other engine: inspect, plan, diff, migrate, simulate, convert, validate.

Example: dspark eplb plan --load loads.npz --gpus 32 --nodes 4 --redundant 32 --out map.json

"dspark eplb VERB --help" explains each; "python -m dspark.eplb" is the same without the runtime.
"""

from __future__ import annotations

import argparse

from ...eplb import cli


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything after the verb is for ``eplb/cli.py``."""
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="VERB ...", help=", ".join(cli.VERBS))


def run(args: argparse.Namespace) -> int:
    """Run the verb of the balancer; returns its exit status."""
    return cli.main(args.argv)
