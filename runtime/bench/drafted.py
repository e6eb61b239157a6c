"""Decode speed with a draft against the same engine without one: ``dspark bench decode --draft NAME``.

By domain, batch size and verify mode, greedy, on one rank. A run with the draft and a run without take turns, and must
give the same ids. Requests of a batch end at the same length, so with a draft some end sooner than others, and the last
ones run in smaller and smaller batches: the speed while all of them run is that of a batch which is kept full. A round
is a step with the draft, a plain step one of the engine without; the sequential loop is what the draft's heads take to
choose a block token by token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..cli import EXIT_FAILED, EXIT_OK, running
from ..engine import Engine
from ..progress import shown
from ..spec.policy import make_policy
from ..spec.schedule import VerifyPolicy
from ..spec.sps import SpsTable, fit_additive
from ..verbs.profile_sps import PROMPT_TOKENS, measure, num_tokens
from . import flags
from .accept import prompts_by_domain
from .machine import Setting, machine_line
from .picture import save_bars
from .systems import Decoded, EngineSystem, first_difference, sibling
from .table import table
from .timing import Stopwatch, alternate, on_threads, waiter

NUM_WARM_TOKENS = 12
PROFILE_STEPS = 48


class Case(NamedTuple):
    """What is decoded and how."""

    domain: str
    batch: int
    mode: str

    def __str__(self) -> str:
        return f"{self.domain}_batch_{self.batch}_{self.mode}"


class Figures(NamedTuple):
    """``ratio``: tokens a second with the draft over those without, of all turns together; ``ratio_low`` and
    ``ratio_high`` of a single one; ``full_ratio`` over the steps in which all requests of the batch run.
    ``tokens_per_round``: that a request got, a step. ``round_steps``: seconds of a round in plain steps, medians of the
    steps in which all run. ``loop_share``: the sequential loop's share of a round."""

    tokens_per_s: float
    plain_tokens_per_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    full_ratio: float
    tokens_per_round: float
    round_steps: float
    loop_share: float
    ids_equal: bool


def run(args: argparse.Namespace) -> int:
    """Measure and print; raises ``ValueError`` for a checkpoint without the draft and for prompts that do not fit."""
    most = max(args.batch)
    longest = max(args.new_tokens + 512, PROMPT_TOKENS + num_tokens(args.gamma or 16, PROFILE_STEPS, 1))
    sizes = {"max_running": most, "chunk_size": 4096, "draft": args.draft, "gamma": args.gamma}
    _, config = flags.model_of(args)
    sizes["max_context"] = min(longest, config.max_position_embeddings)
    bare = sizes | {"draft": "none", "gamma": None}
    with on_threads(args.threads), flags.open_alone(args, **sizes) as session, flags.open_alone(args, **bare) as plain:
        if session.engine.drafter.gamma == 0:
            raise ValueError("--draft: the checkpoint has no draft to compare with; leave --draft out")
        prompts = prompts_by_domain(session, args.prompts and [args.prompts], args.new_tokens)
        with running():
            sps = profile(session.engine, most) if any(mode != "static" for mode in args.verify) else None
            engines = (session.engine, plain.engine)
            cases = [Case(domain, batch, mode) for batch in args.batch for mode in args.verify for domain in prompts]
            results = measure_all(engines, cases, prompts, sps, args)
        how = (
            f"{args.new_tokens} new tokens, greedy, blocks of {session.engine.drafter.gamma}, {args.rounds} turns, "
            "each with the next prompts; sync and async with a table of steps a second measured just before"
        )
        machine, about = machine_line(session.process.device), flags.measured(session)
    setting = Setting(about, "the same without a draft", how, args.threads, machine)
    report(args, setting, results)
    return EXIT_OK if all(figures.ids_equal for figures in results.values()) else EXIT_FAILED


def profile(engine: Engine, max_running: int) -> SpsTable:
    """Steps a second against rows, as ``dspark profile-sps`` measures them."""
    probes = measure(sibling(engine), max_running, engine.drafter.gamma, PROFILE_STEPS)
    drafted = [(p.num_requests, p.num_rows, p.seconds) for p in probes if p.drafted]
    return fit_additive(*zip(*drafted), bin_rows=1, plain_seconds=[p.seconds for p in probes if not p.drafted])


def measure_all(
    engines: tuple[Engine, Engine],
    cases: Sequence[Case],
    prompts: Mapping[str, Sequence[Sequence[int]]],
    sps: SpsTable | None,
    args: argparse.Namespace,
) -> dict[Case, Figures]:
    """The figures of every case, for ``engines`` with and without the draft."""
    results = {}
    bar = shown("draft on and off", 2 * args.rounds * len(cases), "run")
    try:
        for case in cases:
            runs = decode_in_turns(engines, prompts[case.domain], case, make_policy(case.mode, sps), args, bar.update)
            results[case] = figures_of(*runs)
    finally:
        bar.close()
    return results


