"""What a rank does when: spans of computing, waiting and communication, as a Chrome trace and as a picture.

Models and dispatchers are wrapped for this, so those that are not measured run the same code as ever. A communication
span lasts from the end of its begin to the end of its finish: how long it had, not how long the wire was busy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...comm.dispatch import Dispatcher, Received, StepRows
from ...layers.stages import Stages

LANES = ("compute", "communication")
COLOURS = {"stage": "tab:blue", "wait": "lightgrey", "dispatch": "tab:orange", "combine": "tab:green"}


class Span(NamedTuple):
    """``kind``: a key of :data:`COLOURS`; ``half``: 0 or 1; seconds on the host's clock."""

    kind: str
    half: int
    start: float
    stop: float


class Recorder:
    """Collects spans of one rank."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, kind: str, half: int, start: float) -> None:
        """A span that ends now."""
        self.spans.append(Span(kind, half, start, time.perf_counter()))

    def staged(self, stages: Callable[..., Stages], dispatchers: Sequence[Dispatcher]) -> Callable[..., Stages]:
        """``stages`` of a model with those dispatchers, whose stages are recorded."""

        def recorded(part: Any, *args: object) -> Stages:
            half = list(dispatchers).index(part.exchange.dispatcher)
            inner = stages(part, *args)
            while True:
                start = time.perf_counter()
                try:
                    point = next(inner)
                except StopIteration as end:
                    return end.value
                finally:
                    self.add("stage", half, start)
                yield point

        return recorded


class RecordedDispatcher:
    """``inner``, with what it has in flight recorded as that of ``half``; see :class:`...comm.dispatch.Dispatcher`."""

    def __init__(self, inner: Dispatcher, recorder: Recorder, half: int) -> None:
        self._inner, self._recorder, self._half = inner, recorder, half
        self.all_to_all, self.limits = inner.all_to_all, inner.limits
        self.open: Callable[[StepRows], None] = inner.open
        self._began = 0.0

    def twin(self) -> RecordedDispatcher:
        """See :meth:`...comm.dispatch.Dispatcher.twin`."""
        return RecordedDispatcher(self._inner.twin(), self._recorder, 1 - self._half)

    def begin_dispatch(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        """See :meth:`...comm.dispatch.Dispatcher.begin_dispatch`."""
        self._inner.begin_dispatch(x, experts, weights)
        self._began = time.perf_counter()

    def finish_dispatch(self) -> Received:
        """See :meth:`...comm.dispatch.Dispatcher.finish_dispatch`."""
        return self._finish("dispatch", self._inner.finish_dispatch)

    def begin_combine(self, y: torch.Tensor) -> None:
        """See :meth:`...comm.dispatch.Dispatcher.begin_combine`."""
        self._inner.begin_combine(y)
        self._began = self._began or time.perf_counter()

    def finish_combine(self) -> torch.Tensor:
        """See :meth:`...comm.dispatch.Dispatcher.finish_combine`."""
        return self._finish("combine", self._inner.finish_combine)

    def _finish(self, kind: str, finish: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = finish()
        self._recorder.add("wait", self._half, start)
        self._recorder.add(kind, self._half, self._began)
        self._began = 0.0
        return result


def chrome_trace(runs: dict[str, Sequence[Sequence[Span]]]) -> str:
    """``runs[mode][rank]`` as JSON for Perfetto or chrome://tracing: a process for each mode and rank, times from the
    first span of the mode."""
    events: list[dict[str, Any]] = []
    for number, (mode, ranks) in enumerate(runs.items()):
        origin = min(span.start for spans in ranks for span in spans)
        for rank, spans in enumerate(ranks):
            pid = number * len(ranks) + rank
            events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{mode}, rank {rank}"}})
            for lane, name in enumerate(LANES):
                events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": name}})
            for kind, half, start, stop in spans:
                times = {"ts": 1e6 * (start - origin), "dur": 1e6 * (stop - start)}
                name, lane = f"{kind} {'AB'[half]}", _lane(kind)
                events.append({"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": lane, **times})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _lane(kind: str) -> int:
    return int(kind in ("dispatch", "combine"))


def save_timeline(path: str, title: str, runs: dict[str, Sequence[Sequence[Span]]]) -> None:
    """``runs[mode][rank]`` as bars over time, a compute and a communication lane a rank; all modes on one scale."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    num_ranks = len(next(iter(runs.values())))
    figure = Figure(figsize=(11, 1 + 1.1 * num_ranks * len(runs)), layout="constrained")
    plots = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (mode, ranks) in zip(plots, runs.items()):
        origin = min(span.start for spans in ranks for span in spans)
        for rank, spans in enumerate(ranks):
            for kind, half, start, stop in sorted(spans, key=lambda span: span.kind == "wait"):
                bottom = 2 * rank + _lane(kind) + 0.45 * half * _lane(kind)
                height = 0.42 if _lane(kind) else 0.85
                bar = {"color": COLOURS[kind], "alpha": 0.65 if half else 1.0, "edgecolor": "white", "linewidth": 0.3}
                axes.broken_barh([(1e3 * (start - origin), 1e3 * (stop - start))], (bottom, height), **bar)
        axes.set_yticks(
            [i + 0.45 for i in range(2 * num_ranks)],
            [f"{lane}, rank {rank}" for rank in range(num_ranks) for lane in LANES],
            fontsize=7,
        )
        axes.invert_yaxis()
        axes.set_title(mode, fontsize=9, loc="left")
    plots[-1].set_xlabel("ms")
    figure.legend(handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items()], fontsize=7, ncols=4)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
