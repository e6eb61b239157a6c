"""Which tokens run in the next step: every decoding request, and prefill chunks up to a budget.

The scheduler sees lengths, never tensors, and is a function of what all ranks know, so every rank plans the same step.
Requests run in the order they came. A request is admitted when a cache slot is free and there are pages for its worst
case, so no running request can run out of memory.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from .cache import Cache
from .sequence import NO_SLOT, RequestState


class Chunk(NamedTuple):
    """``num_tokens`` uncached prompt tokens of a request; ``completes``: its next token can be chosen afterwards."""

    state: RequestState
    num_tokens: int
    completes: bool


class StepPlan(NamedTuple):
    """``decoding``: requests that have got tokens, the last of which the cache lacks; ``chunks``: prefill."""

    decoding: list[RequestState]
    chunks: list[Chunk]


class Scheduler:
    """Keeps the waiting and the running requests of one engine.

    ``chunk_size``: prefill tokens a step may hold, less the decoding requests in it.
    """

    def __init__(self, cache: Cache, chunk_size: int) -> None:
        self._cache, self._chunk_size = cache, chunk_size
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []

    def add(self, state: RequestState) -> None:
        """Queue a request."""
        self._waiting.append(state)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._waiting or self._running)

    def plan(self, num_flights: int = 1) -> StepPlan:
        """Admit what fits and lay out the next step from requests that are not in flight.

        ``num_flights``: steps that are under way at a time in a pipeline; each takes a share of the decoding requests.
        """
        while self._waiting and self._admit(self._waiting[0]):
            self._running.append(self._waiting.popleft())
        share = -(-len(self._running) // num_flights)
        ready = [state for state in self._running if not state.in_flight]
        decoding = [state for state in ready if not state.is_prefilling][:share]
        budget = max(self._chunk_size - len(decoding), 1)
        chunks = []
        for state in ready:
            if state.is_prefilling and budget:
                num_tokens = min(state.num_waiting, budget)
                budget -= num_tokens
                chunks.append(Chunk(state, num_tokens, num_tokens == state.num_waiting))
        return StepPlan(decoding, chunks)

    def finish(self, state: RequestState) -> None:
        """Forget a request, wherever it is, and free what it holds."""
        if state.slot == NO_SLOT:
            self._waiting.remove(state)
        else:
            self._running.remove(state)
            self._cache.release(state.slot)
            state.slot = NO_SLOT

    def _admit(self, state: RequestState) -> bool:
        if not self._cache.num_free_slots:
            return False
        slot = self._cache.acquire()
        if not self._cache.reserve(slot, state.worst_case):
            self._cache.release(slot)
            return False
        state.slot = slot
        return True
