"""Log-probabilities that the model gives to the tokens of given sequences.

Examples:
  dspark score --input sequences.jsonl
  dspark score --input batch.safetensors --save-logits logits.safetensors --chunk-size 5,1,17
  torchrun --nproc-per-node 2 -m dspark.runtime score --input sequences.jsonl --json

The input is .jsonl with "token_ids" in each line, or .safetensors with "input_ids" [B, L] int64. A sequence's negative
log-likelihood is the sum over its tokens after the first, in nats; its perplexity is exp of the mean.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..cli import running
from ..inputs import check_output, sequences_from_file
from ..logits_file import LogitsFile
from ..progress import Progress, shown
from ..score import score
from ..session import Session
from ..share import from_first, share_json
from .engine_flags import add_model_flags, open_session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's flags."""
    parser.add_argument("--input", required=True, metavar="FILE", help=".jsonl or .safetensors")
    parser.add_argument("--save-logits", metavar="FILE.safetensors", help='"logits" [B, L, V] float32')
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--stepwise", action="store_true", help="one token per step, through the cache")
    steps.add_argument(
        "--chunk-size",
        type=_chunk_sizes,
        default=(512,),
        metavar="N[,N...]",
        help="tokens of a sequence per step; a list gives successive steps, the last repeats (default 512)",
    )
    add_model_flags(parser)
    parser.set_defaults(max_running=8)


def _chunk_sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of at least 1, or several with commas, is expected")
    return sizes


def run(args: argparse.Namespace) -> int:
    """Score; collective over all ranks that were started."""
    chunks = (1,) if args.stepwise else args.chunk_size
    with open_session(args, chunk_size=max(chunks)) as session, contextlib.ExitStack() as stack:
        sequences: list[list[int]] = []
        file: LogitsFile | None = None

        def prepare() -> None:
            nonlocal sequences, file
            sequences = sequences_from_file(args.input, session.vocab_size, session.max_context)
            if args.save_logits is not None:
                check_output("--save-logits", args.save_logits, [args.input])
                lengths = [len(sequence) for sequence in sequences]
                file = stack.enter_context(LogitsFile(args.save_logits, lengths, session.vocab_size))

        from_first(prepare, session.world)
        sequences = share_json(sequences, session.world)
        with running():
            start = time.perf_counter()
            tally = _score(session, sequences, chunks, file)
            if session.is_first:
                _report(tally.results(), time.perf_counter() - start, as_json=args.json)
    return 0


def _score(session: Session, sequences: list[list[int]], chunks: Sequence[int], file: LogitsFile | None) -> Tally:
    if not session.is_first:
        score(session.engine, sequences, chunks, lambda index, start, logits: None)
        return Tally([])
    bar = shown("scoring", sum(map(len, sequences)), "tok")
    try:
        tally = Tally(sequences, file, bar)
        score(session.engine, sequences, chunks, tally.add)
    finally:
        bar.close()
    return tally


class Tally:
    """Adds up negative log-likelihoods as logits come."""

    def __init__(
        self, sequences: list[list[int]], file: LogitsFile | None = None, progress: Progress | None = None
    ) -> None:
        self._sequences, self._file, self._progress = sequences, file, progress
        self._nll = [0.0] * len(sequences)

    def add(self, index: int, start: int, logits: torch.Tensor) -> None:
        """Logits [T, V] of the tokens from ``start`` on; each predicts the token after it."""
        tokens = self._sequences[index][start + 1 : start + 1 + len(logits)]
        law = logits[: len(tokens)].double().log_softmax(dim=-1)
        chosen = law.gather(1, torch.tensor(tokens, dtype=torch.int64, device=law.device)[:, None])
        self._nll[index] -= float(chosen.sum())
        if self._file is not None:
            self._file.write(index, start, logits.float().cpu().numpy())
        if self._progress is not None:
            self._progress.update(len(logits))

    def results(self) -> list[dict[str, Any]]:
        """One object a sequence: tokens, predicted tokens, their NLL in nats, perplexity (null without any)."""
        return [_result(len(tokens), nll) for tokens, nll in zip(self._sequences, self._nll)]


def _result(num_tokens: int, nll: float, num_sequences: int = 1) -> dict[str, Any]:
    predicted = num_tokens - num_sequences
    perplexity = math.exp(min(nll / predicted, 700.0)) if predicted else None
    return {"tokens": num_tokens, "predicted": predicted, "nll": nll, "perplexity": perplexity}


def _report(results: list[dict[str, Any]], seconds: float, *, as_json: bool) -> None:
    num_tokens = sum(result["tokens"] for result in results)
    total = _result(num_tokens, sum(result["nll"] for result in results), len(results))
    if as_json:
        print(json.dumps({"sequences": results, "total": total}), flush=True)
    else:
        print(f"{'sequence':>8} {'tokens':>8} {'nll':>14} {'perplexity':>12}")
        for name, result in [*enumerate(results), ("all", total)]:
            perplexity = "-" if result["perplexity"] is None else f"{result['perplexity']:.4f}"
            print(f"{name:>8} {result['tokens']:>8} {result['nll']:>14.6f} {perplexity:>12}", flush=True)
    print(f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s", file=sys.stderr, flush=True)
