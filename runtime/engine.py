"""The loop: plan a step, run the model, choose tokens on one rank, tell all ranks, apply.

Every rank makes the same calls with the same requests. Only the first rank of the tensor group decides tokens and
where requests end (it alone knows stop strings); the others receive its decision as one integer tensor whose shape they
know, so no rank can disagree about a length.

Legend: R requests that get tokens in a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from ..comm.collectives import broadcast
from ..layers.kernels import choose as choose_kernels
from ..layers.params import OnDevice
from ..parallel.groups import Groups
from .cache import Cache, CacheLayout
from .checkpoint import CheckpointReader
from .engine_config import EngineConfig
from .model_config import ModelConfig, load_model_config
from .models.deepseek_v4 import DeepseekV4, attention_sizes
from .random import Purpose, uniforms
from .request import FinishReason, Request, TokenEvent, TokenLogprob
from .sampling import SamplingRows, choose, log_probs
from .scheduler import Scheduler, Work
from .sequence import RequestState
from .step import Span, Step, build_step

REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")


class StopStrings(Protocol):
    """Tells where emitted tokens complete a stop string; asked on the deciding rank only."""

    def push(self, request_id: str, token_ids: Sequence[int]) -> int | None:
        """How many of ``token_ids`` are kept because the last of those completed a stop string, or None."""
        ...


class Emitted(NamedTuple):
    """What one request got in a step. ``reason`` indexes :data:`REASONS`."""

    tokens: list[int]
    reason: int


class _Batch(NamedTuple):
    """Sampling parameters of the requests that get tokens, kept while the same requests decode together."""

    states: tuple[RequestState, ...]
    sampling: SamplingRows
    num_top: list[int | None]


class Engine:
    """A model with its cache and requests, on one rank of a job."""

    def __init__(
        self,
        model: DeepseekV4,
        cache: Cache,
        groups: Groups,
        config: EngineConfig,
        text: StopStrings | None = None,
    ) -> None:
        self.model, self.cache, self.config, self.groups = model, cache, config, groups
        self._text = text
        self._scheduler = Scheduler(cache, config.chunk_size)
        self._states: dict[str, RequestState] = {}
        self._batch: _Batch | None = None

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        groups: Groups,
        device: torch.device,
        *,
        model_config: ModelConfig | None = None,
        text: StopStrings | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Engine:
        """Read the checkpoint of a resolved ``config`` and make room for ``config.max_running`` requests.

        ``progress`` is told bytes as they are read. Raises ``ValueError`` naming what is wrong with the checkpoint.
        """
        model_config = load_model_config(config.model) if model_config is None else model_config
        dtype = getattr(torch, config.dtype)
        reader = CheckpointReader(config.model, model_config, dtype, progress=progress)
        kernels = choose_kernels(device, dtype)
        model = DeepseekV4(model_config, OnDevice(reader, device), groups, kernels, config.max_context, device)
        return cls(model, make_cache(model_config, config, device), groups, config, text)

    @property
    def is_deciding(self) -> bool:
        """Whether this rank chooses tokens."""
        return self.groups.tp.rank == 0

    def add(self, request: Request) -> None:
        """Queue a request that :func:`.request.validate_request` has accepted. The same on every rank."""
        assert request.request_id not in self._states, f"request {request.request_id!r} was added twice"
        eos = self.model.config.eos_token_ids
        state = RequestState.start(request, self.config.max_context, eos, self.config.seed)
        self._states[request.request_id] = state
        self._scheduler.add(state)

    def abort(self, request_id: str) -> None:
        """Drop a request; an id that is not there (any more) is ignored. The same on every rank."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._scheduler.finish(state)

    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_work

    def step(self) -> list[TokenEvent]:
        """Run one step and return what it added to each request, without text. Collective over the tensor group."""
        works = self._scheduler.plan()
        if not works:
            return []
        logits = self.model.forward(self._build(works), self.cache).logits
        for work in works:
            work.state.num_cached += work.num_tokens
        deciding = tuple(work.state for work in works if work.decides)
        return self._decide(deciding, logits) if deciding else []

    def _build(self, works: list[Work]) -> Step:
        spans = []
        for state, num_tokens, decides in works:
            start = state.num_cached
            spans.append(Span(state.slot, start, state.tokens[start : start + num_tokens], int(decides)))
        return build_step(spans, self.cache.page_table, self.cache.layout.ratios, self.model.config.vocab_size)

    def _decide(self, deciding: tuple[RequestState, ...], logits: torch.Tensor) -> list[TokenEvent]:
        """Choose tokens from ``logits`` [R, V], tell all ranks, and apply them."""
        logprobs: list[TokenLogprob | None] = [None] * len(deciding)
        message = torch.empty((len(deciding), 2), dtype=torch.int64)
        if self.is_deciding:
            emitted, logprobs = self._choose(self._batch_of(deciding, logits.device), logits)
            message = torch.tensor([[one.reason, *one.tokens] for one in emitted])
        events = []
        for state, row, logprob in zip(deciding, broadcast(message, self.groups.tp).tolist(), logprobs):
            state.tokens += row[1:]
            reason = REASONS[row[0]]
            found = () if logprob is None else (logprob,)
            events.append(TokenEvent(state.request.request_id, tuple(row[1:]), found, reason))
            if reason is not None:
                self._scheduler.finish(self._states.pop(state.request.request_id))
        return events

    def _choose(self, batch: _Batch, logits: torch.Tensor) -> tuple[list[Emitted], list[TokenLogprob | None]]:
        states, points = batch.states, None
        if not batch.sampling.all_greedy:
            positions = [len(state.tokens) for state in states]
            numbers = uniforms([s.seed for s in states], [s.key for s in states], positions, Purpose.TARGET)
            points = torch.from_numpy(numbers).to(logits.device)
        ids = choose(logits, batch.sampling, points)
        emitted = [self._cut(state, [token]) for state, token in zip(states, ids.tolist())]
        return emitted, log_probs(logits, ids, batch.num_top)

    def _cut(self, state: RequestState, tokens: list[int]) -> Emitted:
        """End ``tokens`` at the request's first stop id or stop string (which is kept), or at its limit.

        A stop within the limit wins over the limit; a stop behind it counts for nothing.
        """
        kept, reason = tokens[: state.num_left], 0
        for count, token in enumerate(kept, start=1):
            if token in state.stops:
                kept, reason = kept[:count], 1
                break
        count = self._text.push(state.request.request_id, kept) if self._text is not None else None
        if count is not None:
            kept, reason = kept[:count], 1
        if reason == 0 and len(kept) == state.num_left:
            reason = 2
        return Emitted(kept, reason)

    def _batch_of(self, deciding: tuple[RequestState, ...], device: torch.device) -> _Batch:
        if self._batch is None or self._batch.states != deciding:
            params = [state.request.params for state in deciding]
            self._batch = _Batch(deciding, SamplingRows.of(params, device), [p.logprobs for p in params])
        return self._batch


def make_cache(model_config: ModelConfig, config: EngineConfig, device: torch.device) -> Cache:
    """A cache for ``config.max_running`` requests of ``config.max_context`` tokens each."""
    dtype = getattr(torch, config.dtype)
    sizes = tuple(attention_sizes(model_config, layer) for layer in range(model_config.num_layers))
    layout = CacheLayout(sizes, max_verify=1, itemsize=dtype.itemsize)
    num_pages = config.max_running * layout.pages_for(config.max_context)
    return Cache(layout, config.max_running, num_pages, config.max_context, device, dtype)
