"""What only the deciding rank does: draw drafts, choose how many are verified, judge them, and end requests.

Every random number is keyed by (seed, request, position of the anchor, purpose, place in the block), so blocks that
overlap in position never share one: a rejected draft's number is not used again for the next block's draft of that
position. The confidences of earlier steps, which may set a budget, therefore say nothing about the numbers of this one.

Legend: R requests that get tokens, γ drafts a block, T packed rows, V vocabulary. Arrays are numpy on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ..layers.attention.plan import to_device
from ..layers.draft_heads_host import HostDraftBlock
from ..layers.kernels import Kernels, choose
from .draft.base import DraftNoise
from .engine_config import EngineConfig
from .outcome import COMPLETED, Outcome, rows_to_table, table_width, to_table, write_logprobs
from .penalised import penalised
from .random import Purpose, uniforms
from .sampling import SamplingRows, greedy_ids, log_probs, target_probs
from .sequence import RequestState
from .spec import device_verify
from .spec.block_verify import verify_blocks
from .spec.confidence import conditional
from .spec.policy import make_policy
from .spec.rows import BlockPlan, PackedRows
from .spec.schedule import StaticPolicy, VerifyPolicy
from .spec.sps import load_table
from .spec.sts import load_temperatures
from .spec.tree import DraftTree, trees_from_tensor, trees_to_tensor
from .spec.tree_verify import verify_greedy_trees, verify_trees
from .spec.verdict import Verdict, cut
from .spec.verify import verify_greedy, verify_tokens


class StopStrings(Protocol):
    """Tells where emitted tokens complete a stop string."""

    def push(self, request_id: str, token_ids: Sequence[int]) -> int | None:
        """How many of ``token_ids`` are kept because the last of those completed a stop string, or None."""
        ...


Recorder = Callable[["np.ndarray | None", np.ndarray, np.ndarray, np.ndarray], None]
"""Told of each step, for the requests that decode: raw confidence logits [R, γ], or None where there are none; drafts
verified, kept before any cut, and tokens emitted, all [R]."""


class Drafted(NamedTuple):
    """The drafts of a step: ``drafts`` [R, γ], ``lens`` [R] how many are verified, ``probs`` [R, γ, V] float64 the laws
    they were drawn from (a tensor where that was on a device), or None where all are greedy; ``confidence`` [R, γ] raw
    logits, on the rank that drew; ``proposed`` [R]: drafts that were of use to the request, there too.
    ``trees`` [R]: how the drafts hang together if they do not follow one another; ``drafts`` are then those of each
    tree, node by node. ``survival`` [R, γ]: what the policy went by, for a policy that learns."""

    drafts: np.ndarray
    lens: np.ndarray
    probs: np.ndarray | torch.Tensor | None
    confidence: np.ndarray | None = None
    proposed: np.ndarray | None = None
    trees: tuple[DraftTree, ...] | None = None
    survival: np.ndarray | None = None

    @classmethod
    def of_trees(cls, trees: Sequence[DraftTree]) -> Drafted:
        """All nodes of ``trees`` are verified."""
        lens = np.array([tree.num_drafts for tree in trees], np.int64)
        drafts = np.zeros((len(trees), lens.max(initial=0)), np.int64)
        for row, tree in zip(drafts, trees):
            row[: tree.num_drafts] = tree.tokens[1:]
        return cls(drafts, lens, None, proposed=lens, trees=tuple(trees))

    @classmethod
    def nothing(cls, num_requests: int, gamma: int) -> Drafted:
        """For requests that have no drafts in this step."""
        return cls(np.zeros((num_requests, gamma), np.int64), np.zeros(num_requests, np.int64), None)

    def followed_by(self, num_requests: int) -> Drafted:
        """These drafts, then ``num_requests`` requests without drafts."""
        if num_requests == 0:
            return self
        if self.trees is not None:
            more = (DraftTree.lone(0),) * num_requests
            return Drafted.of_trees(self.trees + more)._replace(proposed=self.proposed)
        nothing = Drafted.nothing(num_requests, self.drafts.shape[1])
        probs = self.probs
        if isinstance(probs, torch.Tensor):
            probs = torch.cat((probs, probs.new_zeros(num_requests, *probs.shape[1:])))
        elif probs is not None:
            probs = np.concatenate([probs, np.zeros((num_requests, *probs.shape[1:]))])
        drafts, lens = np.concatenate([self.drafts, nothing.drafts]), np.concatenate([self.lens, nothing.lens])
        return Drafted(drafts, lens, probs, self.confidence, self.proposed, survival=self.survival)

    def to_tensor(self, num_nodes: int | None) -> torch.Tensor:
        """What the other ranks must know, int64 [R, ...]; ``num_nodes``: of a tree at most, None for blocks."""
        if num_nodes is None:
            return BlockPlan(self.drafts, self.lens).to_tensor()
        return trees_to_tensor(self.trees, num_nodes)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, of_trees: bool) -> Drafted:
        """The inverse of :meth:`to_tensor`, from any device."""
        if of_trees:
            return cls.of_trees(trees_from_tensor(tensor))
        plan = BlockPlan.from_tensor(tensor)
        return cls(plan.drafts, plan.lens, None)

    def rows(self, gamma: int) -> PackedRows:
        """Where the drafts lie in the step that verifies them."""
        if self.trees is not None:
            return PackedRows.from_trees(self.trees, gamma)
        return PackedRows.from_lens(self.lens, gamma)


class Decider:
    """Decides for all ranks. ``temperatures`` [γ] calibrate confidences; ``joint`` judges blocks jointly. With
    ``kernels`` drafts are judged where the logits are, by these, instead of on the host."""

    def __init__(
        self,
        gamma: int,
        policy: VerifyPolicy,
        temperatures: np.ndarray | None = None,
        joint: bool = False,
        kernels: Kernels | None = None,
    ) -> None:
        self._gamma, self.policy, self._temperatures = gamma, policy, temperatures
        self.recorder: Recorder | None = None
        self._verify, self._on_device = verify_blocks if joint else verify_tokens, kernels is not None
        if kernels is not None:
            by_token = functools.partial(device_verify.verify_tokens, reject=kernels.bind("reject_drafts"))
            self._verify = device_verify.verify_blocks if joint else by_token

    def noise(self, states: Sequence[RequestState]) -> DraftNoise:
        """How drafts are drawn: at the requests' own temperatures."""
        if all(state.request.params.greedy for state in states):
            return DraftNoise(None, None)
        temperatures = np.array([state.request.params.temperature for state in states])
        return DraftNoise(temperatures, _block_uniforms(states, self._gamma, Purpose.DRAFT))

    def schedule(
        self, states: Sequence[RequestState], block: HostDraftBlock, max_lens: np.ndarray, other_rows: int
    ) -> Drafted:
        """How many of each request's drafts are verified, at most ``max_lens`` [R]."""
        logits, c = block.confidence_logits, None
        if logits is not None and self.policy.reads_confidences:
            c = conditional(logits, self._temperatures)
        proposed = self._gamma * (max_lens > 0)
        if block.lens is not None:
            max_lens, proposed = np.minimum(max_lens, block.lens), np.minimum(proposed, block.lens)
        plan = self.policy.plan([state.request.request_id for state in states], c, max_lens, other_rows)
        return Drafted(block.tokens, plan.lens, block.probs, logits, proposed, survival=plan.survival)

    def schedule_trees(
        self, states: Sequence[RequestState], trees: Sequence[DraftTree], max_lens: np.ndarray, other_rows: int
    ) -> Drafted:
        """The same for trees, which are verified down to some depth."""
        depths = self.policy.plan([state.request.request_id for state in states], None, max_lens, other_rows).lens
        return Drafted.of_trees([tree.cut(depth) for tree, depth in zip(trees, depths.tolist())])

    def judge(
        self, states: Sequence[RequestState], num_decoding: int, logits: torch.Tensor, drafted: Drafted
    ) -> torch.Tensor:
        """The outcomes of a step (see :func:`.outcome.to_table`) from the target's ``logits`` [T, V].

        The first ``num_decoding`` of ``states`` verified drafts. Penalties are applied row by row before anything is
        chosen; requests end at stop ids and length limits here.
        Raises ``FloatingPointError`` if a row has no law to choose from.
        """
        if not states:
            return torch.empty((0, table_width(self._gamma)), dtype=torch.int64)
        rows = drafted.rows(self._gamma)
        verdict = self._verdict(rows, states, penalised(logits, states, rows, drafted.drafts), drafted)
        uncut, verdict = verdict, cut(verdict, [state.num_left for state in states], [state.stops for state in states])
        if self.recorder is not None and num_decoding:
            n = num_decoding
            self.recorder(drafted.confidence, drafted.lens[:n], uncut.accepted[:n], verdict.emitted[:n])
        if drafted.survival is not None:
            n = len(drafted.survival)
            self.policy.landed(drafted.survival, drafted.lens[:n], uncut.accepted[:n])
        proposed = [0] * num_decoding if drafted.proposed is None else drafted.proposed.tolist()
        counts = proposed + [COMPLETED] * (len(states) - num_decoding)
        return to_table([state.number for state in states], counts, verdict)

    def _verdict(
        self, rows: PackedRows, states: Sequence[RequestState], logits: torch.Tensor, drafted: Drafted
    ) -> Verdict:
        """What the target accepts, uncut. On a device only the verdict comes back, in one copy."""
        params, ids = [state.request.params for state in states], greedy_ids(logits)
        if all(p.greedy for p in params):
            return self._greedy_verdict(rows, ids, drafted)
        device = logits.device
        probs = target_probs(logits, SamplingRows.of([params[r] for r in rows.request.tolist()], device))
        coins = _block_uniforms(states, drafted.drafts.shape[1], Purpose.ACCEPT)
        final = _block_uniforms(states, 1, Purpose.TARGET)[:, 0]
        if rows.trees is not None:
            return verify_trees(rows, probs, coins, torch.from_numpy(final).to(device))
        if not self._on_device:
            return self._verify(rows, probs.cpu().numpy(), drafted.drafts, coins, final, drafted.probs)
        laws = None if drafted.probs is None else torch.as_tensor(drafted.probs, device=device)
        given = to_device([drafted.drafts.clip(min=0), coins, final], device)
        return Verdict.from_tensor(self._verify(rows.on(device), probs, *given, laws))

    def _greedy_verdict(self, rows: PackedRows, ids: torch.Tensor, drafted: Drafted) -> Verdict:
        """The same for the target's choices ``ids`` [T]."""
        if rows.trees is not None:
            return verify_greedy_trees(rows, ids.cpu().numpy())
        if not self._on_device:
            return verify_greedy(rows, ids.cpu().numpy(), drafted.drafts)
        (drafts,) = to_device([drafted.drafts.clip(min=0)], ids.device)
        return Verdict.from_tensor(device_verify.verify_greedy(rows.on(ids.device), ids, drafts))

    def logprobs(
        self,
        states: Sequence[RequestState],
        tokens: Sequence[Sequence[int]],
        logits: torch.Tensor,
        drafted: Drafted,
        num_top: int,
    ) -> torch.Tensor:
        """Log-probabilities of the emitted ``tokens`` by the target's own law, before penalties, temperature and
        filters, see :func:`.outcome.write_logprobs`."""
        at = torch.from_numpy(drafted.rows(self._gamma).emitted_rows(tokens)).to(logits.device)
        ids = torch.tensor([token for block in tokens for token in block], dtype=torch.int64, device=logits.device)
        asked = [state.request.params.logprobs for state in states]
        found = iter(log_probs(logits[at], ids, [n for n, block in zip(asked, tokens) for _ in block]))
        blocks = [[one for one in (next(found) for _ in block) if one is not None] for block in tokens]
        return write_logprobs(blocks, self._gamma, num_top)


