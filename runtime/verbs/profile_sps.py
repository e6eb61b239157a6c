"""Measure how many steps a second this layout makes against the rows of a step, for --verify sync and async.

Examples:
  dspark profile-sps --output sps.json
  torchrun --nproc-per-node 2 -m dspark.runtime profile-sps --tp 2 --output sps.json --picture sps.png

For growing numbers of requests, a fixed number of drafts is verified in a step, from none to all of a block, or nothing
is drafted; these take turns, on new requests every few steps. Whole steps are timed, drafting included. The table, of
medians, is the JSON that --sps-table reads.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from typing import NamedTuple

import numpy as np

from ..bench.flags import at_least_one
from ..bench.machine import machine_line
from ..bench.picture import check_picture, save_lines
from ..bench.table import table
from ..cli import EXIT_OK, running
from ..engine import Engine
from ..inputs import check_output
from ..request import Request, SamplingParams
from ..spec.schedule import FixedPolicy
from ..spec.sps import fit_additive, save_table
from .engine_flags import add_model_flags, open_session

PROMPT_TOKENS = 48
NUM_WARM_TURNS = 1
RUN_STEPS = 6
"""Steps of a kind that are timed of the same requests."""


class Probe(NamedTuple):
    """Median ``seconds`` of steps with ``num_requests`` requests and ``num_rows`` rows; ``drafted``: with a draft."""

    num_requests: int
    num_rows: int
    seconds: float
    drafted: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's flags."""
    parser.add_argument("--output", metavar="FILE.json", help="write the table here (default: print it)")
    parser.add_argument("--picture", metavar="FILE.png", help="draw the measured curve (needs matplotlib)")
    parser.add_argument("--steps", type=at_least_one, default=12, metavar="N", help="steps per point (default 12)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON even with --output")
    add_model_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure; collective over all ranks that were started."""
    check_picture(args.picture)
    if args.output is not None:
        check_output("--output", args.output, [])
    with open_session(args) as session:
        sizes = session.groups.topology.sizes
        gamma = session.engine.drafter.gamma
        if gamma == 0:
            raise ValueError("there is no draft whose verification could be measured; use a checkpoint that has one")
        if session.engine.drafter.tree is not None:
            raise ValueError(f"--tree {session.config.tree} is verified whole and needs no table; leave it out")
        longest = PROMPT_TOKENS + num_tokens(gamma, args.steps, sizes["pp"])
        if longest > session.max_context:
            raise ValueError(
                f"--steps {args.steps} makes requests of up to {longest} tokens, but the context limit is "
                f"{session.max_context}; raise --max-context, or use fewer than {RUN_STEPS} steps"
            )
        with running():
            probes = measure(session.engine, session.config.max_running, gamma, args.steps)
            if session.is_first:
                layout = {name: size for name, size in sizes.items() if size > 1}
                report(
                    args, probes, {"layout": layout, "machine": machine_line(session.process.device), "gamma": gamma}
                )
    return EXIT_OK


def num_tokens(gamma: int, num_steps: int, num_stages: int) -> int:
    """The most tokens that a request may get, so that none ends while steps are timed."""
    num_turns = NUM_WARM_TURNS + min(num_steps, RUN_STEPS)
    return (gamma + 1) * (gamma + 3) * (num_stages + 1) * num_turns


def measure(engine: Engine, max_running: int, gamma: int, num_steps: int) -> list[Probe]:
    """Time steps of 1, 2, 4, .. requests with 0, 1, .. γ drafts verified of each, and without a draft. Collective over
    the job. These take turns, so that whatever else the machine does hits all of them; and requests are new every few
    turns, since longer ones take longer. What a draft puts off in steps that do not draft is not in their time."""
    numbers, probes, count = random.Random(1), [], 1
    policies = [FixedPolicy(length) for length in (None, *range(gamma + 1))]
    while count <= max_running:
        seconds: list[list[float]] = [[] for _ in policies]
        left = num_steps
        while left > 0:
            for times, more in zip(seconds, _time_run(engine, count, gamma, min(left, RUN_STEPS), policies, numbers)):
                times += more
            left -= RUN_STEPS
        for policy, times in zip(policies, seconds):
            length = policy.length
            probes.append(Probe(count, count * (1 + (length or 0)), float(np.median(times)), length is not None))
        count *= 2
    return probes


def _time_run(
    engine: Engine, count: int, gamma: int, num_steps: int, policies: list[FixedPolicy], numbers: random.Random
) -> list[list[float]]:
    """Seconds of ``num_steps`` steps of ``count`` new requests a DP rank under each of the ``policies``, in turns."""
    num_stages = engine.groups.pp.size
    params = SamplingParams(max_new_tokens=num_tokens(gamma, num_steps, num_stages), ignore_eos=True)
    ids = [f"probe {numbers.random()}" for _ in range(count * engine.groups.attn_dp.size)]
    for i, name in enumerate(ids):
        prompt = tuple(numbers.randrange(engine.model.config.vocab_size) for _ in range(PROMPT_TOKENS))
        engine.add(Request(name, prompt, params, i))
    ready: set[str] = set()
    while len(ready) < len(ids):
        ready |= {event.request_id for event in engine.step()}
    seconds: list[list[float]] = [[] for _ in policies]
    for turn in range(NUM_WARM_TURNS + num_steps):
        for policy, times in zip(policies, seconds):
            engine.set_policy(policy)
            for _ in range(num_stages):  # what is under way from the turn before, and what its draft put off
                engine.step()
            start = time.perf_counter()
            engine.step()
            if turn >= NUM_WARM_TURNS:
                times.append(time.perf_counter() - start)
    for name in ids:
        engine.abort(name)
    return seconds


def report(args: argparse.Namespace, probes: list[Probe], measured: dict[str, object]) -> None:
    """Write, print and draw what was measured."""
    drafted = [(p.num_requests, p.num_rows, p.seconds) for p in probes if p.drafted]
    plain = [p.seconds for p in probes if not p.drafted]
    fitted = fit_additive(*zip(*drafted), bin_rows=1, plain_seconds=plain)
    if args.output:
        save_table(args.output, fitted, measured)
    if args.json or not args.output:
        print(json.dumps(fitted.to_json() | {"measured": measured}))
    else:
        rows = [
            [str(p.num_requests), str(p.num_rows), "yes" if p.drafted else "no", f"{1e3 * p.seconds:.2f}"]
            for p in probes
        ]
        print(table(["requests", "rows", "draft", "ms a step"], rows))
    if args.picture:
        counts = sorted({probe.num_requests for probe in probes})
        curves = {
            f"{count} requests": [(p.num_rows, 1 / p.seconds) for p in probes if p.num_requests == count and p.drafted]
            for count in counts
        }
        save_lines(args.picture, "Steps a second against rows of a step", "rows", "steps/s", curves)
