"""Decode speed against transformers: the same checkpoint and prompts, greedy, in the same run.

Examples:
  dspark bench decode
  dspark bench decode --batch 1,8 --new-tokens 64 --rounds 5 --json
  dspark bench decode --profile
  dspark bench decode --draft auto --batch 1,4,16 --verify static,async

One thread, one rank, no draft. Tokens a second count the steps after the first new token, so prefill is left out, on
both sides; both run every round in turning order, and medians over the rounds are shown. The ids of both must agree:
where they do not, that is said and the exit status is 1. Prompts of a batch have one length, because transformers'
cache of this model family cannot decode padded prompts. A second table has the time per token at short and long
contexts, which take turns step by step.

With --draft, the engine with that draft against itself without: by domain, batch size and verify mode. See also
dspark bench accept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..cli import EXIT_FAILED, EXIT_OK, running
from ..engine_config import VERIFY_MODES
from ..model_config import Config
from ..progress import shown
from ..request import Request, SamplingParams
from ..session import Session
from . import flags
from .baseline import TransformersSystem, import_transformers
from .drafted import run as run_drafted
from .machine import Setting, machine_line
from .picture import save_bars
from .profiling import Profile, profile_decode
from .systems import Decoded, EngineSystem, System, first_difference, sibling
from .table import table
from .timing import alternate, on_threads, waiter

USUAL_CONTEXTS = (400, 4000)
NUM_WARM_TOKENS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--batch", type=flags.numbers, default=(1, 8), metavar="N[,N...]", help="batch sizes (default 1,8)"
    )
    parser.add_argument("--prompt-tokens", type=flags.at_least_one, default=32, metavar="N", help="default 32")
    parser.add_argument("--new-tokens", type=flags.at_least_one, default=64, metavar="N", help="default 64")
    parser.add_argument(
        "--rounds", type=flags.at_least_one, default=5, metavar="N", help="runs of each system (default 5)"
    )
    parser.add_argument(
        "--context",
        type=flags.numbers,
        metavar="N[,N...]",
        help="contexts to compare the time per token at (default 400,4000 as far as the model reaches)",
    )
    parser.add_argument(
        "--draft", metavar="NAME", help="compare with and without a draft: auto (the checkpoint's), ..."
    )
    parser.add_argument("--gamma", type=flags.at_least_one, metavar="N", help="drafts a block, with --draft")
    parser.add_argument(
        "--verify", type=verify_modes, default=("static",), metavar="MODE[,...]", help="with --draft (default static)"
    )
    parser.add_argument("--profile", action="store_true", help="also show where the time of a step goes")
    flags.add_speed_flags(parser)
    flags.add_bench_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; raises ``ValueError`` for sizes that do not fit the model or the prompts."""
    flags.check_output(args)
    if args.new_tokens < 2:
        raise ValueError(f"--new-tokens is {args.new_tokens}; at least 2, since the first one belongs to prefill")
    if args.draft is not None:
        return run_drafted(args)
    if args.gamma is not None:
        raise ValueError(f"--gamma {args.gamma} needs --draft")
    transformers = import_transformers("decode")
    _, config = flags.model_of(args)
    contexts = choose_contexts(args, config)
    longest = max(args.prompt_tokens, *contexts) if contexts else args.prompt_tokens
    most = max(args.batch)
    # All prompts in one prefill step, so that they start decoding together.
    sizes = {"max_running": most, "chunk_size": max(512, most * args.prompt_tokens)}
    with (
        on_threads(args.threads),
        flags.open_alone(args, max_context=longest + args.new_tokens + NUM_WARM_TOKENS, **sizes) as session,
    ):
        machine = machine_line(session.process.device)
        pool = flags.prompts_of(args, session, args.prompt_tokens)
        prompts = pool.cut(most, args.prompt_tokens)
        with running():
            dtype = getattr(torch, session.config.dtype)
            baseline = TransformersSystem(transformers, session.config.model, dtype, session.process.device)
            ours = EngineSystem(sibling(session.engine))
            batches = {n: compare(ours, baseline, prompts[:n], args.new_tokens, args.rounds) for n in args.batch}
            times = time_by_context(session, {n: pool.joined(n) for n in contexts}, args.new_tokens)
            profiles = {n: profile_decode(session.engine, prompts[:n], args.new_tokens) for n in profiled(args)}
            how = (
                f"{pool.about} cut to {args.prompt_tokens} tokens, {args.new_tokens} new tokens, greedy, "
                f"median of {args.rounds} rounds in turning order"
            )
            setting = Setting(flags.measured(session), baseline.about, how, torch.get_num_threads(), machine)
    report(args, setting, batches, times, profiles)
    return EXIT_OK if all(batch.difference is None for batch in batches.values()) else EXIT_FAILED


def verify_modes(text: str) -> tuple[str, ...]:
    """An argument that is one or several verify modes, with commas."""
    modes = tuple(text.split(","))
    for mode in modes:
        if mode not in VERIFY_MODES:
            raise argparse.ArgumentTypeError(f"{mode!r} is none of {', '.join(VERIFY_MODES)}")
    return modes


def profiled(args: argparse.Namespace) -> Sequence[int]:
    """The batch sizes that are profiled."""
    return args.batch if args.profile else ()


