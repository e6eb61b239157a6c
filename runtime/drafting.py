"""The drafting part of a step: whether to draft, the drafts, and how many of each request are verified.

What the deciding rank decides (the first of an attention block of the last pipeline stage), the other ranks of the
block and of its pipeline are told.

Legend: R requests that decode in a step, γ drafts a block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..comm.collectives import broadcast
from ..parallel.groups import Groups
from .agreement import Agreement
from .decide import Decider, Drafted
from .draft import Drafter, DraftRequests
from .scheduler import StepPlan
from .spec.schedule import VerifyPolicy
from .spec.tree import message_width


class Drafting:
    """Drafts for the requests of one attention DP rank. ``decider``: None on ranks that do not decide; ``may_skip``:
    whether the policy may leave out drafting."""

    def __init__(
        self, drafter: Drafter, decider: Decider | None, agreement: Agreement, groups: Groups, may_skip: bool
    ) -> None:
        self.drafter, self.decider, self._agreement, self._groups = drafter, decider, agreement, groups
        self._may_skip, self._device = may_skip, agreement.device
        self._is_last = groups.pp.rank == groups.pp.size - 1
        self._decides_alone = decider is not None and groups.attn_block.size == groups.pp.size == 1

    def set_policy(self, policy: VerifyPolicy) -> None:
        """Replace how verified lengths are chosen; the same call on every rank."""
        self._may_skip = True
        if self.decider:
            self.decider.policy = policy

    def draft(self, plan: StepPlan) -> Drafted:
        """Drafts for the decoding requests and how many of each are verified; the same on every rank of the block.
        Collective over the tp group and the pipeline."""
        states, gamma = plan.decoding, self.drafter.gamma
        if gamma == 0:
            return Drafted.nothing(len(states), 0)
        other_rows = sum(chunk.num_tokens for chunk in plan.chunks)

        def limits() -> np.ndarray:
            """Of each request the most drafts that are of use: a block of n may emit n + 1 tokens."""
            return np.array([min(gamma, state.num_left - 1) for state in states], dtype=np.int64)

        drafting, max_lens = [], None
        if states and self._is_wanted(len(states), limits, other_rows):
            max_lens = limits()
            drafting = states if any(max_lens.tolist()) else []
        others = self._agreement.numbers(len(drafting))
        if not sum(others):
            return Drafted.nothing(len(states), gamma)
        requests = DraftRequests(
            [state.slot for state in drafting],
            [state.num_cached for state in drafting],
            [state.tokens[-1] for state in drafting],
            others,
        )
        block = None
        if self._is_last:
            noise = self.decider.noise(drafting) if self.decider and drafting else None
            block = self.drafter.propose(requests, noise)
        if not drafting:
            return Drafted.nothing(len(states), gamma)
        decided = None
        if self.decider:
            schedule = self.decider.schedule if self.drafter.tree is None else self.decider.schedule_trees
            decided = schedule(states, block, max_lens, other_rows)
        return decided if self._decides_alone else self._told(decided, len(states))

    def _is_wanted(self, num_requests: int, max_lens: Callable[[], np.ndarray], other_rows: int) -> bool:
        """Whether the policy drafts in this step; the same on every rank of the block. Collective over the block and
        the pipeline where the policy may say no."""
        if not self._may_skip:
            return True
        wish = False
        if self.decider:
            wish = self.decider.policy.wants_draft(num_requests, max_lens, other_rows)
            if self._decides_alone:
                return wish
        return bool(self._from_decider(torch.tensor([wish], dtype=torch.int64, device=self._device)))

    def _told(self, decided: Drafted | None, num_requests: int) -> Drafted:
        """What the deciding rank has ``decided``, on every rank of the block. Collective over the block and the
        pipeline."""
        tree = self.drafter.tree
        if decided is not None:
            message = decided.to_tensor(tree and tree.num_drafts).to(self._device)
        else:
            width = 1 + self.drafter.gamma if tree is None else message_width(tree.num_drafts)
            message = torch.empty((num_requests, width), dtype=torch.int64, device=self._device)
        message = self._from_decider(message)
        return decided or Drafted.from_tensor(message, of_trees=tree is not None)

    def _from_decider(self, message: torch.Tensor) -> torch.Tensor:
        """The deciding rank's ``message`` on every rank of its block and pipeline. Collective over both."""
        if self._is_last:
            message = broadcast(message, self._groups.attn_block)
        return broadcast(message, self._groups.pp, self._groups.pp.size - 1)
