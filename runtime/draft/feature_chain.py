"""Drafts of one layer that joins what the target made of a token with the token behind it: EAGLE-3, and the prediction
layer of DeepSeek-V3.

Legend: R requests, γ drafts a block, K rows of a target step, D hidden width, V vocabulary, P position of a request's
anchor.

A row at position p joins the feature of p with the token at p + 1 and predicts the token at p + 2. The first draft
behind the anchor comes from the row at P - 1; the row at P reads the layer's own output in place of the feature and
the first draft, and so on, one forward a draft. In a tree a row reads the output of its parent's row, and a forward has
the rows of a whole frontier; those are kept one behind the other from P - 1 on.

State: the layer's keys and values in pages, and the features of the latest positions in a ring. With one layer a row's
key depends on its own input alone, so rows behind which nothing is drafted need no attention. A step's token at p
completes the row at p - 1; so rows that a chain wrote, or that read a rejected draft, are written anew from what the
target says before a row that is kept attends to them.
"""

from __future__ import annotations

import abc

import numpy as np
import torch

from ...layers.attention.dense import CacheShape, store_tokens
from ...layers.attention.plan import AttentionPlan, Branches, CacheRows, build_plan, entry_rows
from ...layers.draft_heads_host import HostDraftBlock
from ...layers.kernels import Kernels
from ...parallel.groups import Groups
from ..cache import Cache, CacheLayout
from ..models.base import Model
from ..spec.tree import DraftTree
from ..step import Step
from .base import DraftNoise, DraftRequests, DraftRoom, PlainDraft
from .chain import Chain, rows_at
from .growth import Frontier, TreeGrower
from .pages import own_pages

MAX_GAMMA = 16
"""Drafts of a block at most; each costs a forward, and is kept less often than the one before it."""


class FeatureChain(PlainDraft, abc.ABC):
    """See :class:`.base.Drafter`; a draft adds how it joins, and its layer."""

    longest, grows_trees = MAX_GAMMA, True

    def __init__(
        self,
        target: Model,
        groups: Groups,
        kernels: Kernels,
        room: DraftRoom,
        gamma: int,
        shape: CacheRows,
        feature_width: int,
    ) -> None:
        self.gamma, self.tree, self.target = gamma, room.tree, target
        device, dtype = target.head.weight.device, target.head.weight.dtype
        num_drafted = MAX_GAMMA if room.tree is None else room.tree.num_kept
        self.cache = own_pages((shape,), room.num_slots, room.max_context + num_drafted, device, dtype)
        ring = CacheShape(window=1, ring_width=feature_width)
        self._features = Cache(
            CacheLayout((ring,), room.max_verify, dtype.itemsize), room.num_slots, 0, 0, device, dtype
        )
        self._store_ring = kernels.bind("store_rows")
        self._chain = Chain(gamma, groups.attn_block, device)
        self._grower = None if room.tree is None else TreeGrower(room.tree, groups.attn_block, device)

    @abc.abstractmethod
    def features(self, taps: torch.Tensor) -> torch.Tensor:
        """What is kept of the target's ``taps`` [K, ...], [K, width]."""

    @abc.abstractmethod
    def keys(self, tokens: torch.Tensor, features: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The cached rows [K, c], those of a second pool last, of rows at ``positions`` [K] that join ``features``
        [K, width] and ``tokens`` [K]."""

    @abc.abstractmethod
    def forward(
        self, tokens: torch.Tensor, features: torch.Tensor, plan: AttentionPlan, counts: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The features [R, width] that the rows hand on, and their logits [R, V]; stores the rows. ``counts``: rows of
        every row owner of the tp group. Collective."""

    @torch.inference_mode()
    def observe(self, taps: torch.Tensor, step: Step) -> None:
        """See :meth:`.base.Drafter.observe`."""
        plan = step.plan.of_keys()
        rows, ring = plan.keys, self._features.layers[0].window
        features, tokens = self.features(step.plan.gather(taps)), step.plan.gather(step.tokens)
        opens = rows.positions == rows.starts
        before = torch.cat((features[:1], features[:-1]))
        stored = ring[rows.slots, (rows.positions - 1) % ring.shape[1]]
        before = torch.where(opens.unsqueeze(1), stored, before)
        done = (rows.positions > 0).nonzero().squeeze(1)
        at = rows.positions[done] - 1
        made = self.keys(tokens[done], before[done], at)
        where = entry_rows(self.cache.page_table, rows.slots[done], at, self.cache.layout.page_tokens)
        entries, index_entries = self.cache.layers[0].entries, self.cache.layers[0].index_entries
        main, index = made.split((entries.shape[2], index_entries.shape[2]), dim=1)
        store_tokens(main, entries, plan._replace(token_rows=where))
        if index.shape[1]:
            store_tokens(index, index_entries, plan._replace(token_rows=where))
        self._store_ring(features, None, self._features.layers[0], plan)

    @torch.inference_mode()
    def propose(
        self, requests: DraftRequests, noise: DraftNoise | None
    ) -> HostDraftBlock | tuple[DraftTree, ...] | None:
        """See :meth:`.base.Drafter.propose`."""
        slots, starts = np.array(requests.slots, np.int64), np.array(requests.starts, np.int64)
        ring, table = self._features.layers[0].window, self.cache.page_table
        device = ring.device
        features = ring[torch.from_numpy(slots).to(device), torch.from_numpy((starts - 1) % ring.shape[1]).to(device)]

        def advance(k: int, tokens: torch.Tensor) -> torch.Tensor:
            nonlocal features
            plan = build_plan(rows_at(slots, starts - 1 + k), table, (1,))
            features, logits = self.forward(tokens, features, plan, requests.others)
            return logits

        def advance_tree(frontier: Frontier | None) -> torch.Tensor:
            nonlocal features
            if frontier is None:
                return advance(0, torch.tensor(requests.anchors, dtype=torch.int64, device=device))
            num_requests, width = frontier.tokens.shape
            before = np.arange(num_requests)[:, None] * (len(features) // max(num_requests, 1)) + frontier.parents
            rows, branches = frontier_rows(slots, starts - 1, frontier)
            counts = tuple(count * width for count in requests.others)
            tokens, before = (torch.from_numpy(x.ravel()).to(device) for x in (frontier.tokens, before))
            plan = build_plan(rows, table, (1,), branches=branches)
            features, logits = self.forward(tokens, features[before], plan, counts)
            return logits

        if self._grower is not None:
            return self._grower.grow(requests.anchors, noise is not None, advance_tree)
        return self._chain.draw(requests, noise, advance)


def frontier_rows(slots: np.ndarray, starts: np.ndarray, frontier: Frontier) -> tuple[np.ndarray, dict[int, Branches]]:
    """The fields of :class:`~dspark.layers.attention.plan.Rows` int64 [5, R k] of the rows of ``frontier``, of requests
    whose trees are kept from ``starts`` [R] on, and what those rows see."""
    num_requests, width = frontier.tokens.shape
    positions = np.repeat(starts + frontier.level, width)
    ends = positions + 1
    rows = np.stack((positions, np.repeat(slots, width), np.repeat(starts, width), ends, np.arange(len(ends))))
    return rows, {slot: Branches(r * width, frontier.seen[r]) for r, slot in enumerate(slots.tolist())}
