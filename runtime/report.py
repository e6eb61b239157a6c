"""What a run of requests amounted to: JSON of one result, and the summary of all."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from .request import RequestOutput, TokenLogprob
from .scheduler import Counts


def output_to_json(output: RequestOutput) -> dict[str, Any]:
    """One result as a JSON object: ``id, prompt_tokens, token_ids, text, finish_reason, logprobs?, spec?, error?``."""
    result: dict[str, Any] = {
        "id": output.request_id,
        "prompt_tokens": len(output.prompt_ids),
        "token_ids": list(output.token_ids),
        "text": output.text,
        "finish_reason": output.finish_reason,
    }
    if output.logprobs:
        result["logprobs"] = [_logprob_to_json(entry) for entry in output.logprobs]
    if output.spec is not None:
        result["spec"] = output.spec
    if output.error is not None:
        result["error"] = output.error
    return result


def _logprob_to_json(entry: TokenLogprob) -> dict[str, Any]:
    return {"token_id": entry.token_id, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}


class Spread(NamedTuple):
    """Mean, median and 99th percentile of some figures."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """``None`` without values. Percentiles are nearest-rank."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(statistics.fmean(ordered), ordered[(len(ordered) - 1) // 2], ordered[(99 * len(ordered) - 1) // 100])

    def to_json(self) -> dict[str, float]:
        """The three figures by name."""
        return self._asdict()


class SpecTotals(NamedTuple):
    """What became of all drafts of a run; ``num_tokens`` were emitted in ``num_steps`` verify steps."""

    num_steps: int
    num_tokens: float
    drafted: int
    verified: int
    accepted: int

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> SpecTotals | None:
        """The totals of ``outputs``; ``None`` where nothing was drafted for."""
        fields = [output.spec for output in outputs if output.spec is not None and output.spec["verify_ct"]]
        if not fields:
            return None
        counts = [sum(spec[name] for spec in fields) for name in ("drafted", "verified", "accepted")]
        num_tokens = sum(spec["accept_length"] * spec["verify_ct"] for spec in fields)
        return cls(sum(spec["verify_ct"] for spec in fields), num_tokens, *counts)

    @property
    def accept_length(self) -> float:
        """Tokens per verify step, the target's own included."""
        return self.num_tokens / self.num_steps

    def to_json(self) -> dict[str, float]:
        """The fields that a request's ``spec`` has, over all requests."""
        return {
            "verify_ct": self.num_steps,
            "accept_length": self.accept_length,
            "accept_rate": self.accepted / self.verified if self.verified else 0.0,
            "drafted": self.drafted,
            "verified": self.verified,
            "accepted": self.accepted,
        }

    def line(self) -> str:
        """The totals for people."""
        return (
            f"speculation: {self.accept_length:.2f} tokens per verify step; of {self.drafted} drafted tokens "
            f"{self.verified} were verified and {self.accepted} accepted"
        )


class Summary(NamedTuple):
    """A finished run; times in seconds. Per-token latency of a request is its time after the first token per token."""

    num_requests: int
    finish_reasons: dict[str, int]
    num_prompt_tokens: int
    num_new_tokens: int
    seconds: float
    time_to_first_token: Spread | None
    time_per_token: Spread | None
    spec: SpecTotals | None
    counts: Counts

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput], seconds: float, counts: Counts) -> Summary:
        """The summary of ``outputs``, which took ``seconds`` altogether and the scheduler's ``counts``."""
        ran = [output for output in outputs if output.time_to_first_token is not None]
        return cls(
            num_requests=len(outputs),
            finish_reasons=dict(sorted(Counter(output.finish_reason for output in outputs).items())),
            num_prompt_tokens=sum(len(output.prompt_ids) for output in ran),
            num_new_tokens=sum(len(output.token_ids) for output in ran),
            seconds=seconds,
            time_to_first_token=Spread.of([output.time_to_first_token for output in ran]),
            time_per_token=Spread.of(
                [
                    (output.time_total - output.time_to_first_token) / (len(output.token_ids) - 1)
                    for output in ran
                    if len(output.token_ids) > 1
                ]
            ),
            spec=SpecTotals.of(outputs),
            counts=counts,
        )

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all requests together per second of the run, prompts included in its time."""
        return self.num_new_tokens / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """The figures with units in their names."""
        return {
            "requests": self.num_requests,
            "finish_reasons": self.finish_reasons,
            "prompt_tokens": self.num_prompt_tokens,
            "new_tokens": self.num_new_tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "time_to_first_token_s": self.time_to_first_token and self.time_to_first_token.to_json(),
            "time_per_token_s": self.time_per_token and self.time_per_token.to_json(),
            "spec": self.spec and self.spec.to_json(),
            "scheduler": dataclasses.asdict(self.counts),
        }

    def lines(self) -> list[str]:
        """The summary for people."""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.finish_reasons.items())
        lines = [
            f"{self.num_requests} requests ({reasons}): {self.num_prompt_tokens} prompt tokens, "
            f"{self.num_new_tokens} new tokens in {self.seconds:.2f} s, {self.tokens_per_s:.1f} tokens/s"
        ]
        for name, spread in (
            ("time to first token", self.time_to_first_token),
            ("time per token", self.time_per_token),
        ):
            if spread is not None:
                mean, median, high = (f"{1000 * value:.1f} ms" for value in spread)
                lines.append(f"{name}: mean {mean}, median {median}, 99th percentile {high}")
        if self.spec is not None:
            lines.append(self.spec.line())
        return lines + self.counts.lines()
