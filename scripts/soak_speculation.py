"""The long forms of the tests of speculation: the whole greedy grid, and sampled laws on 20,000 continuations.

    python scripts/soak_speculation.py greedy --tp 1
    python scripts/soak_speculation.py greedy --tp 4 --gammas 3,7
    python scripts/soak_speculation.py sampled --size 20000

Prints a line for each case; the exit status is 1 if one fails. Ties of logits are reported as warnings.
"""

import argparse
import importlib.util
import itertools
import pathlib
import sys
import time

TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests"
SMALLEST_P = 1e-3


def load(name: str):
    """The file ``name`` below tests/ as a module."""
    path = TESTS / name
    spec = importlib.util.spec_from_file_location("soak_" + path.stem, path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def greedy(args: argparse.Namespace) -> bool:
    """Every draft, gamma, verify mode, batch size and chunk size on the golden prompts."""
    ranks, drafted = load("conftest.py"), load("runtime/conftest.py")
    tests = load("runtime/test_speculative_engine.py")
    gammas = [int(gamma) for gamma in args.gammas.split(",")]
    sizes = [(batch, chunk) for chunk in (7, 512) for batch in tests.BATCHES]
    grid = [(*case, *size) for case in itertools.product(tests.DRAFTS, gammas, tests.MODES) for size in sizes]
    sweep = sweeper(tests, drafted, grid, args.most)
    if args.tp == 1:
        return sweep(0, 1)
    return all(ranks.run_forked(sweep, args.tp, timeout=36000))


def sweeper(tests, drafted, grid, most):
    """``sweep(rank, world)``: run the grid on this rank, the first of which prints."""

    def sweep(rank: int, world: int) -> bool:
        groups = tests.Groups.build(tests.Topology(tp=world), rank) if world > 1 else tests.Groups.single()
        loaded, prompts = drafted.Loaded(tests.bundled_model(), groups), tests.golden_prompts()
        start = time.perf_counter()
        for number, case in enumerate(grid, start=1):
            counts = tests.totals(tests.check_greedy(drafted, loaded, prompts, *case, most=most))
            if rank == 0:
                seconds = time.perf_counter() - start
                print(
                    f"{number}/{len(grid)} {seconds:.0f} s", *case, "drafted, verified, accepted:", *counts, flush=True
                )
        return True

    return sweep


def sampled(args: argparse.Namespace) -> bool:
    """The two-sample tests with every filter."""
    drafted, tests = load("runtime/conftest.py"), load("runtime/test_sampled_law.py")
    passed = True
    for name, filters in tests.FILTERS.items():
        p, kept = tests.compare(drafted, args.size, filters, args.seed)
        print(f"{name}: {args.size} continuations each, p = {p:.3g}, {kept:.1%} of verified drafts kept", flush=True)
        passed &= p > SMALLEST_P
    return passed


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("greedy")
    verb.add_argument("--tp", type=int, default=1)
    verb.add_argument("--gammas", default="1,2,3,4,5,6,7")
    verb.add_argument("--most", type=int, default=64, help="requests end after 1 to so many tokens")
    verb.set_defaults(run=greedy)
    verb = verbs.add_parser("sampled")
    verb.add_argument("--size", type=int, default=20000)
    verb.add_argument("--seed", type=int, default=1)
    verb.set_defaults(run=sampled)
    args = parser.parse_args()
    return 0 if args.run(args) else 1


if __name__ == "__main__":
    sys.exit(main())
