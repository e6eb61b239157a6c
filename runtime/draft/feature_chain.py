"""Drafts of one layer that joins what the target made of a token with the token behind it: EAGLE-3, and the prediction
layer of DeepSeek-V3.

Legend: R requests, γ drafts a block, K rows of a target step, D hidden width, V vocabulary, P position of a request's
anchor.

A row at position p joins the feature of p with the token at p + 1 and predicts the token at p + 2. The first draft
behind the anchor comes from the row at P - 1; the row at P reads the layer's own output in place of the feature and
the first draft, and so on, one forward a draft.

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
from ...layers.attention.plan import AttentionPlan, CacheRows, build_plan, entry_rows
from ...layers.draft_heads_host import HostDraftBlock
from ...layers.kernels import Kernels
from ...parallel.groups import Groups
from ..cache import Cache, CacheLayout
from ..models.base import Model
from ..step import Step
from .base import DraftNoise, DraftRequests, DraftRoom, PlainDraft
from .chain import Chain, rows_at
from .pages import own_pages

MAX_GAMMA = 16
"""Drafts of a block at most; each costs a forward, and is kept less often than the one before it."""


class FeatureChain(PlainDraft, abc.ABC):
    """See :class:`.base.Drafter`; a draft adds how it joins, and its layer."""

    longest = MAX_GAMMA

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
        self.gamma, self.target = gamma, target
        device, dtype = target.head.weight.device, target.head.weight.dtype
        self.cache = own_pages((shape,), room.num_slots, room.max_context + MAX_GAMMA, device, dtype)
        ring = CacheShape(window=1, ring_width=feature_width)
        self._features = Cache(
            CacheLayout((ring,), room.max_verify, dtype.itemsize), room.num_slots, 0, 0, device, dtype
        )
        self._store_ring = kernels.bind("store_rows")
        self._chain = Chain(gamma, groups.attn_block, device)

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
    def propose(self, requests: DraftRequests, noise: DraftNoise | None) -> HostDraftBlock | None:
        """See :meth:`.base.Drafter.propose`."""
        slots, starts = np.array(requests.slots, np.int64), np.array(requests.starts, np.int64)
        ring = self._features.layers[0].window
        device = ring.device
        features = ring[torch.from_numpy(slots).to(device), torch.from_numpy((starts - 1) % ring.shape[1]).to(device)]

        def advance(k: int, tokens: torch.Tensor) -> torch.Tensor:
            nonlocal features
            plan = build_plan(rows_at(slots, starts - 1 + k), self.cache.page_table, (1,))
            features, logits = self.forward(tokens, features, plan, requests.others)
            return logits

        return self._chain.draw(requests, noise, advance)
