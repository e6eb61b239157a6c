"""The loop: plan a step, draft, choose how much is verified, run the model, judge, apply.

Every rank makes the same calls with the same requests. A request lives on one attention DP rank; all ranks know where,
and learn what became of it. The first rank of an attention block of the last stage decides drafts, verified lengths and
tokens for its requests, and the first rank of the job, which alone knows stop strings, has the last word; decisions
travel as integer tensors whose shapes are known, so no rank can disagree about a length. Prefill chunks, plain decoding
and verification are rows of one step, and a rank without rows runs every stage.

Legend: R requests that get tokens in a step, γ drafts a block, T rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from typing import NamedTuple

import torch

from ..comm.collectives import all_gather_ints, broadcast
from ..comm.pipeline import StageLink
from ..parallel.groups import Groups
from .agreement import Agreement
from .balance.keeper import ExpertKeeper
from .cache import Cache
from .decide import Decider, Drafted, Ends, Recorder, StopStrings, make_decider
from .draft import Drafter
from .drafting import Drafting
from .engine_config import EngineConfig
from .graphs import Graphs
from .homes import PrefixHomes
from .models.base import Model, ModelOutput
from .outcome import Outcome, read_logprobs, table_width
from .prefix import PrefixTree, RingSnapshots
from .request import FinishReason, Request, TokenEvent, TokenLogprob, token_budget
from .scheduler import Counts, Scheduler, StepPlan, lightest
from .sequence import NO_SLOT, RequestState
from .spec.schedule import VerifyPolicy
from .step import Span, Step
from .step_maker import StepMaker, Steps

REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")  # by Verdict.finish


class Flight(NamedTuple):
    """A step on its way through the pipeline.

    ``states`` get tokens when it lands, the first ``num_decoding`` of them by verifying what was ``drafted``, the
    others by completing their prefill.
    """

    plan: StepPlan
    steps: Steps
    states: list[RequestState]
    num_decoding: int
    drafted: Drafted


class Engine:
    """A model with its draft, cache and requests, on one rank of a job; see :func:`.load.load_engine`."""

    def __init__(
        self,
        model: Model,
        drafter: Drafter,
        cache: Cache,
        groups: Groups,
        config: EngineConfig,
        text: StopStrings | None = None,
        graphs: Graphs | None = None,
        keeper: ExpertKeeper | None = None,
    ) -> None:
        self.model, self.cache, self.config, self.groups = model, cache, config, groups
        self.keeper = keeper
        self._link, self._graphs = StageLink(groups.pp), graphs
        is_deciding = self._link.is_last and groups.attn_block.rank == 0
        decider = make_decider(config, drafter.gamma) if is_deciding else None
        self._ends = Ends(text)
        self._flights: deque[Flight] = deque()
        self._device = cache.page_table.device
        self._agreement = Agreement(groups, self._device)
        self._drafting = Drafting(drafter, decider, self._agreement, groups, config.verify == "async")
        self._make_steps = StepMaker(config, groups, cache, self._agreement, model.config.vocab_size)
        num_snapshots = config.num_snapshots
        self.tree = PrefixTree(cache, num_snapshots) if num_snapshots else None
        num_ranks = groups.attn_dp.size
        self._homes = PrefixHomes(cache.layout.page_tokens, num_snapshots, num_ranks) if num_snapshots else None
        caches = (cache, *drafter.caches) if num_snapshots else ()
        self._snapshots = [RingSnapshots(one, num_snapshots) for one in caches]
        self._scheduler = Scheduler(cache, config.chunk_size, config.expected_share, self.tree, config.mixed_chunk)
        self._loads = [(0, 0)] * num_ranks
        self._num_decoding = 0  # requests of all ranks that have got a token
        self._states: dict[int, RequestState] = {}
        self._numbers: dict[str, int] = {}
        self._next_number = itertools.count()

    @property
    def drafter(self) -> Drafter:
        """What proposes tokens."""
        return self._drafting.drafter

    @property
    def _decider(self) -> Decider | None:
        return self._drafting.decider

    def add(self, request: Request) -> None:
        """Queue a request that :func:`.request.validate_request` has accepted. The same on every rank.

        Raises ``ValueError`` if the cache is too small for it, see :meth:`check_fits`.
        """
        assert request.request_id not in self._numbers, f"request {request.request_id!r} was added twice"
        self.check_fits(request)
        eos, max_context = self.model.config.eos_token_ids, self.config.max_context
        number, home = next(self._next_number), self._home(request.prompt_ids)
        state = RequestState.start(request, max_context, eos, self.config.seed, self.drafter.gamma, number, home)
        self._numbers[request.request_id], self._states[number] = number, state
        self._count(state, 1)
        if home == self.groups.attn_dp.rank:
            self._scheduler.add(state)

    def _home(self, prompt: tuple[int, ...]) -> int:
        """The DP rank for a request with ``prompt``; all ranks agree."""
        return lightest(self._loads) if self._homes is None else self._homes.place(prompt, self._loads)

    def check_fits(self, request: Request) -> None:
        """Raise ``ValueError`` naming the sizes if the cache could not hold ``request`` even alone."""
        num_tokens = len(request.prompt_ids) + token_budget(request, self.config.max_context)
        self._scheduler.check_fits(f"request {request.request_id!r}", num_tokens)

    def _count(self, state: RequestState, sign: int) -> None:
        """Add a request to the load of its DP rank, or take it off; all ranks agree."""
        num_tokens, num_requests = self._loads[state.home]
        self._loads[state.home] = (num_tokens + sign * state.worst_case, num_requests + sign)

    def abort(self, request_id: str) -> None:
        """Drop a request; an id that is not there (any more) is ignored. The same on every rank.

        Its memory is free at once, or where steps are under way with rows of it, when those have ended.
        """
        number = self._numbers.get(request_id)
        if number is not None:
            self._forget(self._states[number])

    def _forget(self, state: RequestState) -> None:
        del self._states[self._numbers.pop(state.request.request_id)]
        self._num_decoding -= state.num_emitted > 0
        self._count(state, -1)
        if state.home == self.groups.attn_dp.rank:
            self._scheduler.finish(state)

    def set_policy(self, policy: VerifyPolicy) -> None:
        """Replace how verified lengths are chosen, from the next step on; the same call on every rank."""
        self._drafting.set_policy(policy)

    def record(self, recorder: Recorder | None) -> None:
        """Have ``recorder`` told of every verified block, on the deciding ranks."""
        if self._decider:
            self._decider.recorder = recorder

    def has_work(self) -> bool:
        """Whether any request is unfinished, or a step with rows under way; the same on every rank."""
        return bool(self._states) or any(sum(flight.steps.shapes.rows) for flight in self._flights)

    @property
    def counts(self) -> Counts:
        """What the scheduler of this DP rank has done so far."""
        return self._scheduler.counts

    def take_counts(self) -> Counts:
        """What the schedulers of all DP ranks have done since the last time. Collective over the job."""
        mine = dataclasses.astuple(self._scheduler.counts)
        self._scheduler.counts = Counts()
        return Counts(*map(sum, zip(*all_gather_ints(mine, self.groups.attn_dp, self._device))))

    def step(self) -> list[TokenEvent]:
        """Run one step and return what it added to each request, without text. Collective over the job.

        In a pipeline a step launches one flight, moves every flight one stage on, and ends the oldest.
        """
        if not self.has_work():
            return []
        with self.groups.journal.step():
            events = self._step()
            if self.keeper is not None:
                self.keeper.after_step(self.has_work())
        return events

    def _step(self) -> list[TokenEvent]:
        self._flights.appendleft(self._launch())
        output = None
        if self._link.stage < len(self._flights):
            flight = self._flights[self._link.stage]
            if flight.plan.copies:
                self.drafter.settle()
            for copy in flight.plan.copies:
                for snapshots in self._snapshots:
                    snapshots.apply(copy)
            if sum(flight.steps.shapes.rows):
                output = self._run(flight.steps)
        if len(self._flights) < self._link.num_stages:
            return []
        return self._land(self._flights.pop(), output)

    def close(self) -> None:
        """Let go of what must not outlive the groups."""
        if self._graphs is not None:
            self._graphs.drop()

    def _run(self, steps: Steps) -> tuple[ModelOutput, ...] | None:
        if self._graphs is not None and self._graphs.fits(steps.steps[0]):
            return (self._graphs.run(*steps.steps),)
        return self.model.run_stage(steps.steps, self.cache, self._link, steps.in_pieces)

    def logits(self, step: Step) -> torch.Tensor:
        """The logits [N, V] of one ``step`` on every rank, outside of any request. Collective over the job."""
        output = self.model.run_stage([step], self.cache, self._link)
        num_logits, vocab_size = step.num_logits, self.model.config.vocab_size
        if output is None:
            logits = torch.empty((num_logits, vocab_size), device=self._device)
        else:
            logits = output[0].logits.contiguous()
        return broadcast(logits, self.groups.pp, self._link.num_stages - 1)

    def _launch(self) -> Flight:
        num_beside = -(-self._num_decoding // self.groups.attn_dp.size)
        plan = self._scheduler.plan(self._link.num_stages, num_beside)
        drafted = self._drafting.draft(plan)
        completed = [chunk.state for chunk in plan.chunks if chunk.completes]
        states = plan.decoding + completed
        steps = self._build(plan, drafted, len(states))
        for chunk in plan.chunks:
            chunk.state.num_cached += chunk.num_tokens
        for state in states:
            state.in_flight = True
        return Flight(plan, steps, states, len(plan.decoding), drafted.followed_by(len(completed)))

    def _land(self, flight: Flight, output: tuple[ModelOutput, ...] | None) -> list[TokenEvent]:
        """Decide what the last stage's ``output`` gives to the flight's requests, tell all ranks, and apply it."""
        trees = flight.drafted.trees
        if trees is None:
            for part, step in zip(output or (), flight.steps.steps):
                self.drafter.observe(part.taps, step)
        logits = None if output is None else _joined([part.logits for part in output])
        self._scheduler.landed(flight.plan)
        if not sum(flight.steps.shapes.requests):
            return []
        if self._decider:
            own = self._decider.judge(flight.states, flight.num_decoding, logits, flight.drafted)
            table = self._agreement.collect(own.to(self._device), flight.steps.shapes.requests)
        else:
            shape = (sum(flight.steps.shapes.requests), table_width(self.drafter.gamma))
            table = torch.empty(shape, dtype=torch.int64, device=self._device)
        table = self._to_first(table)
        if self.groups.world.rank == 0:
            table = self._ends.at_strings(self._states, table)
        rows = [Outcome.from_row(row) for row in broadcast(table, self.groups.world).tolist()]
        logprobs = self._logprobs(flight, logits, rows)
        if trees is not None:
            self._keep_paths(flight, output or (), {row.number: row.tokens for row in rows})
        for state in flight.states:
            state.in_flight = False
        events = [self._apply(row, found) for row, found in zip(rows, logprobs)]
        return [event for event in events if event is not None]

    def _keep_paths(self, flight: Flight, output: tuple[ModelOutput, ...], emitted: dict[int, list[int]]) -> None:
        """Of every tree keep the path of the ``emitted`` tokens: in the cache, and for the draft. Collective over the
        attention block."""
        kept: list[int] = []  # key rows of the step
        moved: list[tuple[int, int, int]] = []
        num_rows = 0
        for state, tree in zip(flight.states[: flight.num_decoding], flight.drafted.trees):
            path = tree.follow(emitted[state.number][:-1])
            kept += [num_rows + node for node in path]
            num_rows += len(tree.tokens)
            if state.slot != NO_SLOT:
                start = state.num_cached
                moved += [(state.slot, start + node, start + k) for k, node in enumerate(path) if node != k]
        if moved:
            self.cache.keep_path(*zip(*moved))
        kept += range(num_rows, sum(len(step.plan.keys.slots) for step in flight.steps.steps))
        rows = torch.tensor(kept, dtype=torch.int64, device=self._device)
        for part, step in zip(output, flight.steps.steps):
            size = len(step.plan.keys.slots)
            plan = step.plan.narrowed(rows[rows < size])
            self.drafter.observe(part.taps, step._replace(plan=plan))
            rows = rows[rows >= size] - size

    def _to_first(self, table: torch.Tensor) -> torch.Tensor:
        """``table`` of the last stage's first rank on the first stage's. Collective over that pipeline column."""
        return broadcast(table, self.groups.pp, self._link.num_stages - 1) if self.groups.tp.rank == 0 else table

    def _build(self, plan: StepPlan, drafted: Drafted, num_requests: int) -> Steps:
        spans = []
        trees = (None,) * len(plan.decoding) if drafted.trees is None else drafted.trees
        for state, drafts, length, tree in zip(plan.decoding, drafted.drafts.tolist(), drafted.lens.tolist(), trees):
            spans.append(Span(state.slot, state.num_cached, [state.tokens[-1], *drafts[:length]], length + 1, tree))
        for state, num_tokens, completes in plan.chunks:
            start = state.num_cached
            spans.append(Span(state.slot, start, state.tokens[start : start + num_tokens], int(completes)))
        return self._make_steps(spans, num_requests, bool(plan.chunks))

    def _logprobs(
        self, flight: Flight, logits: torch.Tensor | None, rows: list[Outcome]
    ) -> list[tuple[TokenLogprob, ...]]:
        """Log-probabilities of the emitted tokens, row by row, on the first rank; empty where not asked for."""
        known = [self._states[row.number] for row in rows if row.number in self._states]
        counts = [state.request.params.logprobs for state in known]
        num_top = max((count for count in counts if count is not None), default=None)
        if num_top is None:
            return [()] * len(rows)
        shape = (len(rows), self.drafter.gamma + 1, 1 + 2 * num_top)
        table = torch.empty(shape, dtype=torch.float64, device=self._device)
        if self._decider:
            emitted = {row.number: row.tokens for row in rows}
            tokens = [emitted[state.number] for state in flight.states]
            own = self._decider.logprobs(flight.states, tokens, logits, flight.drafted, num_top)
            table = self._agreement.collect(own.to(self._device), flight.steps.shapes.requests)
        table = self._to_first(table).cpu()
        if self.groups.world.rank != 0:
            return [()] * len(rows)
        asked = [
            self._states[row.number].request.params.logprobs if row.number in self._states else None for row in rows
        ]
        return [read_logprobs(values, row.tokens, count) for values, row, count in zip(table, rows, asked)]

    def _apply(self, row: Outcome, logprobs: tuple[TokenLogprob, ...]) -> TokenEvent | None:
        state = self._states.get(row.number)
        if state is None:  # aborted while it was in flight
            return None
        self._num_decoding += not state.num_emitted and len(row.tokens) > 0
        state.tokens += row.tokens
        # All but the last are in the cache; what was rejected behind them is overwritten before it is read.
        state.num_cached = len(state.tokens) - 1
        if self.drafter.gamma and row.drafted >= 0:
            state.spec.add_step(row.drafted, row.verified, row.accepted, len(row.tokens))
        reason = REASONS[row.finish]
        spec = state.spec.fields() if self.drafter.gamma and reason is not None else None
        event = TokenEvent(state.request.request_id, tuple(row.tokens), logprobs, reason, spec=spec)
        if reason is not None:
            self._forget(state)
        return event


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
