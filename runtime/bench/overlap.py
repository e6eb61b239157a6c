"""Overlapping communication with computation: a prefill step plain, as two half batches (tbo), and in pieces (sbo).

Examples:
  dspark bench overlap
  dspark bench overlap --nodes 2 --rate auto --trace overlap.json --picture overlap.png
  dspark bench overlap --tokens 16,512 --json

Ranks are forked on this host, each with prompts of its own (attention DP), and run one prefill step of a made-up model
in every mode, in turns; medians are shown, and outputs must be the same. With --nodes they are dealt to as many network
namespaces whose links are slowed to --rate ("200mbit"; "auto": so slow that rows travel about as long as the step
computes), which needs root. Exit status 1 if outputs differ.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import statistics
import time
from typing import Any, NamedTuple

import torch

from ...comm.collectives import barrier
from ...comm.dispatch import DispatchOptions
from ...comm.pipeline import StageLink
from ...layers.kernels import choose
from ...parallel.groups import Groups
from ...parallel.local import run_forked
from ...parallel.namespaces import Namespaces, why_not
from ...parallel.topology import Topology
from ..agreement import Agreement
from ..checkpoint import RandomWeights, bundled_model
from ..cli import EXIT_FAILED, EXIT_OK, running
from ..engine_config import DISPATCHERS, OVERLAP_MODES, EngineConfig
from ..load import make_cache
from ..model_config import ModelConfig, load_model_config
from ..models.deepseek_v4 import DeepseekV4
from ..step import Span as StepSpan
from ..step_maker import StepMaker
from . import flags
from .machine import machine_line
from .picture import check_picture
from .table import table
from .timeline import RecordedDispatcher, Recorder, Span, chrome_trace, save_timeline

CPU = torch.device("cpu")
SIZES = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts_per_tok": 4, "hash_layers": (False, False)}


class Job(NamedTuple):
    """What every rank runs."""

    config: ModelConfig
    dispatcher: str
    num_ranks: int
    num_tokens: int
    num_rounds: int


class Figures(NamedTuple):
    """Of one number of tokens: seconds of a step by mode and round (the slowest rank's), bytes each rank sends to
    another in a plain step, spans[mode][rank], and the largest difference of a logit from the plain step's."""

    seconds: dict[str, list[float]]
    sent_bytes: int
    spans: dict[str, list[list[Span]]]
    difference: float
    same_tokens: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument("--ranks", type=flags.at_least_one, default=2, metavar="N", help="default 2")
    parser.add_argument(
        "--tokens", type=flags.numbers, default=(512,), metavar="N[,N...]", help="prompt tokens a rank (default 512)"
    )
    parser.add_argument("--dispatcher", choices=DISPATCHERS, default="normal", help="default normal")
    parser.add_argument("--rounds", type=flags.at_least_one, default=5, metavar="N", help="of each mode (default 5)")
    parser.add_argument("--nodes", type=flags.at_least_one, metavar="N", help="namespaces to deal the ranks to")
    parser.add_argument("--rate", metavar="RATE", help='what a node may send, such as "200mbit", or "auto"')
    parser.add_argument("--trace", metavar="FILE.json", help="write a trace for Perfetto or chrome://tracing")
    parser.add_argument("--picture", metavar="FILE.png", help="draw the timelines (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print; raises ``ValueError`` where no namespaces can be made."""
    check_picture(args.picture)
    if args.rate is not None and args.nodes is None:
        raise ValueError(f"--rate {args.rate} slows the links between namespaces; give --nodes, too")
    problem = why_not() if args.nodes is not None else None
    if problem is not None:
        raise ValueError(f"--nodes {args.nodes}: {problem}")
    torch.set_num_threads(1)
    results: dict[int, tuple[str, Figures]] = {}
    with running():
        for num_tokens in args.tokens:
            job = Job(made_up_model(), args.dispatcher, args.ranks, num_tokens, args.rounds)
            results[num_tokens] = _measure(job, args.nodes, args.rate)
    _save(args, {tokens: figures for tokens, (_, figures) in results.items()})
    report = {tokens: _report(tokens, rate, figures) for tokens, (rate, figures) in results.items()}
    print(json.dumps(report) if args.json else _text(report))
    return EXIT_OK if all(figures.same_tokens for _, figures in results.values()) else EXIT_FAILED


def made_up_model() -> ModelConfig:
    """Two layers, wide enough that experts take most of the time."""
    config = load_model_config(bundled_model())
    return dataclasses.replace(
        config,
        num_layers=2,
        layer_kinds=config.layer_kinds[:2],
        compress_ratios=config.compress_ratios[:2],
        dspark=None,
        **SIZES,
    )


def _measure(job: Job, num_nodes: int | None, rate: str | None) -> tuple[str, Figures]:
    """The rate of the links and the figures over them."""
    if rate == "auto":
        with Namespaces(num_nodes) as nodes:
            free = _run(job._replace(num_rounds=3), nodes)
        # What the wire takes for a step is to be what the step takes on a free wire.
        rate = f"{int(8 * free.sent_bytes / min(free.seconds['none']) / 1000)}kbit"
    with Namespaces(num_nodes, rate) if num_nodes is not None else contextlib.nullcontext() as nodes:
        return rate or "free", _run(job, nodes)


def _run(job: Job, nodes: Namespaces | None) -> Figures:
    per_node = job.num_ranks // nodes.num_nodes if nodes else job.num_ranks
    node_of = tuple(rank // per_node for rank in range(job.num_ranks))
    ranks = run_forked(lambda rank: run_rank(job, node_of, rank), job.num_ranks, nodes=nodes)
    seconds = {
        mode: [max(times) for times in zip(*(rank["seconds"][mode] for rank in ranks))] for mode in OVERLAP_MODES
    }
    spans = {mode: [[Span(*span) for span in rank["spans"][mode]] for rank in ranks] for mode in OVERLAP_MODES}
    difference = max(rank["difference"] for rank in ranks)
    sent = max(rank["sent_bytes"] for rank in ranks)
    return Figures(seconds, sent, spans, difference, all(rank["same_tokens"] for rank in ranks))


def run_rank(job: Job, node_of: tuple[int, ...], rank: int) -> dict[str, Any]:
    """This rank's figures as JSON values. Collective over the job."""
    topology = Topology.make(job.num_ranks, dp=job.num_ranks, ep=job.num_ranks, nodes=node_of)
    groups, limit = Groups.build(topology, rank), job.num_tokens
    kernels = choose(CPU, torch.float32)
    dispatch = DispatchOptions(job.dispatcher, max_tokens_per_rank=limit)
    model = DeepseekV4(
        job.config, RandomWeights(job.config, seed=1), groups, kernels, limit + 1, CPU, dispatch=dispatch
    )
    plain, stages, link = model.dispatchers, model.stages, StageLink(groups.pp)
    prompt = [(7 * position + rank) % job.config.vocab_size for position in range(limit)]
    seconds: dict[str, list[float]] = {mode: [] for mode in OVERLAP_MODES}
    spans: dict[str, list[Span]] = {}
    logits: dict[str, torch.Tensor] = {}
    sent_bytes = 0
    for number in range(job.num_rounds + 1):  # the first compiles and is not counted
        for mode in OVERLAP_MODES:
            options = EngineConfig(
                dtype="float32", max_running=1, max_context=limit + 1, overlap=mode, overlap_min_rows=1
            )
            cache = make_cache(job.config, options, CPU)
            cache.reserve(cache.acquire(), limit)
            make = StepMaker(options, groups, cache, Agreement(groups, CPU), job.config.vocab_size)
            made = make([StepSpan(0, 0, prompt, limit)], 1, has_prefill=True)
            recorder = Recorder()
            model.dispatchers = tuple(RecordedDispatcher(one, recorder, half) for half, one in enumerate(plain))
            model.stages = recorder.staged(stages, model.dispatchers)
            groups.reset_traffic()
            barrier(groups.world)
            start = time.perf_counter()
            output = model.run_stage(made.steps, cache, link, made.in_pieces)
            if number:
                seconds[mode].append(time.perf_counter() - start)
            if mode == "none":
                sent_bytes = sum(counter.total().sent_bytes for counter in groups.traffic().values())
            spans[mode], logits[mode] = recorder.spans, torch.cat([part.logits for part in output])
    tokens = {mode: rows.argmax(1) for mode, rows in logits.items()}
    return {
        "seconds": seconds,
        "spans": spans,
        "sent_bytes": sent_bytes,
        "difference": max(float((rows - logits["none"]).abs().max()) for rows in logits.values()),
        "same_tokens": all(torch.equal(rows, tokens["none"]) for rows in tokens.values()),
    }


def _report(num_tokens: int, rate: str, figures: Figures) -> dict[str, Any]:
    medians = {mode: statistics.median(times) for mode, times in figures.seconds.items()}
    return {
        "rate": rate,
        "sent_bytes": figures.sent_bytes,
        "same_tokens": figures.same_tokens,
        "largest_difference": figures.difference,
        "overlaps_by_default": num_tokens >= EngineConfig.overlap_min_rows,
        "step_s": medians,
        "ratio": {mode: medians[mode] / medians["none"] for mode in OVERLAP_MODES},
    }


def _text(report: dict[int, dict[str, Any]]) -> str:
    rows = []
    for tokens, found in report.items():
        for mode in OVERLAP_MODES:
            verdict = "same tokens" if found["same_tokens"] else "DIFFERENT TOKENS"
            cells = (f"{1e3 * found['step_s'][mode]:.1f}", f"{found['ratio'][mode]:.2f}")
            default = "yes" if found["overlaps_by_default"] else "no"
            rows.append((str(tokens), found["rate"], f"{found['sent_bytes']:,}", mode, *cells, default, verdict))
    header = ("tokens a rank", "link", "bytes sent", "overlap", "step ms", "of plain", "on by default", "outputs")
    return "\n".join([machine_line(CPU), "", table(header, rows)])


def _save(args: argparse.Namespace, results: dict[int, Figures]) -> None:
    runs = {
        f"{mode}, {tokens} tokens a rank": figures.spans[mode]
        for tokens, figures in results.items()
        for mode in figures.spans
    }
    if args.trace is not None:
        pathlib.Path(args.trace).write_text(chrome_trace(runs))
    if args.picture is not None:
        save_timeline(args.picture, f"One prefill step, {args.ranks} ranks, dispatcher {args.dispatcher}", runs)
