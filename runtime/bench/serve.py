"""Serving many requests: throughput and latencies under load, and how smooth decoding stays while a long prompt comes.

Examples:
  dspark bench serve
  dspark bench serve --requests 32 --arrival-rate 20 --json
  dspark bench serve --draft auto --prefix-cache

One thread, one rank, greedy, ends of sequence ignored. Requests of mixed lengths (drawn with --seed) run together, all
at once or as Poisson traffic (--arrival-rate). Baselines of the same run: the same requests one by one, here and in
transformers (the first --baseline-requests of them), and transformers with a batch of eight prompts of one length, as
it cannot batch others. Throughput counts new tokens over the whole time, prefill included, as the median of the rounds;
systems run in turning order. Ids must agree with those of both baselines: where they do not, that is said and the exit
status is 1. A last part lets a few requests decode, sends a long prompt, and compares the longest gap between two
tokens of a running request with the median gap of all its life.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..arrivals import Timed, poisson_times
from ..cli import EXIT_FAILED, EXIT_OK, running
from ..drive import drive
from ..engine import Engine
from ..progress import shown
from ..request import Request, SamplingParams
from ..session import Session
from . import flags
from .baseline import TransformersSystem, import_transformers
from .latency import Latencies, LatencyLog
from .machine import Setting, machine_line
from .prompts import Prompts
from .systems import sibling
from .table import table
from .timing import alternate, on_threads

BATCH = 8
NUM_RUNNING = 4
"""Requests that decode while the long prompt comes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    count = {"type": flags.at_least_one, "metavar": "N"}
    parser.add_argument("--requests", **count, default=64, help="default 64")
    parser.add_argument("--prompt-tokens", **count, default=48, help="longest prompt; lengths are mixed (default 48)")
    parser.add_argument("--new-tokens", **count, default=64, help="most new tokens; counts are mixed (default 64)")
    parser.add_argument("--max-running", **count, default=64, help="requests at a time (default 64)")
    parser.add_argument("--chunk-size", **count, default=512, help="prefill tokens a step (default 512)")
    parser.add_argument(
        "--mixed-chunk", **count, help="prefill tokens a step beside 8 decoding requests (default: as generate)"
    )
    parser.add_argument("--arrival-rate", type=float, metavar="X", help="requests a second (default: all at once)")
    parser.add_argument("--baseline-requests", **count, default=8, help="requests that run one by one (default 8)")
    parser.add_argument("--rounds", **count, default=3, help="runs of each system (default 3)")
    parser.add_argument(
        "--long-prompt",
        type=int,
        default=4000,
        metavar="N",
        help="tokens of the late prompt; 0 for none (default 4000)",
    )
    parser.add_argument("--prefix-cache", action="store_true", help="keep prefixes for requests that begin alike")
    parser.add_argument("--draft", default="none", metavar="NAME", help="auto (the checkpoint's own) or none (default)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of lengths and arrivals (default 0)")
    flags.add_speed_flags(parser)
    flags.add_bench_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; raises ``ValueError`` for sizes that do not fit the model."""
    transformers = import_transformers("serve")
    _, config = flags.model_of(args)
    long = min(args.long_prompt, config.max_position_embeddings - args.new_tokens)
    context = min(config.max_position_embeddings, max(args.prompt_tokens + args.new_tokens, long + 2))
    options = {"max_running": args.max_running, "chunk_size": args.chunk_size, "prefix_cache": args.prefix_cache}
    options |= {"draft": args.draft, "mixed_chunk": args.mixed_chunk}
    with on_threads(args.threads), flags.open_alone(args, max_context=context, **options) as session:
        machine = machine_line(session.process.device)
        pool = flags.prompts_of(args, session, args.prompt_tokens)
        requests = mixed_requests(pool, args)
        with running():
            dtype = getattr(torch, session.config.dtype)
            baseline = TransformersSystem(transformers, session.config.model, dtype, session.process.device)
            served = compare(args, session, baseline, requests, pool)
            gaps = gaps_beside(session, pool.joined(long)) if long > 0 else None
    pace = "all at once" if args.arrival_rate is None else f"{args.arrival_rate:g} a second"
    how = (
        f"{len(requests)} requests of {pool.about}, prompts of 8 to {args.prompt_tokens} tokens, 8 to "
        f"{args.new_tokens} new tokens, {pace}, "
        f"median of {args.rounds} rounds in turning order"
    )
    setting = Setting(flags.measured(session), baseline.about, how, args.threads, machine)
    report(args, setting, served, gaps, session.config.mixed_chunk)
    return EXIT_OK if served.difference is None else EXIT_FAILED


def mixed_requests(pool: Prompts, args: argparse.Namespace) -> list[Request]:
    """Requests of mixed lengths, cut out of the pool's prompts at different places."""
    dice, requests = random.Random(args.seed), []
    text = pool.joined(sum(len(ids) for ids in pool.ids) + args.prompt_tokens)
    for i in range(args.requests):
        length = dice.randint(min(8, args.prompt_tokens), args.prompt_tokens)
        start = dice.randrange(len(text) - args.prompt_tokens + 1)
        num_new = dice.randint(min(8, args.new_tokens), args.new_tokens)
        params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
        requests.append(Request(f"{i}", tuple(text[start : start + length]), params, i))
    return requests


