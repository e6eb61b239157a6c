"""What a draft costs and brings: the time of drafting and verifying in a run, against steps without a draft.

Names: T_draft seconds of drafting a block for all requests of a step (with what it learns from the step before),
T_verify seconds of the target's forward over the block, T_1 seconds of its forward over one token a request, τ emitted
tokens a request and step, γ drafts a block. Speed-up = τ T_1 / (T_draft + T_verify). α: how often a draft is kept when
all before it were; c = T_draft / (γ T_1), a draft's cost in target steps. Where drafts are drawn one after the other,
none pays unless α > c.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..engine import Engine
from ..spec.stats import SpecStats
from ..step import Step


class StepTimes:
    """Times the decode steps of ``engine`` from now on; steps with prefill rows are left out."""

    def __init__(self, engine: Engine) -> None:
        self.num_steps, self.verify, self.draft = 0, 0.0, 0.0
        self._device = engine.cache.page_table.device
        run_stage, drafter = engine.model.run_stage, engine.drafter
        propose, observe = drafter.propose, drafter.observe

        def timed_stage(steps: tuple[Step, ...], *rest: Any) -> Any:
            output, seconds = self._timed(run_stage, steps, *rest)
            if all(step.num_logits == len(step.tokens) for step in steps):
                self.num_steps, self.verify = self.num_steps + 1, self.verify + seconds
            return output

        def timed_observe(taps: torch.Tensor, step: Step) -> None:
            _, seconds = self._timed(observe, taps, step)
            if step.num_logits == len(step.tokens):
                self.draft += seconds

        def timed_propose(*rest: Any) -> Any:
            block, seconds = self._timed(propose, *rest)
            self.draft += seconds
            return block

        engine.model.run_stage, drafter.observe, drafter.propose = timed_stage, timed_observe, timed_propose

    def _timed(self, work: Callable[..., Any], *args: Any) -> tuple[Any, float]:
        self._wait()
        start = time.perf_counter()
        result = work(*args)
        self._wait()
        return result, time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def cost_model(times: StepTimes, plain: StepTimes, stats: SpecStats) -> dict[str, float | None]:
    """The figures of one draft: milliseconds, τ, the speed-up, α and c; None where there was nothing to measure."""
    if not (times.num_steps and plain.num_steps and stats.verify_ct):
        return dict.fromkeys(("draft_ms", "verify_ms", "plain_ms", "tau", "speedup", "alpha", "c"))
    draft, verify = times.draft / times.num_steps, times.verify / times.num_steps
    one, tau = plain.verify / plain.num_steps, stats.emitted / stats.verify_ct
    kept, judged = sum(stats.kept), sum(stats.judged)
    return {
        "draft_ms": 1e3 * draft,
        "verify_ms": 1e3 * verify,
        "plain_ms": 1e3 * one,
        "tau": tau,
        "speedup": tau * one / (draft + verify),
        "alpha": kept / judged if judged else None,
        "c": draft / (stats.gamma * one),
    }


COLUMNS = {
    "draft_ms": ("T_draft ms", "{:.2f}"),
    "verify_ms": ("T_verify ms", "{:.2f}"),
    "plain_ms": ("T_1 ms", "{:.2f}"),
    "tau": ("tau", "{:.2f}"),
    "speedup": ("speed-up", "{:.2f}"),
    "alpha": ("alpha", "{:.2f}"),
    "c": ("c", "{:.2f}"),
}


def cost_rows(costs: Mapping[str, Mapping[str, float | None]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of the table of all drafts."""
    head = ("draft", *(name for name, _ in COLUMNS.values()))
    rows = [
        (label, *("-" if cost[key] is None else shape.format(cost[key]) for key, (_, shape) in COLUMNS.items()))
        for label, cost in costs.items()
    ]
    return head, rows
