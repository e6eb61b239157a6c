"""Prefill speed against transformers, and the peak memory of a prefill by its length.

Examples:
  dspark bench prefill
  dspark bench prefill --tokens 1000,2000,4000 --chunk-size 512,128 --rounds 1 --json

One thread, one rank, one prompt at a time. Prefill is the time from handing over a prompt to its first new token, on
both sides; both run every round in turning order, and medians over the rounds are shown. The first new tokens must
agree: where they do not, that is said and the exit status is 1. Peak memory is taken in a fresh process for each length
and chunk size, as the growth of resident memory during the prefill; its exponent is log(growth ratio) / log(length
ratio) between the shortest and the longest prompt: 1 is proportional to the length, 2 would be its square.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..cli import EXIT_FAILED, EXIT_OK, running
from ..progress import shown
from ..session import Session
from . import flags
from .baseline import TransformersSystem, import_transformers
from .machine import Setting, machine_line
from .picture import save_bars
from .residence import Task, can_measure, residence
from .systems import Decoded, EngineSystem, System, first_difference, sibling
from .table import table
from .timing import alternate, on_threads

NUM_WARM_TOKENS = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--tokens",
        type=flags.numbers,
        metavar="N[,N...]",
        help="prompt lengths (default 1000,2000,4000 as far as they fit)",
    )
    parser.add_argument(
        *("--chunk-size", "--chunked-prefill-size"),
        dest="chunk_sizes",
        type=flags.numbers,
        default=(512,),
        metavar="N[,N...]",
        help="prefill tokens per step; the first gives the main figures (default 512)",
    )
    parser.add_argument(
        "--rounds", type=flags.at_least_one, default=3, metavar="N", help="runs of each system (default 3)"
    )
    parser.add_argument("--no-peak", action="store_true", help="leave out the peak memory")
    flags.add_speed_flags(parser)
    flags.add_bench_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; raises ``ValueError`` for lengths that do not fit the model."""
    flags.check_output(args)
    transformers = import_transformers("prefill")
    _, config = flags.model_of(args)
    lengths = choose_lengths(args.tokens, config.max_position_embeddings - 1)
    options = {"max_running": 1, "max_context": max(lengths) + 1, "chunk_size": args.chunk_sizes[0]}
    with on_threads(args.threads), flags.open_alone(args, **options) as session:
        machine = machine_line(session.process.device)
        pool = flags.prompts_of(args, session, max(lengths))
        with running():
            dtype = getattr(torch, session.config.dtype)
            baseline = TransformersSystem(transformers, session.config.model, dtype, session.process.device)
            systems = {size: EngineSystem(sibling(session.engine, chunk_size=size)) for size in args.chunk_sizes}
            prompts = {length: pool.joined(length) for length in lengths}
            speeds = compare(systems, baseline, prompts, args.rounds)
            peaks = measure_peaks(args, session, lengths)
            how = f"{pool.about} joined to one of each length, median of {args.rounds} rounds in turning order"
            setting = Setting(flags.measured(session), baseline.about, how, torch.get_num_threads(), machine)
    report(args, setting, speeds, peaks)
    return EXIT_OK if all(speed.difference is None for speed in speeds.values()) else EXIT_FAILED


def choose_lengths(wanted: Sequence[int] | None, longest: int) -> tuple[int, ...]:
    """The prompt lengths in ascending order; the usual ones that fit if none are ``wanted``."""
    if wanted is None:
        return tuple(n for n in (1000, 2000, 4000) if n <= longest) or (longest,)
    if max(wanted) > longest:
        raise ValueError(f"--tokens is {max(wanted)}, but the model has room for a prompt of {longest} and a new token")
    return tuple(sorted(wanted))


class Speed(NamedTuple):
    """One length: seconds by round, ours by chunk size, and where the first tokens differ (None: nowhere)."""

    num_tokens: int
    ours: dict[int, list[float]]
    baseline: list[float]
    difference: str | None

    def figures(self, chunk_size: int) -> dict[str, float]:
        """Medians as tokens a second, and their ratio."""
        rate = self.num_tokens / statistics.median(self.ours[chunk_size])
        base = self.num_tokens / statistics.median(self.baseline)
        return {"tokens_per_s": rate, "baseline_tokens_per_s": base, "ratio": rate / base}


