"""How many drafted tokens the target keeps: by domain, temperature and place in the block, for one draft or several.

Examples:
  dspark bench accept
  dspark bench accept --model TARGET --draft eagle=DIR,eagle=DIR@dynamic --tree-nodes 24 --tree-topk 4
  dspark bench accept --draft dspark,dflash=drafts/dflash,mtp=drafts/mtp --prompts math.jsonl code.jsonl
  dspark bench accept --draft dspark --gamma 4 --temperature 0.7 --json

Every draft of a block is verified (--verify static), so acceptance does not depend on a schedule. A draft is NAME, for
the checkpoint --model, or NAME=DIR: a checkpoint that holds the same target with a draft of its own, or the folder of a
draft by itself, as --draft-model takes it. NAME=DIR@dynamic or @static proposes trees, as --tree does. All propose
blocks, or paths of trees, of one length. The first draft is compared with the
others. Without speculation every step emits one token, which is the baseline of the accepted length. Greedy tokens must
not depend on the draft: where they do, that is said and the exit status is 1.

Besides what is kept, the run is timed: T_draft, T_verify and T_1 (a step without a draft) give the speed-up.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..cli import EXIT_FAILED, EXIT_OK, running
from ..drive import drive
from ..progress import shown
from ..request import Request, SamplingParams
from ..session import Session
from ..spec.stats import SpecStats
from ..spec.sts import CalibrationSamples, fit, report
from ..verbs.engine_flags import add_tree_sizes
from . import flags
from .accept_drafts import common_gamma, draft_specs
from .accept_picture import save_acceptance
from .cost import StepTimes, cost_model, cost_rows
from .domains import DOMAINS
from .machine import Setting, machine_line
from .prompts import prompts_from_file
from .table import table

ALL = "all"
"""The domain that stands for all of them together."""


class Place(NamedTuple):
    """Where figures belong."""

    domain: str
    temperature: float

    def __str__(self) -> str:
        return f"{self.domain}@{self.temperature:g}"


class Measured(NamedTuple):
    """What became of the blocks of one draft in one place; ``samples`` if the draft has confidences; greedy ``ids``."""

    stats: SpecStats
    samples: CalibrationSamples | None
    ids: list[tuple[int, ...]]

    @classmethod
    def together(cls, parts: Sequence[Measured]) -> Measured:
        """The sum of several."""
        stats = SpecStats(parts[0].stats.gamma)
        for part in parts:
            stats.add(part.stats)
        found = [part.samples for part in parts if part.samples is not None]
        return cls(stats, CalibrationSamples.concatenate(found) if found else None, sum((p.ids for p in parts), []))


Results = Mapping[str, Mapping[Place, Measured]]
"""By label of the draft."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--draft",
        default="auto",
        metavar="NAME[=DIR][@TREE],...",
        help="drafts to measure, the one of interest first (default: the checkpoint's); @dynamic, @static: as trees",
    )
    parser.add_argument(
        "--gamma", type=flags.at_least_one, metavar="N", help="drafts a block or path (default: what all reach)"
    )
    add_tree_sizes(parser)
    parser.add_argument(
        "--prompts",
        nargs="+",
        metavar="FILE.jsonl",
        help='a file a domain, lines with "prompt" or "token_ids" (default: built-in texts by domain)',
    )
    parser.add_argument("--num-prompts", type=flags.at_least_one, metavar="N", help="of each domain (default: all)")
    parser.add_argument(
        "--temperature", type=temperatures, default=(0.0, 1.0), metavar="X[,X...]", help="of sampling (default 0,1)"
    )
    parser.add_argument(
        "--max-new-tokens", type=flags.at_least_one, default=64, metavar="N", help="of each prompt (default 64)"
    )
    parser.add_argument(
        "--max-running", type=flags.at_least_one, default=16, metavar="N", help="prompts at a time (default 16)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling (default 0)")
    parser.add_argument(
        "--deterministic", action="store_true", help="kernels whose results do not depend on batch composition"
    )
    flags.add_bench_flags(parser)


