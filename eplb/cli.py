"""``dspark eplb VERB ...``, also ``python -m dspark.eplb VERB ...``: balance experts for any engine, from files.

Exit statuses: 0 done; 1 a wanted threshold was missed, or it failed while running; 2 bad usage or input (one line on
stderr, no traceback); 130 interrupted. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

VERBS = {
    "inspect": "what loads look like, what a map makes of them, how much redundancy they need",
    "plan": "place experts for loads, from scratch or a few moves from the live map",
    "diff": "compare two maps",
    "migrate": "moves, bytes, time and break-even from one map to another",
    "simulate": "score a map on other loads, per layer and over time",
    "convert": "write a map or loads in another format",
    "validate": "check a map before an engine loads it",
}


class _Parser(argparse.ArgumentParser):
    """Mistakes in usage are a ``ValueError``, so that they end as one line like every other."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        return _dispatch(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        print("eplb: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of stdout went away (``| head``): nothing to report, and nothing more can be written there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        print(f"eplb: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(overview())
        return 0 if argv else 2
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS:
        raise ValueError(f"unknown verb {verb!r}; there are {', '.join(VERBS)}")
    module = importlib.import_module(f".commands.{verb}", __package__)
    parser = _Parser(
        prog=f"dspark eplb {verb}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return module.run(parser.parse_args(rest))


def overview() -> str:
    """The verbs, one a line."""
    lines = ["usage: dspark eplb VERB [options]        (also: python -m dspark.eplb VERB ...)", "", "verbs:"]
    lines += [f"  {name:<10} {about}" for name, about in VERBS.items()]
    return "\n".join([*lines, "", "dspark eplb VERB --help explains a verb and shows an example"])
