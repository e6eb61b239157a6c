"""Which tokens run in the next step: every decoding request, and prefill chunks up to a budget.

The scheduler sees lengths, never tensors, and is a function of what all ranks know, so every rank plans the same step.
Requests are served by age: of those that wait, none is admitted before an older one, and the oldest that runs never
gives up its memory, so each comes to its end whatever arrives behind it.

How much memory a request must find to be admitted is a choice. If it is all that it may ever need, nothing that runs
can run out of pages. If it is a share of that, pages may run out; then a request is retracted: it gives up its memory,
keeps the tokens it has got, and waits to prefill them again.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .cache import Cache
from .prefix import PrefixTree, RingCopy
from .sequence import NO_SLOT, RequestState


class Chunk(NamedTuple):
    """``num_tokens`` uncached tokens of a request; ``completes``: its next token can be chosen afterwards."""

    state: RequestState
    num_tokens: int
    completes: bool


class StepPlan(NamedTuple):
    """``decoding``: requests that have got tokens, the last of which the cache lacks; ``chunks``: prefill; ``copies``:
    of ring rows, in order, before the step runs."""

    decoding: list[RequestState]
    chunks: list[Chunk]
    copies: list[RingCopy]

    @property
    def states(self) -> list[RequestState]:
        """All requests with rows in the step."""
        return self.decoding + [chunk.state for chunk in self.chunks]


@dataclass
class Counts:
    """What a scheduler has done so far. ``hit_tokens`` of ``prompt_tokens`` tokens to prefill were found in the cache,
    in ``hits`` of ``admitted`` admissions; ``retracted`` requests gave up ``lost_tokens`` cached tokens."""

    admitted: int = 0
    prompt_tokens: int = 0
    hits: int = 0
    hit_tokens: int = 0
    retracted: int = 0
    lost_tokens: int = 0

    def lines(self) -> list[str]:
        """What was out of the ordinary, for people."""
        lines = []
        if self.hits:
            lines.append(
                f"prefix cache: {self.hit_tokens} of {self.prompt_tokens} tokens to prefill were there already, in "
                f"{self.hits} of {self.admitted} admissions"
            )
        if self.retracted:
            lines.append(
                f"memory ran out: {self.retracted} retractions, {self.lost_tokens} tokens to be prefilled again"
            )
        return lines


class Expectation:
    """Which share of its remaining new tokens a request is expected to get, when admission is optimistic.

    Falls from ``start`` to 0.14 of that in 600 steps; a retraction sets it to what the running requests have got so
    far, and 20 tokens more for each, over what they may get (the rule of sglang's scheduler).
    """

    FLOOR, NUM_STEPS, MORE = 0.14, 600, 20

    def __init__(self, start: float) -> None:
        self._start = self.share = start

    def step(self) -> None:
        """A step without a retraction."""
        floor = self._start * self.FLOOR
        self.share = max(min(floor, self.share), self.share - (self._start - floor) / self.NUM_STEPS)

    def retracted(self, running: Sequence[RequestState]) -> None:
        """Somebody was retracted; ``running`` stay."""
        emitted = sum(state.num_emitted for state in running)
        most = sum(state.budget for state in running)
        self.share = min(1.0, (emitted + self.MORE * len(running)) / (most + 1))

    def num_tokens(self, state: RequestState) -> int:
        """Tokens the cache is expected to have to hold for ``state``."""
        return min(state.worst_case, len(state.tokens) + 1 + int(self.share * state.num_left))


class Scheduler:
    """Keeps the waiting and the running requests of one engine.

    ``chunk_size``: prefill tokens a step may hold, less the decoding requests in it. ``expected``: the share of its new
    tokens that a request must find memory for to be admitted; None for all. ``tree``: stored prefixes, if any.
    ``mixed_chunk``: prefill tokens of a step beside up to ``MIXED_ROWS`` decoding requests, in proportion with more, so
    that the step stays about as long as one without; None for no such limit.
    """

    MIXED_ROWS = 8

    def __init__(
        self,
        cache: Cache,
        chunk_size: int,
        expected: float | None = None,
        tree: PrefixTree | None = None,
        mixed_chunk: int | None = None,
    ) -> None:
        self._cache, self._chunk_size, self._tree, self._mixed_chunk = cache, chunk_size, tree, mixed_chunk
        self._expected = None if expected is None else Expectation(expected)
        self._waiting: list[RequestState] = []  # the oldest last
        self._running: list[RequestState] = []  # the oldest first
        self._leaving: list[RequestState] = []
        self._copies: list[RingCopy] = []
        self.counts = Counts()

    def check_fits(self, name: str, num_tokens: int) -> None:
        """Raise ``ValueError`` if a request of ``num_tokens`` tokens in all could not even run alone."""
        needed, num_pages = self._cache.layout.pages_for(num_tokens), self._cache.num_pages
        if needed > num_pages:
            size = self._cache.layout.page_tokens
            raise ValueError(
                f"{name}: prompt and new tokens are up to {num_tokens} tokens, {needed} pages of {size}, but the cache "
                f"has {num_pages} pages; ask for fewer new tokens or enlarge the cache (--cache-pages, --cache-bytes)"
            )

    def add(self, state: RequestState) -> None:
        """Queue a request by its age."""
        bisect.insort(self._waiting, state, key=lambda other: -other.number)

    @property
    def num_waiting(self) -> int:
        """Requests without memory."""
        return len(self._waiting)

    def plan(self, num_flights: int = 1, num_beside: int = 0) -> StepPlan:
        """Lay out the next step from requests that are not in flight, and admit what fits.

        ``num_flights``: steps that are under way at a time in a pipeline; each takes a share of the decoding requests.
        ``num_beside``: requests of a DP rank that decode in the step or wait for its end, on the average of all ranks.
        """
        if self._tree is not None:
            for state in self._running:
                self._store(state)
        num_before = self.counts.retracted
        decoding = self._decoding(num_flights)
        if self.counts.retracted == num_before:
            if self._expected is not None:
                self._expected.step()
            while self._waiting and self._admit(self._waiting[-1]):
                self._waiting.pop()
        plan = StepPlan(decoding, self._chunks(self._budget(len(decoding), num_beside)), self._copies)
        self._copies = []
        for state in plan.states:
            state.num_flights += 1
        return plan

    def landed(self, plan: StepPlan) -> None:
        """The step of ``plan`` is over on every rank. What left while it was under way gives up its memory."""
        for state in plan.states:
            state.num_flights -= 1
        for state in [state for state in self._leaving if not state.num_flights]:
            self._leaving.remove(state)
            self._release(state)

    def finish(self, state: RequestState) -> None:
        """Forget a request, wherever it is, and free what it holds, once no step under way writes there any more."""
        if state.slot == NO_SLOT:
            self._waiting.remove(state)
            return
        self._running.remove(state)
        if state.num_flights:
            self._leaving.append(state)
            return
        if self._tree is not None:
            self._store(state)
        self._release(state)

    def _decoding(self, num_flights: int) -> list[RequestState]:
        """The requests that decode in the next step, with the pages they need for it."""
        share = -(-len(self._running) // num_flights)
        ready = [state for state in self._running if not state.in_flight and not state.is_prefilling][:share]
        decoding = []
        for state in ready:
            while state.slot != NO_SLOT and not self._reserve(state, state.num_next_cached):
                victim = self._victim()
                if victim is None:  # the memory of steps under way comes back later
                    break
                self._retract(victim)
            else:
                decoding.append(state)
        return [state for state in decoding if state.slot != NO_SLOT]

    def _budget(self, num_decoding: int, num_beside: int) -> int:
        """Prefill tokens of a step."""
        room = self._chunk_size - num_decoding
        if self._mixed_chunk is not None and num_beside:
            room = min(room, self._mixed_chunk * max(num_beside, self.MIXED_ROWS) // self.MIXED_ROWS)
        return max(room, 1)

    def _chunks(self, budget: int) -> list[Chunk]:
        chunks = []
        for state in self._running:
            if budget and state.is_prefilling and not state.in_flight:
                num_tokens = min(state.num_waiting, budget)
                if self._tree is not None:  # ring rows are saved where a chunk ends
                    size = self._tree.page_tokens
                    num_tokens = min(num_tokens, size - state.num_cached % size)
                budget -= num_tokens
                chunks.append(Chunk(state, num_tokens, num_tokens == state.num_waiting))
        return chunks

    def _reserve(self, state: RequestState, num_tokens: int) -> bool:
        if self._tree is not None:
            missing = self._cache.num_missing(state.slot, num_tokens)
            if missing > self._cache.num_free_pages and not self._tree.make_room(missing):
                return False
        return self._cache.reserve(state.slot, num_tokens)

    def _victim(self) -> RequestState | None:
        """Whom to retract: least got, then the longest prompt, then the youngest; never the oldest that runs."""
        able = [state for state in self._running[1:] if not state.num_flights]
        return min(able, key=lambda state: (state.num_emitted, -state.num_prompt, -state.number), default=None)

    def _retract(self, state: RequestState) -> None:
        self.counts.retracted += 1
        self.counts.lost_tokens += state.num_cached
        self._running.remove(state)
        if self._tree is not None:
            self._store(state)
        self._release(state)
        state.lose_memory()
        self.add(state)
        if self._expected is not None:
            self._expected.retracted(self._running)

    def _release(self, state: RequestState) -> None:
        self._cache.release(state.slot)
        state.slot = NO_SLOT
        if state.node is not None:
            self._tree.unlock(state.node)
            state.node = None

    def _admit(self, state: RequestState) -> bool:
        if not self._cache.num_free_slots:
            return False
        node = None if self._tree is None else self._tree.find(state.tokens)
        if node is not None and self._is_coming(state, node.depth):
            return False
        state.slot = self._cache.acquire()
        if node is not None:
            state.node, state.num_stored = node, node.depth
            self._cache.share(state.slot, self._tree.lock(node))
            state.num_cached = node.depth * self._tree.page_tokens
        if not self._has_room(state) or not self._reserve(state, self._first_room(state)):
            self._release(state)
            state.num_cached = state.num_stored = 0
            return False
        bisect.insort(self._running, state, key=lambda other: other.number)
        self.counts.admitted += 1
        self.counts.prompt_tokens += len(state.tokens)
        if state.num_cached:
            self.counts.hits += 1
            self.counts.hit_tokens += state.num_cached
            self._copies.append(RingCopy(state.slot, state.num_cached, node.snapshot, restores=True))
        return True

    def _first_room(self, state: RequestState) -> int:
        """Tokens that pages are reserved for on admission."""
        return state.worst_case if self._expected is None else len(state.tokens)

    def _has_room(self, state: RequestState) -> bool:
        """Whether the pages that requests are expected to need leave room for one more; anyone may run alone."""
        if self._expected is None or not self._running:
            return True
        available = self._cache.num_free_pages + (0 if self._tree is None else self._tree.num_evictable)
        needed = sum(
            self._cache.num_missing(other.slot, self._expected.num_tokens(other)) for other in (*self._running, state)
        )
        return needed <= available

    def _is_coming(self, state: RequestState, num_pages: int) -> bool:
        """Whether an older request is just computing the page that ``state`` needs next; waiting for it saves work."""
        end = (num_pages + 1) * self._tree.page_tokens
        if len(state.tokens) <= end:
            return False
        return any(
            other.is_prefilling
            and other.num_stored == num_pages
            and len(other.tokens) >= end
            and other.tokens[:end] == state.tokens[:end]
            for other in self._running
        )

    def _store(self, state: RequestState) -> None:
        """Offer the page that ``state`` has just filled to the tree, and save its rings."""
        size = self._tree.page_tokens
        if state.node is None or state.num_cached < (state.num_stored + 1) * size:
            return
        start = state.num_stored * size
        page = self._cache.page(state.slot, state.num_stored)
        found = self._tree.extend(state.node, state.tokens[start : start + size], page)
        if found is None:
            state.num_stored = len(state.tokens) + state.budget  # its later pages have no parent in the tree
            return
        state.node, is_new = found
        state.num_stored += 1
        if is_new:
            self._copies.append(RingCopy(state.slot, start + size, state.node.snapshot, restores=False))


def lightest(loads: Sequence[tuple[int, int]]) -> int:
    """The DP rank with the fewest tokens, then the fewest requests, then the lowest number; ``loads`` holds the tokens
    and requests of each."""
    return min(range(len(loads)), key=lambda rank: (*loads[rank], rank))
