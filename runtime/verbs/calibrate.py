"""Fit the temperatures that make a draft's confidences mean what they say, for --sts.

Examples:
  dspark calibrate --input prompts.jsonl --output sts.json
  dspark calibrate --input prompts.jsonl --output sts.json --picture reliability.png --temperature 1

Decodes the prompts with every draft verified, then fits one temperature a place, left to right, so that the estimated
survival of drafts 1..k agrees with how often they survived. Half of the blocks are held out; the errors shown, before
and after, are those of that half.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

import numpy as np

from ..bench.picture import check_picture, save_reliability
from ..bench.table import table
from ..cli import EXIT_OK, running
from ..drive import admit, drive
from ..inputs import Inputs, check_output, requests_from_file
from ..request import Request, SamplingParams
from ..session import Session
from ..share import from_first, share_requests
from ..spec.schedule import StaticPolicy
from ..spec.sts import CalibrationSamples, StsFit, fit, report
from .engine_flags import add_model_flags, open_session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's flags."""
    parser.add_argument("--input", required=True, metavar="FILE.jsonl", action="append", help="prompts; repeatable")
    parser.add_argument("--output", metavar="FILE.json", help="write the temperatures here (default: print them)")
    parser.add_argument("--picture", metavar="FILE.png", help="reliability before and after (needs matplotlib)")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="tokens per prompt (default 96)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="of sampling (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object with all figures")
    add_model_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Decode and fit; collective over all ranks that were started."""
    check_picture(args.picture)
    params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature).validate()
    with open_session(args, verify="static", confidence_threshold=None) as session:
        sizes = session.groups.topology.sizes
        if sizes["dp"] > 1 or sizes["pp"] > 1:
            raise ValueError(
                f"calibrate needs --dp 1 and --pp 1, not {sizes['dp']} and {sizes['pp']}; use --tp or --cp"
            )
        requests = read_prompts(session, args, params)
        with running():
            samples = collect(session, requests)
        if not session.is_first:
            return EXIT_OK
        if samples is None:
            raise ValueError("the draft has no confidence head (or there is no draft): nothing to calibrate")
        train, held_out = halves(samples)
        fitted = fit(train, dataset=",".join(args.input))
        figures = {
            "fit": fitted.to_json(),
            "held_out_before": report(held_out),
            "held_out_after": report(held_out, fitted.temperatures),
        }
        _show(args, fitted, figures)
    return EXIT_OK


def read_prompts(session: Session, args: argparse.Namespace, params: SamplingParams) -> list[Request]:
    """The prompts of all input files on every rank, with ids of file and line. Collective over the job.

    Raises ``ValueError`` for a line that cannot run, and for an output that cannot be written.
    """
    inputs = Inputs()

    def prepare() -> None:
        nonlocal inputs
        if args.output is not None:
            check_output("--output", args.output, args.input)
        found: list[Request] = []
        for number, path in enumerate(args.input):
            read = requests_from_file(path, params, session.encode)
            if read.refused:
                raise ValueError(read.refused[0].error)
            found += [dataclasses.replace(r, request_id=f"{number}/{r.request_id}") for r in read.requests]
        sizes = (session.vocab_size, session.max_context, session.engine.check_fits)
        inputs = admit(Inputs(tuple(found)), session.text, *sizes)
        if inputs.refused:
            raise ValueError(inputs.refused[0].error)

    from_first(prepare, session.world)
    return share_requests(inputs.requests, session.world)


def collect(session: Session, requests: list[Request]) -> CalibrationSamples | None:
    """Confidence logits and outcomes of every block while ``requests`` are decoded, on the first rank.

    Collective over the job.
    """
    parts: list[CalibrationSamples] = []

    def record(logits: np.ndarray | None, lens: np.ndarray, accepted: np.ndarray, emitted: np.ndarray) -> None:
        if logits is None:
            return
        whole = lens == logits.shape[1]
        parts.append(CalibrationSamples.from_blocks(logits[whole], accepted[whole], emitted[whole]))

    session.engine.set_policy(StaticPolicy())
    session.engine.record(record)
    for _ in drive(session.engine, requests, session.text):
        pass
    session.engine.record(None)
    return CalibrationSamples.concatenate(parts) if parts else None


def halves(samples: CalibrationSamples) -> tuple[CalibrationSamples, CalibrationSamples]:
    """Every other block, so that both halves hold all prompts."""
    return tuple(
        CalibrationSamples(samples.logits[start::2], samples.kept[start::2], samples.valid[start::2])
        for start in (0, 1)
    )


def _show(args: argparse.Namespace, fitted: StsFit, figures: dict[str, dict]) -> None:
    if args.output:
        fitted.save(args.output)
    before, after = figures["held_out_before"], figures["held_out_after"]
    if args.json:
        print(json.dumps(figures))
    elif not args.output:
        print(json.dumps(fitted.to_json()))
    else:
        header = ["place", "temperature", "ECE before", "ECE after", "AUROC", "blocks"]
        rows = [
            [
                str(k + 1),
                f"{fitted.temperatures[k]:.3f}",
                f"{100 * before['ece'][k]:.2f} %",
                f"{100 * after['ece'][k]:.2f} %",
                f"{after['auroc'][k]:.3f}",
                str(after["samples"][k]),
            ]
            for k in range(len(fitted.temperatures))
        ]
        print("held-out half:")
        print(table(header, rows))
    if args.picture:
        save_reliability(args.picture, before["diagram"], after["diagram"])