class Served(NamedTuple):
    """Tokens a second by system and round; the latencies of the last round; where ids first differ, if anywhere."""

    tokens_per_s: dict[str, list[float]]
    latencies: Latencies
    counters: dict[str, int]
    difference: str | None

    def median(self, system: str) -> float:
        """Tokens a second of a system."""
        return statistics.median(self.tokens_per_s[system])


def compare(
    args: argparse.Namespace, session: Session, baseline: TransformersSystem, requests: list[Request], pool: Prompts
) -> Served:
    """All systems in turning order, after a warm-up of each."""
    few = requests[: args.baseline_requests]
    alone = sibling(session.engine, max_running=1)
    length = min(args.prompt_tokens, min(len(ids) for ids in pool.ids))
    batch = [list(ids[:length]) for ids in (pool.ids * BATCH)[:BATCH]]
    logs: list[LatencyLog] = []

    def together() -> tuple[float, list[list[int]]]:
        logs.append(serve(session, requests, args.arrival_rate, args.seed))
        return logs[-1].tokens_per_s, [logs[-1].tokens[one.request_id] for one in requests[: len(few)]]

    def one_by_one() -> tuple[float, list[list[int]]]:
        log = LatencyLog()
        for one in few:
            log.came(one)
            for event in drive(alone, [one], None):
                log.push(event)
        return log.tokens_per_s, [log.tokens[one.request_id] for one in few]

    def theirs_one_by_one() -> tuple[float, list[list[int]]]:
        runs = [baseline.decode([one.prompt_ids], one.params.max_new_tokens) for one in few]
        seconds = sum(one.stamps[-1] - one.start for one in runs)
        return sum(sum(one.counts) for one in runs) / seconds, [one.token_ids[0] for one in runs]

    def theirs_batch() -> tuple[float, list[list[int]]]:
        one = baseline.decode(batch, args.new_tokens)
        return sum(one.counts) / (one.stamps[-1] - one.start), []

    systems = {
        "together": together,
        "one_by_one": one_by_one,
        "transformers_one_by_one": theirs_one_by_one,
        f"transformers_batch_{BATCH}": theirs_batch,
    }
    for one in few[:2]:
        baseline.decode([one.prompt_ids], 2)
        list(drive(alone, [one], None))
    serve(session, few, None, args.seed)
    bar = shown("serve", len(systems) * args.rounds, "run")
    try:
        results = alternate(list(systems.values()), args.rounds, bar.update)
    finally:
        bar.close()
    rates = {name: [rate for rate, _ in runs] for name, runs in zip(systems, results)}
    counts = session.engine.counts
    counters = {"retracted": counts.retracted, "prefix_hits": counts.hits, "prefix_hit_tokens": counts.hit_tokens}
    return Served(rates, logs[-1].summary(), counters, _difference(list(systems), results))


def _difference(names: Sequence[str], results: Sequence[Sequence[tuple[float, list[list[int]]]]]) -> str | None:
    expected = results[0][0][1]
    for name, runs in zip(names, results):
        for _, ids in runs:
            for number, (want, got) in enumerate(zip(expected, ids)):
                if want != got:
                    return f"request {number}, {name}"
    return None


def serve(session: Session, requests: Sequence[Request], rate: float | None, seed: int) -> LatencyLog:
    """Run ``requests`` together, at once or at ``rate`` a second."""
    log, arrivals = LatencyLog(), None
    if rate is None:
        for one in requests:
            log.came(one)
    else:

        def on_come(index: int, at: float) -> None:
            log.came(requests[index], at)

        arrivals = Timed(poisson_times(len(requests), rate, seed), session.world, session.device, on_come)
    with contextlib.closing(drive(session.engine, requests, None, arrivals)) as events:
        for event in events:
            log.push(event)
    return log