class Ends:
    """Ends requests where their text does; on the first rank of the job, which alone has text."""

    def __init__(self, text: StopStrings | None) -> None:
        self._text = text

    def at_strings(self, states: Mapping[int, RequestState], table: torch.Tensor) -> torch.Tensor:
        """``table`` with requests ended where their tokens complete a stop string."""
        if self._text is None:
            return table
        rows = [Outcome.from_row(row) for row in table.tolist()]
        places = [self._place(states[row.number], row.tokens) if row.number in states else None for row in rows]
        if all(place is None for place in places):
            return table
        ended = [row if place is None else row.ended_at(place) for row, place in zip(rows, places)]
        return rows_to_table(ended, table.shape[1]).to(table.device)

    def _place(self, state: RequestState, tokens: Sequence[int]) -> int | None:
        kept = self._text.push(state.request.request_id, tokens)
        return None if kept is None else kept - 1


def _block_uniforms(states: Sequence[RequestState], width: int, purpose: Purpose) -> np.ndarray:
    """Numbers in [0, 1) float64 [R, width] for the block that follows each request's last token."""
    places = np.tile(np.arange(width), len(states))
    columns = [np.repeat(np.array(values, np.uint64), width) for values in _keys(states)]
    return uniforms(*columns, purpose, places).reshape(len(states), width)


def _keys(states: Sequence[RequestState]) -> tuple[list[int], list[int], list[int]]:
    return [s.seed for s in states], [s.key for s in states], [len(s.tokens) for s in states]


def make_decider(config: EngineConfig, gamma: int) -> Decider:
    """The deciding rank's part, from a resolved ``config``. Raises ``ValueError`` for unusable table files."""
    table = load_table(config.sps_table) if config.sps_table else None
    policy = make_policy(config.verify, table, config.confidence_threshold) if gamma else StaticPolicy()
    temperatures = load_temperatures(config.sts, gamma) if config.sts and gamma else None
    kernels = None
    if config.device == "cuda" or config.kernels == "triton":
        kernels = choose(torch.device(config.device), getattr(torch, config.dtype), choice=config.kernels)
    return Decider(gamma, policy, temperatures, config.block_verify, kernels)