def choose_contexts(args: argparse.Namespace, config: Config) -> tuple[int, ...]:
    """The contexts to measure at; without ``--context`` those of the usual ones that the model reaches."""
    room = config.max_position_embeddings - args.new_tokens - NUM_WARM_TOKENS
    if args.context is None:
        return tuple(n for n in USUAL_CONTEXTS if n <= room)
    if max(args.context) > room:
        raise ValueError(
            f"--context is {max(args.context)}, but the model's {config.max_position_embeddings} positions less "
            f"{args.new_tokens} new tokens leave {room}"
        )
    return args.context


class Comparison(NamedTuple):
    """Tokens a second by round, and where the ids of the two systems first differ (None: nowhere)."""

    ours: list[float]
    baseline: list[float]
    difference: str | None

    def to_json(self) -> dict[str, object]:
        """Medians, their ratio, and the lowest and highest ratio of a round."""
        ours, baseline = statistics.median(self.ours), statistics.median(self.baseline)
        ratios = [left / right for left, right in zip(self.ours, self.baseline)]
        return {
            "tokens_per_s": ours,
            "baseline_tokens_per_s": baseline,
            "ratio": ours / baseline,
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
            "ids_equal": self.difference is None,
        }


def compare(
    ours: System, baseline: System, prompts: Sequence[Sequence[int]], num_new: int, num_rounds: int
) -> Comparison:
    """Decode ``prompts`` together with both systems, ``num_rounds`` times each after a warm-up."""

    def runs(num: int) -> list[Callable[[], Decoded]]:
        return [lambda system=system: system.decode(prompts, num) for system in (ours, baseline)]

    for warm in runs(min(num_new, NUM_WARM_TOKENS)):
        warm()
    bar = shown(f"batch {len(prompts)}", 2 * num_rounds, "run")
    try:
        mine, theirs = alternate(runs(num_new), num_rounds, bar.update)
    finally:
        bar.close()
    differences = [first_difference(left.token_ids, right.token_ids) for left, right in zip(mine, theirs)]
    return Comparison(
        [run.tokens_per_s for run in mine],
        [run.tokens_per_s for run in theirs],
        next((difference for difference in differences if difference), None),
    )


def time_by_context(session: Session, prompts: dict[int, list[int]], num_steps: int) -> dict[int, float]:
    """Median seconds of a decode step of one request behind each of ``prompts``, by context.

    The contexts take turns step by step, so that whatever else the machine does hits all of them.
    """
    wait = waiter(session.process.device)
    engines = {context: sibling(session.engine, max_running=1) for context in prompts}
    params = SamplingParams(max_new_tokens=num_steps + NUM_WARM_TOKENS, ignore_eos=True)
    bar = shown("contexts", sum(prompts), "tok")
    try:
        for context, engine in engines.items():
            engine.add(Request("0", tuple(prompts[context]), params))
            num_done = 0
            while num_done < NUM_WARM_TOKENS:
                num_done += sum(len(event.token_ids) for event in engine.step())
            bar.update(context)
    finally:
        bar.close()
    seconds: dict[int, list[float]] = {context: [] for context in engines}
    for _ in range(num_steps):
        for context, engine in engines.items():
            start = time.perf_counter()
            engine.step()
            wait()
            seconds[context].append(time.perf_counter() - start)
    return {context: statistics.median(times) for context, times in seconds.items()}


def report(
    args: argparse.Namespace,
    setting: Setting,
    batches: dict[int, Comparison],
    times: dict[int, float],
    profiles: dict[int, Profile],
) -> None:
    """Print tables or JSON, and draw the picture if one is wanted."""
    figures = {n: batch.to_json() for n, batch in batches.items()}
    result: dict[str, object] = {f"batch_{n}": values for n, values in figures.items()}
    first = next(iter(times.values()), 1.0)
    for context, seconds in times.items():
        result[f"context_{context}"] = {"time_per_token_s": seconds, "ratio": seconds / first}
    result |= {f"profile_batch_{n}": profile.to_json() for n, profile in profiles.items()}
    if args.json:
        print(json.dumps(result | {"setting": setting.to_json()}))
    else:
        print("\n".join(_lines(setting, batches, times, profiles)))
    if args.picture:
        series = {"dspark": "tokens_per_s", "transformers": "baseline_tokens_per_s"}
        save_bars(
            args.picture,
            "Greedy decoding, one thread, one rank, no draft",
            "tokens/s",
            [f"batch {n}" for n in figures],
            {name: [values[key] for values in figures.values()] for name, key in series.items()},
            "\n".join(setting.lines()),
        )


def _lines(
    setting: Setting, batches: dict[int, Comparison], times: dict[int, float], profiles: dict[int, Profile]
) -> list[str]:
    rows, notes = [], []
    for n, batch in batches.items():
        v = batch.to_json()
        cells = (f"{v['tokens_per_s']:.1f}", f"{v['baseline_tokens_per_s']:.1f}", f"{v['ratio']:.2f}x")
        spread = f"{v['ratio_low']:.2f} - {v['ratio_high']:.2f}"
        rows.append((str(n), *cells, spread, "equal" if batch.difference is None else "DIFFERENT"))
        if batch.difference is not None:
            notes.append(f"batch {n}: the ids differ at {batch.difference}; the speeds are not of the same work")
    lines = [*setting.lines(), "", table(("batch", "tokens/s", "baseline", "ratio", "by round", "ids"), rows), *notes]
    if times:
        first, base = next(iter(times.items()))
        cells = [(str(n), f"{1000 * s:.3f}", f"{s / base:.2f}") for n, s in times.items()]
        lines += ["", table(("context", "ms per token, batch 1", f"of context {first}"), cells)]
    for n, profile in profiles.items():
        lines += ["", f"profile, batch {n}", *profile.lines()]
    return lines
