"""Decode prompts; the text appears as it is decoded.

Examples:
  dspark generate --prompt 'def main():' --max-new-tokens 40
  dspark generate --input prompts.jsonl --output results.jsonl --temperature 0.8 --top-p 0.95
  torchrun --nproc-per-node 2 -m dspark.runtime generate --prompt 'Once upon a time'

A line of --input is an object with "prompt" or "token_ids", optionally "id", and the sampling options under their
names with underscores ("max_new_tokens", "temperature", "seed", "stop", "stop_token_ids", ...). A request that cannot
run comes back with finish_reason "error" and the reason; the others run. The status is 2 if none could.

--output grows by a line when a request finishes. After an interruption, the same command with --resume runs those that
are not in it yet; without --resume the file is begun anew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator

from ..arrivals import Timed, poisson_times
from ..cli import EXIT_OK, EXIT_USAGE, running
from ..drive import Collector, admit, drive, in_order
from ..inputs import Inputs, check_output, requests_from_file, requests_from_prompts
from ..job import Job
from ..progress import Progress, shown, silent
from ..report import Summary, output_to_json
from ..request import RequestOutput, SamplingParams
from ..results_file import Earlier, ResultsFile, read_earlier
from ..scheduler import Counts
from ..session import Session
from ..share import from_first, share_requests
from .engine_flags import add_chunk_size, add_model_flags, join_job

log = logging.getLogger(__name__)

_DEFAULT = SamplingParams()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's flags."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    source.add_argument("--input", metavar="FILE.jsonl", help="one request a line")
    parser.add_argument("--output", metavar="FILE.jsonl", help="one result a line, as requests finish")
    parser.add_argument("--resume", action="store_true", help="keep what --output holds, and run the other requests")
    parser.add_argument(
        "--arrival-rate", type=float, metavar="X", help="requests come like Poisson traffic, X a second (seed: --seed)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object (outputs, summary) instead of text")
    _add_sampling_flags(parser)
    add_chunk_size(parser)
    add_model_flags(parser)


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (defaults for requests that do not say)")
    number = {"metavar": "N", "type": int}
    share = {"metavar": "X", "type": float}
    group.add_argument("--max-new-tokens", **number, default=_DEFAULT.max_new_tokens, help="default %(default)s")
    group.add_argument("--temperature", **share, default=_DEFAULT.temperature, help="0 is greedy (the default)")
    group.add_argument("--top-k", **number, default=_DEFAULT.top_k, help="keep the N likeliest; 0 keeps all")
    group.add_argument("--top-p", **share, default=_DEFAULT.top_p, help="keep the likeliest up to this mass")
    group.add_argument("--min-p", **share, default=_DEFAULT.min_p, help="keep those above this share of the likeliest")
    group.add_argument("--repetition-penalty", **share, default=1.0, help="above 1: what was there before is rarer")
    group.add_argument("--presence-penalty", **share, default=0.0, help="off the logits of tokens in the output")
    group.add_argument("--frequency-penalty", **share, default=0.0, help="the same, for each time a token is there")
    group.add_argument(
        "--logit-bias", action="append", default=[], type=_bias, metavar="ID=X", help="added to a logit; repeatable"
    )
    group.add_argument("--min-tokens", **number, default=0, help="no end of sequence or stop id before so many tokens")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends before this text; repeatable")
    group.add_argument("--stop-token-id", action="append", default=[], **number, help="ends after this id; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end of the sequence")
    group.add_argument("--logprobs", **number, help="report each token's log-probability and N alternatives")
    group.add_argument("--show-special-tokens", action="store_true", help="special tokens appear in the text")


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=X; example: 17=-2.5") from None


def _sampling(args: argparse.Namespace) -> SamplingParams:
    """The sampling of requests that say nothing else; raises ``ValueError`` for a value out of range."""
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        stop=tuple(args.stop),
        stop_token_ids=tuple(args.stop_token_id),
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
        skip_special_tokens=not args.show_special_tokens,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        logit_bias=tuple(args.logit_bias),
        min_tokens=args.min_tokens,
    ).validate()


def run(args: argparse.Namespace) -> int:
    """Decode; collective over all ranks that were started."""
    params = _sampling(args)
    if args.resume and args.output is None:
        raise ValueError("--resume continues the file of --output, which is not given")
    with join_job(args) as job, contextlib.ExitStack() as stack:
        inputs, earlier = Inputs(), Earlier({}, 0)

        def prepare() -> int:
            nonlocal inputs, earlier
            inputs = _read(args, job, params)
            if args.output is not None:
                check_output("--output", args.output, [args.input] if args.input else [])
            if args.resume:
                earlier = read_earlier(args.output, inputs.order)
                inputs = _without(inputs, earlier, args.output)
            return len(earlier.prompt_tokens)

        # Before the weights are read: mistakes in small files need not wait for large ones.
        num_earlier = from_first(prepare, job.world)
        session = Session.load(job, shown)
        results: ResultsFile | None = None

        def begin() -> None:
            nonlocal inputs, results
            sizes = (session.vocab_size, session.max_context, session.engine.check_fits)
            inputs = admit(inputs, session.text, *sizes)
            if args.output is not None:
                results = stack.enter_context(ResultsFile(args.output, earlier.num_bytes))

        from_first(begin, job.world)
        requests = share_requests(inputs.requests, job.world)
        status = EXIT_OK if requests or num_earlier else EXIT_USAGE
        times = None if args.arrival_rate is None else poisson_times(len(requests), args.arrival_rate, args.seed)
        with running():
            session.warm_up()
            if not session.is_first:
                for _ in drive(session.engine, requests, None, times and Timed(times, session.world, session.device)):
                    pass
                session.engine.take_counts()
                return status
            if num_earlier:
                log.info("%d results were there before, %d requests are left", num_earlier, len(inputs.order))
            printer = Printer(results, as_json=args.json, alone=len(requests) + len(inputs.refused) == 1)
            start = time.perf_counter()
            outputs = _finish(session, inputs, printer, times)
            seconds = time.perf_counter() - start
            printer.close(in_order(outputs, inputs.order), seconds, session.engine.take_counts())
    return status


def _without(inputs: Inputs, earlier: Earlier, path: str) -> Inputs:
    """The requests that an earlier run left; raises ``ValueError`` for results of other prompts under the same ids."""
    for request in inputs.requests:
        before = earlier.prompt_tokens.get(request.request_id, len(request.prompt_ids))
        if before != len(request.prompt_ids):
            raise ValueError(
                f"{path} has a result of {request.request_id[:80]!r} for a prompt of {before} tokens, but it has "
                f"{len(request.prompt_ids)} now; resume with the input it was made from"
            )
    return Inputs(
        tuple(one for one in inputs.requests if one.request_id not in earlier.prompt_tokens),
        tuple(one for one in inputs.refused if one.request_id not in earlier.prompt_tokens),
        tuple(one for one in inputs.order if one not in earlier.prompt_tokens),
    )


def _read(args: argparse.Namespace, job: Job, params: SamplingParams) -> Inputs:
    if args.prompt is not None:
        return requests_from_prompts(args.prompt, params, job.encode)
    return requests_from_file(args.input, params, job.encode)


def _finish(session: Session, inputs: Inputs, printer: Printer, times: list[float] | None) -> list[RequestOutput]:
    """Run all requests on the first rank, as they come, showing what comes back; the results as they finished."""
    outputs = list(inputs.refused)
    for output in outputs:
        printer.finished(output)
    collector = Collector(inputs.requests)

    def on_come(index: int, at: float) -> None:
        collector.came(inputs.requests[index].request_id, at)

    arrivals = times and Timed(times, session.world, session.device, on_come)
    driven = contextlib.closing(drive(session.engine, inputs.requests, session.text, arrivals))
    with _bar(len(inputs.requests), printer.alone) as bar, driven as events:
        for event in events:
            printer.streamed(event.text)
            output = collector.push(event)
            if output is not None:
                outputs.append(output)
                printer.finished(output)
                bar.update(1)
    return outputs


@contextlib.contextmanager
def _bar(total: int, alone: bool) -> Iterator[Progress]:
    bar = (silent if alone else shown)("requests", total, "req")
    try:
        yield bar
    finally:
        bar.close()


class Printer:
    """Shows text and results: one request streams, several are printed as they finish, errors go to stderr."""

    def __init__(self, sink: ResultsFile | None, *, as_json: bool, alone: bool) -> None:
        self._sink, self._as_json, self.alone = sink, as_json, alone

    def streamed(self, text: str) -> None:
        """Characters of one of the requests, just decoded."""
        if self.alone and not self._as_json and text:
            sys.stdout.write(text)
            sys.stdout.flush()

    def finished(self, output: RequestOutput) -> None:
        """A request came to its end."""
        if self._sink is not None:
            self._sink.write(output_to_json(output))
        if output.error is not None:
            print(f"request {output.request_id}: {output.error}", file=sys.stderr, flush=True)
        elif self.alone and not self._as_json:
            print(flush=True)
        elif not self._as_json and self._sink is None:
            print(f"[{output.request_id}] {output.text}", flush=True)

    def close(self, outputs: list[RequestOutput], seconds: float, counts: Counts) -> None:
        """All requests came to their ends: the summary."""
        summary = Summary.of(outputs, seconds, counts)
        if self._as_json:
            result = {"outputs": [output_to_json(output) for output in outputs], "summary": summary.to_json()}
            print(json.dumps(result, ensure_ascii=False), flush=True)
        for line in summary.lines():
            print(line, file=sys.stderr, flush=True)
