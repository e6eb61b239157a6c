"""Where the time of a decode step goes: by phase of the engine's loop, and by kernel operation inside the model.

Phases are timed by replacing methods of one engine made for this, operations by :class:`TimedKernels` given to its
model, so an engine that is not profiled runs the same code as ever.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...layers.kernels import Kernels, choose
from ...layers.kernels.quantised import PackedWeight
from ...layers.params import OnDevice
from ..checkpoint import CheckpointReader
from ..engine import Engine
from ..models import family
from ..models.base import Model
from ..request import Request, SamplingParams
from .systems import sibling
from .table import table
from .timing import Stopwatch, waiter

NUM_WARM_STEPS = 4


class TimedKernels(Kernels):
    """The kernels of ``inner``, each call timed under the operation's name."""

    def __init__(self, inner: Kernels, watch: Stopwatch) -> None:
        self.backend, self.whole_sums = inner.backend, inner.whole_sums
        self._inner, self._watch = inner, watch

    def pack(self, operation: str, weight: torch.Tensor) -> torch.Tensor | PackedWeight:
        """See :meth:`Kernels.pack`."""
        return self._inner.pack(operation, weight)

    def bind(self, operation: str, **weights: object) -> Callable[..., object]:
        """See :meth:`Kernels.bind`."""
        return self._watch.wrap(operation, self._inner.bind(operation, **weights))

    def join(self, name: str, **parts: object) -> None:
        """None: the operations are timed one by one."""


class Cost(NamedTuple):
    """Calls and seconds a step."""

    calls: float
    seconds: float


class Profile(NamedTuple):
    """Mean costs of the faster half of the decode steps. ``step_seconds``: with timers; ``plain_seconds``: without, by
    an engine that took turns; ``phases`` and ``operations``: by name, in the order of the step and by cost."""

    step_seconds: float
    plain_seconds: float
    phases: dict[str, Cost]
    operations: dict[str, Cost]

    @property
    def between(self) -> float:
        """Seconds of the model phase outside kernel operations."""
        return self.phases["model"].seconds - sum(cost.seconds for cost in self.operations.values())

    @property
    def rest(self) -> float:
        """Seconds of the step outside all phases."""
        return self.step_seconds - sum(cost.seconds for cost in self.phases.values())

    def to_json(self) -> dict[str, object]:
        """Shares are of the step with timers."""

        def costs(items: dict[str, Cost]) -> dict[str, object]:
            return {
                name: {"seconds": c.seconds, "share": c.seconds / self.step_seconds, "calls": c.calls}
                for name, c in items.items()
            }

        return {
            "step_s": self.step_seconds,
            "plain_step_s": self.plain_seconds,
            "phases": costs(self.phases | {"rest": Cost(1.0, self.rest)}),
            "operations": costs(self.operations | {"between operations": Cost(1.0, self.between)}),
        }

    def lines(self) -> list[str]:
        """Two tables."""
        rows = [(name, *_cells(cost, self.step_seconds)) for name, cost in self.phases.items()]
        rows.append(("rest", "", *_cells(Cost(0, self.rest), self.step_seconds)[1:]))
        inside = [(name, *_cells(cost, self.step_seconds)) for name, cost in self.operations.items()]
        inside.append(("between operations", "", *_cells(Cost(0, self.between), self.step_seconds)[1:]))
        return [
            f"one step: {1000 * self.step_seconds:.3f} ms with timers, {1000 * self.plain_seconds:.3f} ms without",
            table(("phase of the step", "calls", "ms", "share"), rows),
            table(("operation in the model", "calls", "ms", "share"), inside),
        ]


def _cells(cost: Cost, whole: float) -> tuple[str, str, str]:
    return f"{cost.calls:.0f}", f"{1000 * cost.seconds:.3f}", f"{100 * cost.seconds / whole:.1f} %"


def profile_decode(engine: Engine, prompts: Sequence[Sequence[int]], num_steps: int) -> Profile:
    """Decode ``prompts`` together for ``num_steps`` steps, in turns with timers and without.

    The slower half of the steps is left out: on a shared machine those were interrupted, at no fault of the operation
    that happened to run.
    """
    device = engine.cache.page_table.device
    operations, phases = Stopwatch(waiter(device)), Stopwatch(waiter(device))
    options = {"max_running": len(prompts), "chunk_size": sum(map(len, prompts))}
    plain = sibling(engine, **options)
    timed = sibling(engine, _timed_model(engine, operations), **options)
    _time_phases(timed, phases)
    params = SamplingParams(max_new_tokens=num_steps + NUM_WARM_STEPS + 1, ignore_eos=True)
    for each in (plain, timed):
        for i, ids in enumerate(prompts):
            each.add(Request(str(i), tuple(ids), params, i))
        for _ in range(NUM_WARM_STEPS):
            each.step()
    operations.take()
    phases.take()
    plain_seconds, laps = [], []
    for _ in range(num_steps):
        plain_seconds.append(_seconds(plain.step))
        laps.append(_Lap(_seconds(timed.step), phases.take(), operations.take()))
    laps = sorted(laps, key=lambda lap: lap.seconds)[: -(-num_steps // 2)]
    by_cost = sorted(_means([lap.operations for lap in laps]).items(), key=lambda item: -item[1].seconds)
    return Profile(
        statistics.fmean(lap.seconds for lap in laps),
        statistics.fmean(sorted(plain_seconds)[: len(laps)]),
        _means([lap.phases for lap in laps]),
        {name: cost for name, cost in by_cost if cost.calls},
    )


class _Lap(NamedTuple):
    """One step; phases and operations by name as (calls, seconds)."""

    seconds: float
    phases: dict[str, tuple[int, float]]
    operations: dict[str, tuple[int, float]]


def _seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _means(laps: list[dict[str, tuple[int, float]]]) -> dict[str, Cost]:
    return {
        name: Cost(statistics.fmean(lap[name][0] for lap in laps), statistics.fmean(lap[name][1] for lap in laps))
        for name in laps[0]
    }


def _timed_model(engine: Engine, watch: Stopwatch) -> Model:
    """The checkpoint of ``engine`` once more, with timed operations."""
    config, device = engine.config, engine.cache.page_table.device
    dtype = getattr(torch, config.dtype)
    source = OnDevice(CheckpointReader(config.model, engine.model.config, dtype), device)
    kernels = TimedKernels(choose(device, dtype, config.deterministic, config.kernels, config.formats), watch)
    build = family(engine.model.config.model_type).build
    return build(engine.model.config, source, engine.groups, kernels, config.max_context, device, dtype=dtype)


def _time_phases(engine: Engine, watch: Stopwatch) -> None:
    phases = (
        ("schedule", engine._scheduler, "plan"),
        ("draft", engine._drafting, "draft"),
        ("build", engine, "_build"),
        ("model", engine.model, "run_stage"),
        ("choose", engine, "_land"),
    )
    for name, owner, method in phases:
        setattr(owner, method, watch.wrap(name, getattr(owner, method)))