def temperatures(text: str) -> tuple[float, ...]:
    """An argument that is one or several different temperatures, with commas."""
    try:
        values = tuple(SamplingParams(temperature=float(part)).validate().temperature for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if len(set(values)) != len(values):
        raise argparse.ArgumentTypeError(f"{text!r} names a temperature twice")
    return values


def run(args: argparse.Namespace) -> int:
    """Measure and print; raises ``ValueError`` for drafts that cannot be compared or prompts that do not fit."""
    flags.check_output(args)
    folder, config = flags.model_of(args)
    specs = draft_specs(args.draft, folder, config)
    gamma = common_gamma(args.gamma, specs)
    results: dict[str, dict[Place, Measured]] = {}
    costs: dict[str, dict[str, float | None]] = {}
    plain = plain_times(args)
    for spec in specs:
        options = {"draft": spec.name, "gamma": gamma, "max_running": args.max_running, "seed": args.seed}
        options |= {"draft_model": spec.draft_model, "tree": spec.tree}
        if spec.tree != "none":
            options |= {"tree_nodes": args.tree_nodes, "tree_topk": args.tree_topk}
        own = argparse.Namespace(**vars(args) | {"model": str(spec.folder)})
        with flags.open_alone(own, **options) as session:
            prompts = _prompts(args, session)
            with running():
                times = StepTimes(session.engine)
                results[spec.label] = measure(session, spec.label, prompts, args.temperature, args.max_new_tokens)
                all_stats = Measured.together(_last_of_each(results[spec.label])).stats
                costs[spec.label] = cost_model(times, plain, all_stats)
            machine = machine_line(session.process.device)
    counts = ", ".join(f"{len(ids)} {domain}" for domain, ids in prompts.items())
    how = f"{counts} prompts, at most {args.max_new_tokens} new tokens each, blocks of {gamma} drafts, all verified"
    subject = f"drafts {', '.join(results)} of {folder.name}"
    setting = Setting(subject, "no draft: accepted length 1", how, torch.get_num_threads(), machine)
    differing = differing_ids(results)
    show(args, setting, results, costs, gamma, differing)
    return EXIT_FAILED if differing else EXIT_OK


def plain_times(args: argparse.Namespace) -> StepTimes:
    """Steps without a draft on the same prompts, at the first temperature."""
    with flags.open_alone(args, draft="none", max_running=args.max_running, seed=args.seed) as session:
        prompts = _prompts(args, session)
        with running():
            times = StepTimes(session.engine)
            measure(session, "none", prompts, args.temperature[:1], args.max_new_tokens)
    return times


def _prompts(args: argparse.Namespace, session: Session) -> dict[str, list[tuple[int, ...]]]:
    """As many of each domain as are asked for."""
    read = prompts_by_domain(session, args.prompts, args.max_new_tokens)
    return {domain: list(ids[: args.num_prompts]) for domain, ids in read.items()}


def _last_of_each(places: Mapping[Place, Measured]) -> list[Measured]:
    """Those of single domains, or of all where there is one."""
    single = [measured for place, measured in places.items() if place.domain != ALL]
    return single or list(places.values())


def prompts_by_domain(
    session: Session, files: Sequence[str] | None, max_new_tokens: int
) -> dict[str, Sequence[tuple[int, ...]]]:
    """Prompt ids by domain: of the files, called by their names, or built in. Raises ``ValueError`` where they and
    ``max_new_tokens`` more do not fit."""
    if files:
        encode = session.encode if session.tokenizer is not None else None
        names = [pathlib.Path(path).name.removesuffix(".jsonl") for path in files]
        if len(set(names)) < len(names) or ALL in names:
            raise ValueError(f"--prompts: the files are called by their names, which must differ: {', '.join(names)}")
        read = {n: prompts_from_file(p, encode, session.vocab_size).ids for n, p in zip(names, files)}
    else:
        read = {domain: tuple(map(session.encode, texts)) for domain, texts in DOMAINS.items()}
    room = session.max_context - max_new_tokens
    for domain, prompts in read.items():
        longest = max(map(len, prompts))
        if longest > room:
            raise ValueError(
                f"a prompt of {domain} has {longest} tokens, but {session.max_context} positions less "
                f"{max_new_tokens} new tokens leave {room}"
            )
    return read


def measure(
    session: Session,
    label: str,
    prompts: Mapping[str, Sequence[tuple[int, ...]]],
    at: Sequence[float],
    max_new_tokens: int,
) -> dict[Place, Measured]:
    """Decode all prompts at all temperatures ``at``; each domain, and all together."""
    found: dict[Place, Measured] = {}
    bar = shown(f"draft {label}", len(at) * sum(map(len, prompts.values())), "prompt")
    try:
        for temperature in at:
            params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature)
            for domain, prompt_ids in prompts.items():
                requests = [Request(f"{domain}/{i}", ids, params, i) for i, ids in enumerate(prompt_ids)]
                found[Place(domain, temperature)] = decode(session, requests)
                bar.update(len(requests))
            if len(prompts) > 1:
                parts = [found[Place(domain, temperature)] for domain in prompts]
                found[Place(ALL, temperature)] = Measured.together(parts)
    finally:
        bar.close()
    return found


