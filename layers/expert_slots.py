"""Which slot of which rank holds which expert of a layer, and which of an expert's copies a row goes to.

Legend: T rows, k picks of a row, N picks of a rank, R ranks with rows of their own, E experts, P slots of all ranks
(contiguous by rank), C most copies of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from ..comm.collectives import all_gather_v
from ..parallel.groups import Group
from .kernels.moe import Routing


class CopyRule(Protocol):
    """Chooses copies under one map. ``needs_tokens``: whether the ranks must count their picks together first."""

    needs_tokens: bool

    def __call__(self, experts: np.ndarray, tokens: np.ndarray, rank: int) -> np.ndarray:
        """Slots [N] for this rank's picks ``experts`` [N]; ``tokens`` [R, E]: picks of every rank; here: ``rank``."""
        ...


class ExpertSlots:
    """The live map of one layer. ``slots``: the expert in each of the P slots.

    Picks of an expert go to its copies in turn, beginning at one that depends on the expert and on ``turn``. Ranks that
    see the same rows must agree and have the same ``turn``; others may differ, so that not all begin alike. ``counts``:
    whether this rank is the one of those with the same rows that counts them. ``rule_for`` makes of a map the rule by
    which copies are chosen instead (None: in turn); ``rows``: the ranks with rows of their own for these slots.
    """

    def __init__(
        self,
        slots: Sequence[int],
        num_experts: int,
        turn: int,
        counts: bool,
        device: torch.device,
        rows: Group,
        rule_for: Callable[[Sequence[int]], CopyRule | None] = lambda slots: None,
    ) -> None:
        self._num_experts, self._turn, self._device = num_experts, turn, device
        self._counts_here, self._rows, self._rule_for = counts, rows, rule_for
        self._picks: torch.Tensor | None = None
        self.set(slots)

    def set(self, slots: Sequence[int]) -> None:
        """From now on the slots hold these experts."""
        self.slots = tuple(int(expert) for expert in slots)
        homes: list[list[int]] = [[] for _ in range(self._num_experts)]
        for slot, expert in enumerate(self.slots):
            homes[expert].append(slot)
        assert all(homes), "an expert without a slot"
        self._rule = self._rule_for(self.slots)
        most = max(map(len, homes))
        padded = [home + home[:1] * (most - len(home)) for home in homes]
        self._copies = torch.tensor(padded, device=self._device)
        self._counts = torch.tensor([len(home) for home in homes], device=self._device)

    def count_picks(self) -> None:
        """Count from now on how many picks each slot gets."""
        self._picks = torch.zeros(1 + len(self.slots), dtype=torch.int64, device=self._device)

    def take_picks(self) -> torch.Tensor:
        """The picks of each slot, int64 [P], since the last call."""
        assert self._picks is not None, "nothing was counted"
        taken = self._picks[1:].clone()
        self._picks.zero_()
        return taken

    def choose(self, routing: Routing, is_first: bool = True) -> Routing:
        """``routing`` with slots in place of experts; -1 (none) stays -1.

        ``is_first``: whether no other rank that would count these rows is before this one. Collective over ``rows``
        under a rule that needs the tokens.
        """
        slots = self._in_turn(routing.experts) if self._rule is None else self._by_rule(self._rule, routing.experts)
        if self._picks is not None and self._counts_here and is_first:
            flat = slots.flatten() + 1
            self._picks.scatter_add_(0, flat, torch.ones_like(flat))
        return Routing(slots, routing.weights)

    def _in_turn(self, experts: torch.Tensor) -> torch.Tensor:
        real = experts.clamp(min=0)
        copy = (self._numbers(experts) + real + self._turn) % self._counts[real]
        return torch.where(experts < 0, -1, self._copies[real, copy])

    def _by_rule(self, rule: CopyRule, experts: torch.Tensor) -> torch.Tensor:
        slots = experts.clone()
        real = experts >= 0
        picks = experts[real]
        tokens = torch.bincount(picks, minlength=self._num_experts)[None]
        if rule.needs_tokens:
            tokens = all_gather_v(tokens, self._rows, [1] * self._rows.size)
        chosen = rule(picks.cpu().numpy(), tokens.cpu().numpy(), self._rows.rank)
        slots[real] = torch.from_numpy(chosen).to(slots)
        return slots

    def _numbers(self, experts: torch.Tensor) -> torch.Tensor:
        """How many picks of the same expert come before each, [T, k]."""
        flat = experts.flatten()
        ordered, order = flat.sort(stable=True)
        # Where each expert's run begins; that of -1 does not matter.
        begins = torch.searchsorted(ordered, torch.arange(self._num_experts, device=flat.device))
        numbers = torch.empty_like(flat)
        numbers[order] = torch.arange(len(flat), device=flat.device) - begins[ordered.clamp(min=0)]
        return numbers.view_as(experts)
