"""Decode and verify steps as CUDA graphs: one for each padded number of rows, recorded once and replayed.

A small step is mostly the launching of kernels. A graph launches them all at once, but always the same ones on the same
addresses: so the rows of a step are copied into buffers that stay, filled up with rows that change nothing. Such a row
sits at position 0 of slot 0 and sees itself alone; its request is said to end so far behind that nothing of it is
stored, and the places of windows that close are filled up with -1.

Legend: T rows of a step, N rows of its graph, C a bound on the context of its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..layers.attention.plan import AttentionPlan, Rows
from ..parallel.groups import Groups
from .cache import Cache
from .models.base import Model, ModelOutput
from .step import Step

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
LEAST_CONTEXT = 4096
FAR = 1 << 40  # the end of a request whose rows are not stored


class Recorded(NamedTuple):
    """``packed`` int64 [6 + number of ratios, N]: tokens, the five fields of ``Rows``, closing rows; what ``replay``
    reads. ``output``: what it writes."""

    packed: torch.Tensor
    replay: Callable[[], None]
    output: ModelOutput


Recorder = Callable[[Callable[[], ModelOutput]], tuple[Callable[[], None], ModelOutput]]
"""Makes a function into one that is replayed, with the output that replaying overwrites."""


def record_on_cuda(forward: Callable[[], ModelOutput]) -> tuple[Callable[[], None], ModelOutput]:
    """A CUDA graph of ``forward``, after two runs that compile what it needs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # NCCL's own threads may call CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = forward()
    return graph.replay, output


class Graphs:
    """Replays the forwards of small steps; see the module text.

    ``record``: how a forward is recorded. Only for a model whose kernels neither wait for the host nor choose their
    work by data that the host must know, on ranks that share heads and so run the same rows: they record and replay
    the same graphs in the same order, with the collectives in them.
    """

    def __init__(self, model: Model, cache: Cache, groups: Groups, max_context: int, record: Recorder) -> None:
        assert groups.world.size == groups.attn_tp.size, "graphs are for ranks that run the same rows"
        self._model, self._cache, self._max_context, self._record = model, cache, max_context, record
        self._ratios = cache.layout.ratios
        self._recorded: dict[tuple[int, int], Recorded] = {}

    def drop(self) -> None:
        """Forget what was recorded: graphs hold the communicators of their collectives, and must go before these do."""
        self._recorded.clear()

    def fits(self, step: Step) -> bool:
        """Whether ``step`` is small enough, and not prefill, whose sizes hardly repeat."""
        return not step.has_prefill and 0 < step.tokens.shape[0] <= ROWS[-1]

    def run(self, step: Step) -> ModelOutput:
        """The forward of a ``step`` that :meth:`fits`; its tensors are valid until the next call."""
        num_rows = step.tokens.shape[0]
        padded = next(size for size in ROWS if size >= num_rows)
        context = LEAST_CONTEXT
        while context <= step.plan.max_position:
            context *= 2
        key = (padded, min(context, self._max_context))
        if key not in self._recorded:
            self._recorded[key] = self._make(*key)
        packed, replay, output = self._recorded[key]
        packed.copy_(self._pack(step, padded), non_blocking=True)
        replay()
        logits = output.logits[:num_rows] if step.logit_rows is None else output.logits[step.logit_rows]
        return ModelOutput(logits, output.taps[:num_rows])

    def _pack(self, step: Step | None, size: int) -> torch.Tensor:
        """The rows of ``step``, or none, filled up to ``size``."""
        device = self._cache.page_table.device
        packed = torch.zeros((6 + len(self._ratios), size), dtype=torch.int64, device=device)
        packed[4] = FAR
        packed[5] = torch.arange(size, device=device)
        packed[6:] = -1
        if step is not None:
            count = step.tokens.shape[0]
            packed[:6, :count] = torch.stack((step.tokens, *step.plan.queries))
            for line, ratio in zip(packed[6:], self._ratios):
                closing = step.plan.closing[ratio]
                line[: closing.shape[0]] = closing
        return packed

    def _make(self, size: int, context: int) -> Recorded:
        packed = self._pack(None, size)
        rows, closing = Rows(*packed[1:6]), dict(zip(self._ratios, packed[6:]))
        plan = AttentionPlan(rows, rows, self._cache.page_table, closing, context - 1, None)
        step = Step(packed[0], None, plan, (size,), False, lambda logits: logits, size)
        replay, output = self._record(lambda: self._model.forward(step, self._cache))
        return Recorded(packed, replay, output)
