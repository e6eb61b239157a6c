"""Requests through an engine, from the first prompt to the last result: what ``generate`` and :class:`LLM` share.

Every rank of a job runs the same calls with the same requests; text, clocks and results exist on the first rank.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from .arrivals import Arrivals, AtOnce
from .detokenize import TextTracker
from .inputs import Inputs, refused_output
from .request import Request, RequestOutput, TokenEvent, TokenLogprob, validate_request


class StepEngine(Protocol):
    """What driving needs of an engine; every call is made on every rank, in the same order."""

    def add(self, request: Request) -> None:
        """Take a valid request."""
        ...

    def abort(self, request_id: str) -> None:
        """Drop a request."""
        ...

    def has_work(self) -> bool:
        """Whether a request is unfinished; the same on all ranks."""
        ...

    def step(self) -> Sequence[TokenEvent]:
        """Run one step; what it added to each request, without text."""
        ...


def admit(
    inputs: Inputs,
    text: TextTracker,
    vocab_size: int,
    max_context: int,
    check: Callable[[Request], None] = lambda request: None,
) -> Inputs:
    """Sort out the requests the engine could not run; the text of the others is started. First rank only.

    ``check`` raises ``ValueError`` for a request that the engine has no room for.
    """
    good, refused = [], list(inputs.refused)
    for request in inputs.requests:
        try:
            validate_request(request, vocab_size, max_context)
            check(request)
            text.add(request.request_id, request.params)
        except ValueError as error:
            refused.append(refused_output(request.request_id, str(error), request.prompt_ids))
        else:
            good.append(request)
    return Inputs(tuple(good), tuple(refused), inputs.order)


def drive(
    engine: StepEngine, requests: Sequence[Request], text: TextTracker | None, arrivals: Arrivals | None = None
) -> Iterator[TokenEvent]:
    """Run ``requests`` to their ends and yield what each step brings, with the text that became certain.

    They are handed to the engine in order, as ``arrivals`` says, or all at once.
    Collective over the engine's ranks. ``text`` is ``None`` on ranks that do not decide; they yield events too, but
    without text. Whoever leaves early does so on every rank at the same event; unfinished requests are then aborted.
    """
    unfinished = {request.request_id: None for request in requests}
    try:
        arrivals, added = AtOnce(len(requests)) if arrivals is None else arrivals, 0
        while added < len(requests) or engine.has_work():
            if added < len(requests):
                come = arrivals.count(not engine.has_work())
                for request in requests[added:come]:
                    engine.add(request)
                added = come
            for event in engine.step():
                finished = event.finish_reason is not None
                if finished:
                    del unfinished[event.request_id]
                if text is not None:
                    event = dataclasses.replace(event, text=text.take(event.request_id, finished=finished))
                yield event
    finally:
        for request_id in unfinished:
            engine.abort(request_id)
            if text is not None:
                text.take(request_id, finished=True)


@dataclasses.dataclass
class _Growing:
    """A request on its way to a result."""

    request: Request
    start: float
    first: float | None = None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    pieces: list[str] = dataclasses.field(default_factory=list)


class Collector:
    """Adds events up to results. Times count from the moment it is made, or from :meth:`came`."""

    def __init__(self, requests: Iterable[Request], clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        now = clock()
        self._growing = {request.request_id: _Growing(request, now) for request in requests}

    def came(self, request_id: str, at: float) -> None:
        """A request came later, ``at`` that time of the clock."""
        if request_id in self._growing:
            self._growing[request_id].start = at

    def push(self, event: TokenEvent) -> RequestOutput | None:
        """Add an event; the result if it was the last one of its request."""
        state, now = self._growing[event.request_id], self._clock()
        if event.token_ids and state.first is None:
            state.first = now
        state.token_ids += event.token_ids
        state.logprobs += event.logprobs
        state.pieces.append(event.text)
        if event.finish_reason is None:
            return None
        del self._growing[event.request_id]
        return RequestOutput(
            request_id=event.request_id,
            prompt_ids=state.request.prompt_ids,
            token_ids=tuple(state.token_ids),
            text="".join(state.pieces),
            finish_reason=event.finish_reason,
            logprobs=tuple(state.logprobs),
            error=event.error,
            time_to_first_token=None if state.first is None else state.first - state.start,
            time_total=now - state.start,
            spec=event.spec,
        )


def in_order(outputs: Iterable[RequestOutput], order: Sequence[str]) -> list[RequestOutput]:
    """Results in the order of the request ids in ``order``."""
    place = {request_id: i for i, request_id in enumerate(order)}
    return sorted(outputs, key=lambda output: place[output.request_id])
