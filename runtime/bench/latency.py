"""Latencies of requests under load, by the names that serving benchmarks use.

TTFT: from a request's arrival to its first token; TPOT: its time after that per further token; ITL: from one step that
gave it tokens to the next; E2E: from arrival to its last token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..request import Request, TokenEvent

PERCENTILES = (90, 95, 99)
FIGURES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-Token Latency",
    "e2el": "End-to-End Latency",
}


class Latencies(NamedTuple):
    """A served load. ``values``: seconds by the names of ``FIGURES``. ``tokens_per_step``: emitted per verify step of
    drafted requests, the extra token included; None without a draft."""

    num_requests: int
    num_prompt_tokens: int
    num_new_tokens: int
    seconds: float
    values: dict[str, list[float]]
    tokens_per_step: float | None

    def to_json(self) -> dict[str, float]:
        """Figures with units in their names: ``mean_ttft_ms``, ``median_ttft_ms``, ``p90_ttft_ms``, ..."""
        result: dict[str, float] = {
            "completed": self.num_requests,
            "duration": self.seconds,
            "total_input_tokens": self.num_prompt_tokens,
            "total_output_tokens": self.num_new_tokens,
            "request_throughput": self.num_requests / self.seconds,
            "input_throughput": self.num_prompt_tokens / self.seconds,
            "output_throughput": self.num_new_tokens / self.seconds,
            "concurrency": sum(self.values["e2el"]) / self.seconds,
        }
        if self.tokens_per_step is not None:
            result["accept_length"] = self.tokens_per_step
        for name, values in self.values.items():
            result |= {f"{kind}_{name}_ms": 1000 * value for kind, value in spread(values).items()}
        result["max_itl_ms"] = 1000 * max(self.values["itl"], default=0.0)
        return result

    def lines(self) -> list[str]:
        """The block that serving benchmarks print."""
        v = self.to_json()
        lines = [
            f"Successful requests:            {v['completed']}",
            f"Benchmark duration (s):         {v['duration']:.2f}",
            f"Total input tokens:             {v['total_input_tokens']}",
            f"Total generated tokens:         {v['total_output_tokens']}",
            f"Request throughput (req/s):     {v['request_throughput']:.2f}",
            f"Input token throughput (tok/s): {v['input_throughput']:.2f}",
            f"Output token throughput (tok/s): {v['output_throughput']:.2f}",
            f"Concurrency:                    {v['concurrency']:.2f}",
        ]
        if self.tokens_per_step is not None:
            lines.append(f"Accept length:                  {v['accept_length']:.2f}")
        for name, title in FIGURES.items():
            kinds = ("mean", "median", *(f"p{p}" for p in PERCENTILES))
            short = name.upper().removesuffix("L") if name == "e2el" else name.upper()
            cells = ", ".join(f"{kind} {v[f'{kind}_{name}_ms']:.1f}" for kind in kinds)
            lines.append(f"{title}, {short} (ms): {cells}")
        return [*lines, f"Max ITL (ms): {v['max_itl_ms']:.1f}"]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, median and percentiles (linear between neighbours); zeros without values."""
    if not values:
        values = [0.0]
    found = {"mean": statistics.fmean(values), "median": statistics.median(values)}
    return found | {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


class LatencyLog:
    """When requests came and when they got how many tokens."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now = clock
        self.stamps: dict[str, list[tuple[float, int]]] = {}
        self.tokens: dict[str, list[int]] = {}
        self._came: dict[str, float] = {}
        self._num_prompt = 0
        self._steps: list[tuple[int, float]] = []

    def came(self, request: Request, at: float | None = None) -> None:
        """A request came, now or ``at`` that time of the clock."""
        self._came[request.request_id] = self.now() if at is None else at
        self.stamps[request.request_id], self.tokens[request.request_id] = [], []
        self._num_prompt += len(request.prompt_ids)

    def push(self, event: TokenEvent) -> None:
        """A request got tokens."""
        if event.token_ids:
            self.stamps[event.request_id].append((self.now(), len(event.token_ids)))
            self.tokens[event.request_id] += event.token_ids
        if event.spec is not None:
            self._steps.append((event.spec["verify_ct"], event.spec["accept_length"]))

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(stamps[-1][0] for stamps in self.stamps.values()) - min(self._came.values())

    @property
    def tokens_per_s(self) -> float:
        """New tokens over the whole time."""
        return sum(len(ids) for ids in self.tokens.values()) / self.seconds

    def summary(self) -> Latencies:
        """The latencies of all requests, which have ended."""
        values: dict[str, list[float]] = {name: [] for name in FIGURES}
        for name, stamps in self.stamps.items():
            first, last, count = stamps[0][0], stamps[-1][0], len(self.tokens[name])
            values["ttft"].append(first - self._came[name])
            values["e2el"].append(last - self._came[name])
            if count > stamps[0][1]:
                values["tpot"].append((last - first) / (count - stamps[0][1]))
            values["itl"] += [b[0] - a[0] for a, b in zip(stamps, stamps[1:])]
        num_steps = sum(count for count, _ in self._steps)
        emitted = sum(count * length for count, length in self._steps)
        num_new = sum(len(ids) for ids in self.tokens.values())
        per_step = emitted / num_steps if num_steps else None
        return Latencies(len(self.tokens), self._num_prompt, num_new, self.seconds, values, per_step)