def decode(session: Session, requests: Sequence[Request]) -> Measured:
    """Run ``requests`` together and keep the books of their blocks."""
    engine = session.engine
    gamma = engine.drafter.gamma
    stats, parts, is_tree = SpecStats(gamma), [], engine.drafter.tree is not None

    def record(logits: np.ndarray | None, lens: np.ndarray, accepted: np.ndarray, emitted: np.ndarray) -> None:
        for length, kept, count in zip(lens.tolist(), accepted.tolist(), emitted.tolist()):
            stats.add_step(gamma if length and not is_tree else length, length, min(kept, count), count)
        if logits is not None:
            whole = lens == gamma
            parts.append(CalibrationSamples.from_blocks(logits[whole], accepted[whole], emitted[whole]))

    engine.record(record)
    ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for event in drive(engine, requests, None):
        ids[event.request_id] += event.token_ids
    engine.record(None)
    return Measured(stats, CalibrationSamples.concatenate(parts) if parts else None, list(map(tuple, ids.values())))


def differing_ids(results: Results) -> list[str]:
    """Where greedy tokens depend on the draft, in words; empty as it should be."""
    first, *others = results
    return [
        f"{place}: greedy tokens with {other} are not those with {first}"
        for other in others
        for place, measured in results[other].items()
        if place.temperature == 0 and measured.ids != results[first][place].ids
    ]


def figures(measured: Measured) -> dict[str, object]:
    """JSON-ready figures of one draft in one place."""
    stats = measured.stats
    result: dict[str, object] = {name: v for name, v in stats.fields().items() if name != "accept_histogram"}
    if stats.verify_ct == 0:  # everything ended with its first token
        result["accept_length"] = None
    result["accept_length_error"] = length_error(stats)
    result["emitted"] = stats.emitted
    result["verified_per_emitted"] = stats.verified / stats.emitted if stats.emitted else None
    result["conditional_acceptance"] = [None if math.isnan(x) else x for x in stats.conditional_acceptance()]
    result["accept_histogram"] = list(stats.histogram)
    if measured.samples is not None and len(measured.samples.logits):
        calibration = report(measured.samples)
        result["ece"] = calibration["ece"]
        result["auroc"] = [None if math.isnan(x) else x for x in calibration["auroc"]]
        result["sts"] = temperature_scaling(measured.samples)
    return result


def length_error(stats: SpecStats) -> float | None:
    """One standard error of the accepted length, from the spread of the kept drafts over blocks."""
    count = stats.verify_ct
    if count < 2:
        return None
    kept = np.repeat(np.arange(len(stats.histogram)), stats.histogram)
    return float(kept.std(ddof=1) / math.sqrt(count))