class Runs(NamedTuple):
    """Runs ``with_draft`` and ``without`` it, by turn; ``loop_seconds`` of the sequential loop in all of the former."""

    with_draft: list[Decoded]
    without: list[Decoded]
    loop_seconds: float


def batches(pool: Sequence[Sequence[int]], size: int) -> Iterator[list[list[int]]]:
    """Batches of ``size`` prompts for ever, each going on in ``pool`` where the one before ended."""
    prompts = itertools.cycle(map(list, pool))
    while True:
        yield list(itertools.islice(prompts, size))


def turns_of(system: EngineSystem, source: Iterator[list[list[int]]], num_new: int) -> Callable[[], Decoded]:
    """What decodes the next batch whenever it is called."""
    return lambda: system.decode(next(source), num_new)


def decode_in_turns(
    engines: tuple[Engine, Engine],
    pool: Sequence[Sequence[int]],
    case: Case,
    policy: VerifyPolicy,
    args: argparse.Namespace,
    tick: Callable[[int], None],
) -> Runs:
    """Decode batches of the ``pool``, the same in turns with and without the draft."""
    systems = [EngineSystem(engine) for engine in engines]
    engines[0].set_policy(policy)
    watch = Stopwatch(waiter(engines[0].cache.page_table.device))
    heads = engines[0].drafter.heads
    loop = heads.draw_block
    try:
        heads.draw_block = watch.wrap("loop", loop)
        for system in systems:
            system.decode(next(batches(pool, case.batch)), min(args.new_tokens, NUM_WARM_TOKENS))
        watch.take()
        turns = [turns_of(system, batches(pool, case.batch), args.new_tokens) for system in systems]
        with_draft, without = alternate(turns, args.rounds, tick)
        return Runs(with_draft, without, watch.take()["loop"][1])
    finally:
        heads.draw_block = loop


def figures_of(ours: Sequence[Decoded], theirs: Sequence[Decoded], loop_seconds: float) -> Figures:
    """What some runs with the draft and as many without it come to."""
    speeds = [sum(sum(run.counts[1:]) for run in runs) / sum(step_seconds(runs)) for runs in (ours, theirs)]
    ratios = [left.tokens_per_s / right.tokens_per_s for left, right in zip(ours, theirs)]
    full = [[step for run in runs for step in run.full_steps()] for runs in (ours, theirs)]
    full_speeds = [sum(count for count, _ in steps) / sum(seconds for _, seconds in steps) for steps in full]
    round_seconds, plain_seconds = (statistics.median(seconds for _, seconds in steps) for steps in full)
    emitted = sum(sum(run.counts[1:]) for run in ours) / sum(sum(run.requests[1:]) for run in ours)
    same = all(first_difference(a.token_ids, b.token_ids) is None for a, b in zip(ours, theirs))
    return Figures(
        *speeds,
        speeds[0] / speeds[1],
        min(ratios),
        max(ratios),
        full_speeds[0] / full_speeds[1],
        emitted,
        round_seconds / plain_seconds,
        loop_seconds / sum(step_seconds(ours)),
        same,
    )


def step_seconds(runs: Sequence[Decoded]) -> list[float]:
    """Seconds of every step after the first of some runs."""
    return [after - before for run in runs for before, after in zip(run.stamps, run.stamps[1:])]


def report(args: argparse.Namespace, setting: Setting, results: Mapping[Case, Figures]) -> None:
    """Print a table or JSON, and draw the picture if one is wanted."""
    if args.json:
        figures = {str(case): found._asdict() for case, found in results.items()}
        print(json.dumps(figures | {"setting": setting.to_json()}))
    else:
        names = (
            "domain",
            "batch",
            "verify",
            "tokens/s",
            "without",
            "ratio",
            "by turn",
            "all running",
            "tokens/round",
            "round/plain",
            "loop",
        )
        rows = [
            (
                case.domain, str(case.batch), case.mode, f"{f.tokens_per_s:.0f}", f"{f.plain_tokens_per_s:.0f}",
                f"{f.ratio:.2f}x", f"{f.ratio_low:.2f} - {f.ratio_high:.2f}", f"{f.full_ratio:.2f}x",
                f"{f.tokens_per_round:.2f}",
                f"{f.round_steps:.2f}", f"{100 * f.loop_share:.1f} %" + ("" if f.ids_equal else "  IDS DIFFER"),
            )
            for case, f in results.items()
        ]  # fmt: skip
        print("\n".join([*setting.lines(), "", table(names, rows)]))
    if args.picture:
        domains = list(dict.fromkeys(case.domain for case in results))
        series = {
            f"batch {batch}, {mode}": [results[Case(domain, batch, mode)].ratio for domain in domains]
            for batch in args.batch
            for mode in args.verify
        }
        title, note = "Decoding with the draft", "\n".join(setting.lines())
        save_bars(args.picture, title, "tokens/s over those without a draft", domains, series, note)
