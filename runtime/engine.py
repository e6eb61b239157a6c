"""The loop: plan a step, draft, choose how much is verified, run the model, judge, apply.

Every rank makes the same calls with the same requests. Only the first rank of the tensor group decides drafts, verified
lengths, tokens and where requests end; the others receive its decisions as integer tensors whose shapes they know, so
no rank can disagree about a length. Prefill chunks, plain decoding and verification are rows of one step.

Legend: R requests that get tokens in a step, γ drafts a block, T rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..comm.collectives import broadcast
from ..layers.kernels import choose
from ..layers.params import OnDevice
from ..parallel.groups import Groups
from .cache import Cache, CacheLayout
from .checkpoint import CheckpointReader
from .decide import Decider, Drafted, StopStrings
from .draft import Drafter, DraftRequests, drafter_class
from .draft.base import DraftRoom
from .engine_config import EngineConfig
from .model_config import ModelConfig, load_model_config
from .models.deepseek_v4 import DeepseekV4, attention_sizes
from .request import FinishReason, Request, TokenEvent
from .scheduler import Scheduler, StepPlan
from .sequence import RequestState
from .spec.rows import BlockPlan
from .spec.schedule import StaticPolicy, make_policy
from .spec.sps import load_table
from .spec.sts import load_temperatures
from .spec.verdict import NUM_FIELDS, Verdict
from .step import Span, Step, build_step

REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")  # by Verdict.finish


class Engine:
    """A model with its draft, cache and requests, on one rank of a job."""

    def __init__(
        self,
        model: DeepseekV4,
        drafter: Drafter,
        cache: Cache,
        groups: Groups,
        config: EngineConfig,
        text: StopStrings | None = None,
    ) -> None:
        self.model, self.drafter, self.cache, self.config, self.groups = model, drafter, cache, config, groups
        self._scheduler = Scheduler(cache, config.chunk_size)
        self._states: dict[str, RequestState] = {}
        self._decider = make_decider(config, drafter.gamma, text) if groups.tp.rank == 0 else None

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
        source = OnDevice(CheckpointReader(config.model, model_config, dtype, progress=progress), device)
        kernels, draft = choose(device, dtype, config.deterministic), drafter_class(config.draft)
        taps = draft.tap_layers(model_config)
        model = DeepseekV4(model_config, source, groups, kernels, config.max_context, device, taps)
        max_verify = 1 + (config.gamma or draft.max_gamma(model_config))
        room = DraftRoom(config.max_running, config.max_context, max_verify)
        drafter = draft.load(model_config, source, model, groups, kernels, room, config.gamma)
        cache = make_cache(model_config, config, device, max_verify)
        return cls(model, drafter, cache, groups, config, text)

    def add(self, request: Request) -> None:
        """Queue a request that :func:`.request.validate_request` has accepted. The same on every rank."""
        assert request.request_id not in self._states, f"request {request.request_id!r} was added twice"
        eos = self.model.config.eos_token_ids
        state = RequestState.start(request, self.config.max_context, eos, self.config.seed, self.drafter.gamma)
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
        plan = self._scheduler.plan()
        if not plan.decoding and not plan.chunks:
            return []
        drafted = self._draft(plan)
        step = self._build(plan, drafted)
        logits, taps = self.model.forward(step, self.cache)
        self.drafter.observe(taps, step.plan)
        for chunk in plan.chunks:
            chunk.state.num_cached += chunk.num_tokens
        completed = [chunk.state for chunk in plan.chunks if chunk.completes]
        states = plan.decoding + completed
        drafted = drafted.followed_by(len(completed))
        return self._judge(states, len(plan.decoding), logits, drafted) if states else []

    def _draft(self, plan: StepPlan) -> Drafted:
        """Drafts for the decoding requests and how many of each are verified; the same on every rank."""
        states, gamma = plan.decoding, self.drafter.gamma
        # A block of n drafts may emit n + 1 tokens.
        max_lens = np.array([min(gamma, state.num_left - 1) for state in states], dtype=np.int64)
        if not max_lens.any():
            return Drafted.nothing(len(states), gamma)
        requests = DraftRequests(
            [state.slot for state in states],
            [state.num_cached for state in states],
            [state.tokens[-1] for state in states],
        )
        block = self.drafter.propose(requests, self._decider.pick(states) if self._decider else None)
        probs = None
        message = torch.empty((len(states), 1 + gamma), dtype=torch.int64)
        if self._decider:
            other_rows = sum(chunk.num_tokens for chunk in plan.chunks)
            drafts, lens, probs = self._decider.schedule(states, block, max_lens, other_rows)
            message = BlockPlan(drafts, lens).to_tensor()
        agreed = BlockPlan.from_tensor(broadcast(message, self.groups.tp))
        return Drafted(agreed.drafts, agreed.lens, probs)

    def _build(self, plan: StepPlan, drafted: Drafted) -> Step:
        spans = []
        for state, drafts, length in zip(plan.decoding, drafted.drafts.tolist(), drafted.lens.tolist()):
            spans.append(Span(state.slot, state.num_cached, [state.tokens[-1], *drafts[:length]], length + 1))
        for state, num_tokens, completes in plan.chunks:
            start = state.num_cached
            spans.append(Span(state.slot, start, state.tokens[start : start + num_tokens], int(completes)))
        return build_step(spans, self.cache.page_table, self.cache.layout.ratios, self.model.config.vocab_size)

    def _judge(
        self, states: list[RequestState], num_decoding: int, logits: torch.Tensor, drafted: Drafted
    ) -> list[TokenEvent]:
        """Decide what ``logits`` [T, V] give to each request, tell all ranks, and apply it.

        The first ``num_decoding`` of ``states`` verified drafts, the others completed their prefill.
        """
        gamma = self.drafter.gamma
        logprobs: list = [()] * len(states)
        message = torch.empty((len(states), NUM_FIELDS + gamma + 1), dtype=torch.int64)
        if self._decider:
            verdict, logprobs = self._decider.judge(states, logits, drafted)
            message = verdict.to_tensor()
        verdict = Verdict.from_tensor(broadcast(message, self.groups.tp))
        counts = zip(verdict.verified.tolist(), verdict.accepted.tolist(), verdict.finish.tolist())
        events = []
        for i, (state, tokens, (verified, accepted, finish)) in enumerate(zip(states, verdict.token_lists(), counts)):
            state.tokens += tokens
            # All but the last are in the cache; what was rejected behind them is overwritten before it is read.
            state.num_cached = len(state.tokens) - 1
            if gamma and i < num_decoding:
                state.spec.add_step(gamma if drafted.lens.any() else 0, verified, accepted, len(tokens))
            reason = REASONS[finish]
            spec = state.spec.fields() if gamma and reason is not None else None
            events.append(TokenEvent(state.request.request_id, tuple(tokens), logprobs[i], reason, spec=spec))
            if reason is not None:
                self._scheduler.finish(self._states.pop(state.request.request_id))
        return events


def make_decider(config: EngineConfig, gamma: int, text: StopStrings | None) -> Decider:
    """The deciding rank's part, from a resolved ``config``. Raises ``ValueError`` for unusable table files."""
    table = load_table(config.sps_table) if config.sps_table else None
    policy = make_policy(config.verify, table, config.confidence_threshold) if gamma else StaticPolicy()
    temperatures = load_temperatures(config.sts, gamma) if config.sts and gamma else None
    return Decider(gamma, policy, text, temperatures, config.block_verify)


def make_cache(model_config: ModelConfig, config: EngineConfig, device: torch.device, max_verify: int = 1) -> Cache:
    """A cache for ``config.max_running`` requests of ``config.max_context`` tokens each.

    ``max_verify``: rows of the widest step that may be rolled back.
    """
    dtype = getattr(torch, config.dtype)
    sizes = tuple(attention_sizes(model_config, layer) for layer in range(model_config.num_layers))
    layout = CacheLayout(sizes, max_verify, dtype.itemsize)
    num_pages = config.max_running * layout.pages_for(config.max_context)
    return Cache(layout, config.max_running, num_pages, config.max_context, device, dtype)