class Gaps(NamedTuple):
    """Seconds between two tokens of a running request: the ``median`` of its life, the ``longest`` and the median
    ``beside`` the long prompt; the worst of all running requests by longest / median."""

    median: float
    longest: float
    beside: float
    num_steps: int

    @property
    def ratio(self) -> float:
        """The longest over the median."""
        return self.longest / self.median

    def to_json(self) -> dict[str, float]:
        """With units."""
        return {
            "median_gap_ms": 1000 * self.median,
            "longest_gap_ms": 1000 * self.longest,
            "median_gap_beside_prefill_ms": 1000 * self.beside,
            "ratio": self.ratio,
            "prefill_steps": self.num_steps,
        }


def gaps_beside(session: Session, long_prompt: Sequence[int]) -> Gaps:
    """Let requests decode; send ``long_prompt`` after as many steps as its prefill takes; go on as long after it."""
    engine: Engine = sibling(session.engine, max_running=NUM_RUNNING + 1)
    num_chunks = -(-len(long_prompt) // max(min(engine.config.chunk_size - NUM_RUNNING, engine.config.mixed_chunk), 1))
    room = engine.config.max_context - 8
    params = SamplingParams(max_new_tokens=min(4 * num_chunks + 8, room), ignore_eos=True)
    for i in range(NUM_RUNNING):
        engine.add(Request(f"{i}", tuple(long_prompt[8 * i : 8 * i + 8]), params, i))
    log, steps, first, until = LatencyLog(), 0, None, None

    def step() -> None:
        nonlocal until
        for event in engine.step():
            if event.request_id == "long":
                until = log.now() if until is None else until
            else:
                log.push(event)

    for i in range(NUM_RUNNING):
        log.came(Request(f"{i}", (0,)))
    while engine.has_work() and steps < 3 * num_chunks:
        if steps == num_chunks:
            first = log.now()
            engine.add(Request("long", tuple(long_prompt), SamplingParams(max_new_tokens=1, ignore_eos=True)))
        step()
        steps += 1
    for i in range(NUM_RUNNING):
        engine.abort(f"{i}")
    engine.abort("long")
    worst = None
    for stamps in log.stamps.values():
        times = [at for at, _ in stamps][1:]
        gaps = [(b - a, b) for a, b in zip(times, times[1:])]
        during = [gap for gap, at in gaps if first < at <= (until or at)]
        found = Gaps(statistics.median(gap for gap, _ in gaps), max(during), statistics.median(during), len(during))
        worst = found if worst is None or found.ratio > worst.ratio else worst
    return worst


def report(args: argparse.Namespace, setting: Setting, served: Served, gaps: Gaps | None, mixed_chunk: int) -> None:
    """Print tables or JSON."""
    ours = served.median("together")
    systems = {
        name: {"tokens_per_s": served.median(name), "ratio": ours / served.median(name)} for name in served.tokens_per_s
    }
    if args.json:
        result = systems | served.latencies.to_json() | {"counters": served.counters}
        result |= {"ids_equal": served.difference is None, "setting": setting.to_json()}
        if gaps is not None:
            result["long_prompt"] = gaps.to_json()
        print(json.dumps(result))
        return
    rows = [(name, f"{v['tokens_per_s']:.1f}", f"{v['ratio']:.2f}x") for name, v in systems.items()]
    print("\n".join(setting.lines()))
    print("\n" + table(("system", "new tokens/s", "together is"), rows))
    if served.difference is not None:
        print(f"DIFFERENT ids at {served.difference}; the speeds are not of the same work")
    print("\n" + "\n".join(served.latencies.lines()))
    print(", ".join(f"{name.replace('_', ' ')} {count}" for name, count in served.counters.items()))
    if gaps is not None:
        v = gaps.to_json()
        print(
            f"\nlong prompt beside {NUM_RUNNING} running requests, chunks of {mixed_chunk}: longest gap "
            f"{v['longest_gap_ms']:.1f} ms, median gap of its life {v['median_gap_ms']:.1f} ms, ratio {gaps.ratio:.2f} "
            f"(median beside the prefill {v['median_gap_beside_prefill_ms']:.1f} ms, {gaps.num_steps} steps)"
        )
