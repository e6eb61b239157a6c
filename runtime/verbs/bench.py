"""Benchmarks: figures against a stated baseline that is measured in the same run.

Example: dspark bench decode --batch 1,8 --json
"""

from __future__ import annotations

import argparse
import importlib

from ..cli import EXIT_OK, Parser

# name -> (module with ``add_arguments(parser)`` and ``run(args)``, what it measures)
BENCHMARKS: dict[str, tuple[str, str]] = {
    "decode": ("..bench.decode", "decode speed against transformers, time per token by context, profile of a step"),
    "prefill": ("..bench.prefill", "prefill speed against transformers, peak memory by length"),
    "accept": ("..bench.accept", "how many drafted tokens are kept, by draft, domain, temperature and place"),
    "layouts": ("..bench.layouts", "every layout of ranks gives the tokens of one rank"),
    "ring": ("..bench.ring", "ring, striped, zigzag and gathered attention against dense attention on one rank"),
    "traffic": ("..bench.traffic", "bytes of a forward on every axis against the formulas"),
    "serve": ("..bench.serve", "many requests at once against one by one, latencies, and a long prompt among them"),
    "dispatch": ("..bench.dispatch", "copies and bytes of tokens on their way to experts, by dispatcher"),
    "kernels": ("..bench.kernels", "times of GPU kernels against the floor of an H200; what they compile to"),
    "synthetic": ("..bench.synthetic", "tokens per second of a made-up model of a few billion parameters on a GPU"),
    "overlap": ("..bench.overlap", "a prefill step with and without overlap of communication and computation"),
    "kinds": ("..bench.kinds", "what attention kinds keep and cost: bytes, operations and time per token by context"),
    "memory": ("..bench.memory", "memory per token of context against the formula of dspark check"),
    "eplb": ("...eplb.bench", "balance and time of expert plans, re-plans and splits against the published greedy"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's name; everything behind it is read by the benchmark, which is loaded only then."""
    lines = [f"  {name:<10} {about}" for name, (_, about) in BENCHMARKS.items()]
    parser.epilog = "\n".join(["benchmarks:", *lines, "", "dspark bench NAME --help explains one"])
    parser.add_argument("name", nargs="?", metavar="NAME", help="which benchmark; without a name they are listed")
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help="options of the benchmark")


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that ``args`` names; raises ``ValueError`` listing the names for an unknown one."""
    if args.name is None:
        print("\n".join(f"{name:<10} {about}" for name, (_, about) in BENCHMARKS.items()))
        return EXIT_OK
    if args.name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {args.name!r}; there are {', '.join(BENCHMARKS)}")
    module = importlib.import_module(BENCHMARKS[args.name][0], __package__)
    parser = Parser(
        prog=f"dspark bench {args.name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return module.run(parser.parse_args(args.options))