def temperature_scaling(samples: CalibrationSamples) -> dict[str, list[float]] | None:
    """Calibration error by place of every other block, before and after temperatures fitted on the rest; None if there
    are too few blocks."""
    half, rest = (CalibrationSamples(*(x[i::2] for x in vars(samples).values())) for i in (0, 1))
    if not (half.valid.any(axis=0).all() and rest.valid.any(axis=0).all()):
        return None
    fitted = fit(half).temperatures
    return {
        "temperatures": fitted.tolist(),
        "ece_before": report(rest)["ece"],
        "ece_after": report(rest, fitted)["ece"],
    }


def gains(results: Results) -> dict[str, dict[str, float]]:
    """By other draft and place: the first draft's accepted length over the other's, less 1."""
    first, *others = results
    return {
        other: {
            str(place): mine.stats.fields()["accept_length"] / theirs.stats.fields()["accept_length"] - 1
            for (place, mine), theirs in zip(results[first].items(), results[other].values())
            if mine.stats.verify_ct and theirs.stats.verify_ct
        }
        for other in others
    }


def show(
    args: argparse.Namespace,
    setting: Setting,
    results: Results,
    costs: Mapping[str, Mapping[str, float | None]],
    gamma: int,
    differing: Sequence[str],
) -> None:
    """Print tables or JSON, and draw the picture if one is wanted."""
    found = {label: {str(place): figures(m) for place, m in places.items()} for label, places in results.items()}
    if args.json:
        print(
            json.dumps(
                {
                    "gamma": gamma,
                    "drafts": found,
                    "gain": gains(results),
                    "cost": costs,
                    "greedy_ids_equal": not differing,
                    "setting": setting.to_json(),
                }
            )
        )
    else:
        print("\n".join([*setting.lines(), *_tables(found, gains(results), gamma), *_costs(costs), *differing]))
    if args.picture:
        save_acceptance(args.picture, found, costs, gamma, "\n".join(setting.lines()))


def _costs(costs: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    return [
        "",
        "cost: T_draft, T_verify of a step, T_1 of a step without a draft; speed-up = tau T_1 / (T_draft + T_verify);",
        "alpha: how often a draft is kept when all before it were; c = T_draft / (gamma T_1)",
        table(*cost_rows(costs)),
    ]


def _tables(found: Mapping[str, Mapping[str, dict]], gain: Mapping[str, Mapping[str, float]], gamma: int) -> list[str]:
    first = next(iter(found))
    head = ("where", "draft", "accepted length", "+-", f"gain of {first}", "drafted", "verified", "accepted")
    lengths, places = [], []
    for where in found[first]:
        for label, of_draft in found.items():
            v = of_draft[where]
            over = gain.get(label, {}).get(where)
            cells = (_number(v["accept_length"], "{:.3f}"), _number(v["accept_length_error"], "{:.3f}"))
            counts = (str(v["drafted"]), str(v["verified"]), str(v["accepted"]))
            lengths.append((where, label, *cells, _number(over, "{:+.1%}"), *counts))
            lengths[-1] += (_number(v["verified_per_emitted"], "{:.2f}"),)
            places.append((where, label, "kept", *(_number(x, "{:.3f}") for x in v["conditional_acceptance"])))
            if "ece" in v:
                places.append((where, label, "ECE", *(_number(x, "{:.2%}") for x in v["ece"])))
            if v.get("sts"):
                for name, key in (("ECE of half", "ece_before"), ("behind STS", "ece_after")):
                    places.append((where, label, name, *(_number(x, "{:.2%}") for x in v["sts"][key])))
    by_place = ("where", "draft", "", *(f"x_{k + 1}" for k in range(gamma)))
    return [
        "",
        table((*head, "verified a token"), lengths),
        "",
        "by place: how often a draft is kept when all before it were; the calibration error of the estimated survival,",
        "and that of half the blocks before and behind temperatures that were fitted on the others",
        table(by_place, places),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