def compare(
    systems: dict[int, EngineSystem], baseline: System, prompts: dict[int, list[int]], num_rounds: int
) -> dict[int, Speed]:
    """Prefill every prompt with all systems, ``num_rounds`` times each after a warm-up with the beginning of it."""
    everyone: list[System] = [*systems.values(), baseline]
    bar = shown("prefill", num_rounds * len(everyone) * sum(prompts), "tok")
    speeds = {}
    try:
        for system in everyone:
            system.decode([next(iter(prompts.values()))[:NUM_WARM_TOKENS]], 1)
        for length, ids in prompts.items():
            runs: list[Callable[[], Decoded]] = [lambda s=system, ids=ids: s.decode([ids], 1) for system in everyone]
            *ours, theirs = alternate(runs, num_rounds, lambda count, length=length: bar.update(count * length))
            differences = [
                first_difference(mine.token_ids, base.token_ids) for runs in ours for mine, base in zip(runs, theirs)
            ]
            speeds[length] = Speed(
                length,
                {size: [run.prefill_seconds for run in runs] for size, runs in zip(systems, ours)},
                [run.prefill_seconds for run in theirs],
                next((difference for difference in differences if difference), None),
            )
    finally:
        bar.close()
    return speeds


Peaks = dict[int, dict[int, int]]
"""Chunk size -> prompt length -> bytes."""


def measure_peaks(args: argparse.Namespace, session: Session, lengths: Sequence[int]) -> Peaks:
    """Peak growth of resident memory while one prompt is prefilled; empty where it cannot be measured."""
    if args.no_peak or session.process.device.type != "cpu" or not can_measure():
        return {}
    bar = shown("peak memory", len(lengths) * len(args.chunk_sizes), "run")
    peaks: Peaks = {}
    try:
        for size in args.chunk_sizes:
            peaks[size] = {}
            for length in lengths:
                task = Task(session.config.model, session.config.dtype, size, length)
                peaks[size][length] = residence(task).peak_growth
                bar.update(1)
    finally:
        bar.close()
    return peaks


def exponent(growth: dict[int, int]) -> float | None:
    """With which power of the length memory grows, from the shortest to the longest; None for a single length."""
    first, last = min(growth), max(growth)
    if first == last or growth[first] <= 0 or growth[last] <= 0:
        return None
    return math.log(growth[last] / growth[first]) / math.log(last / first)


def to_json(args: argparse.Namespace, setting: Setting, speeds: dict[int, Speed], peaks: Peaks) -> dict[str, object]:
    """Figures by length; those of further chunk sizes inside, under ``chunk_N``."""
    result: dict[str, object] = {}
    for length, speed in speeds.items():
        by_size = {
            size: speed.figures(size) | ({"peak_growth_bytes": peaks[size][length]} if peaks else {})
            for size in args.chunk_sizes
        }
        result[f"tokens_{length}"] = {
            **by_size[args.chunk_sizes[0]],
            "chunk_size": args.chunk_sizes[0],
            "first_token_equal": speed.difference is None,
            **{f"chunk_{size}": figures for size, figures in by_size.items()},
        }
    if peaks:
        result["peak_growth_exponent"] = {f"chunk_{size}": exponent(growth) for size, growth in peaks.items()}
    return result | {"setting": setting.to_json()}


def report(args: argparse.Namespace, setting: Setting, speeds: dict[int, Speed], peaks: Peaks) -> None:
    """Print tables or JSON, and draw the picture if one is wanted."""
    if args.json:
        print(json.dumps(to_json(args, setting, speeds, peaks)))
    else:
        print("\n".join(_lines(args, setting, speeds, peaks)))
    if args.picture:
        bars = {
            f"dspark, chunks of {size}": [speed.figures(size)["tokens_per_s"] for speed in speeds.values()]
            for size in args.chunk_sizes
        }
        base = args.chunk_sizes[0]
        bars["transformers"] = [speed.figures(base)["baseline_tokens_per_s"] for speed in speeds.values()]
        groups = [f"{length} tokens" for length in speeds]
        title = "Prefill of one prompt, one thread, one rank"
        save_bars(args.picture, title, "tokens/s", groups, bars, "\n".join(setting.lines()))


def _lines(args: argparse.Namespace, setting: Setting, speeds: dict[int, Speed], peaks: Peaks) -> list[str]:
    rows, notes = [], []
    for length, speed in speeds.items():
        for size in args.chunk_sizes:
            v = speed.figures(size)
            cells = (f"{v['tokens_per_s']:.1f}", f"{v['baseline_tokens_per_s']:.1f}", f"{v['ratio']:.2f}x")
            same = "equal" if speed.difference is None else "DIFFERENT"
            peak = f"{peaks[size][length] / 2**20:.1f}" if peaks else "-"
            rows.append((str(length), str(size), *cells, same, peak))
        if speed.difference is not None:
            notes.append(f"{length} tokens: the first tokens differ at {speed.difference}")
    header = ("prompt", "chunk", "tokens/s", "baseline", "ratio", "first token", "peak growth MiB")
    lines = [*setting.lines(), "", table(header, rows), *notes]
    for size, growth in peaks.items():
        power = exponent(growth)
        if power is not None:
            lines.append(f"chunks of {size}: peak growth has the exponent {power:.2f} in the length (2 is the square)")
    return lines
