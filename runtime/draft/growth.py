"""How a draft's laws become a tree: the dynamic tree of EAGLE-2, and one of a fixed shape.

Legend: R requests, γ levels (drafts of the longest path), k children of a node and nodes of a frontier, F = k rows of a
level behind the first, V vocabulary.

The anchor gets the k likeliest tokens as children. Then, level by level, the k nodes of the frontier run through the
draft together, each gets k children, and the best k of these k·k become the next frontier. The score of a node is the
sum of log-probabilities on its path; of all nodes the best N stay, in the order in which they came up. A node never
scores above its parent and comes up behind it, so what stays is one tree (Li et al., EAGLE-2, arXiv 2406.16858,
section 4). A static tree scores a node by the ranks on its path in place of its probabilities, so it has the same shape
in every step (as EAGLE-1's, arXiv 2401.15077).

A tree is a function of what stands before the anchor: nothing in it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ...comm.collectives import broadcast
from ...parallel.groups import Group
from ..spec.tree import ROOT, DraftTree

DEFAULT_NODES, DEFAULT_TOP_K = 59, 10
"""EAGLE-2's own, without the anchor."""

RANK_SHARES = (0.6, 0.4)
"""A static tree is right if the target's choice is the draft's first one in 0.6 of all places, and each further one has
0.4 of the chance of that before it."""


class TreeShape(NamedTuple):
    """``is_dynamic``: grown by probabilities, else by ranks. ``num_drafts``: nodes besides the anchor, at most.
    ``top_k``: children of a node. ``depth``: levels."""

    is_dynamic: bool
    num_drafts: int
    top_k: int
    depth: int

    @classmethod
    def make(cls, kind: str, num_drafts: int | None, top_k: int | None, depth: int, vocab_size: int) -> TreeShape:
        """The shape of the options ``--tree``, ``--tree-nodes`` and ``--tree-topk``.

        Raises ``ValueError`` naming both numbers for more children than tokens, or nodes than can come up.
        """
        top_k = min(DEFAULT_TOP_K, vocab_size) if top_k is None else top_k
        if top_k > vocab_size:
            raise ValueError(f"--tree-topk is {top_k}, but the vocabulary has {vocab_size} tokens")
        most = top_k + (depth - 1) * top_k**2
        if num_drafts is not None and num_drafts > most:
            raise ValueError(
                f"--tree-nodes is {num_drafts}, but {depth} levels (--gamma) of {top_k} children (--tree-topk) have "
                f"{most} nodes"
            )
        return cls(kind == "dynamic", min(DEFAULT_NODES, most) if num_drafts is None else num_drafts, top_k, depth)

    @property
    def num_kept(self) -> int:
        """Rows that the draft keeps of a request while its tree grows: the anchor's and those of all frontiers."""
        return 1 + (self.depth - 1) * self.top_k


class Frontier(NamedTuple):
    """The rows of one level behind the first. ``tokens`` and ``parents`` [R, k]: of each node, the latter as places in
    the frontier before. ``seen`` [R, k, 1 + level·k] bool: which rows it sees, the anchor's and those of the frontiers
    so far."""

    level: int
    tokens: np.ndarray
    parents: np.ndarray
    seen: np.ndarray


Advance = Callable[["Frontier | None"], torch.Tensor]
"""``advance(frontier)`` -> the logits [R·k, V] behind its nodes; None for the anchors, [R, V]. Collective."""


class TreeGrower:
    """Grows the trees of a step. ``group``: the ranks that must have the same."""

    def __init__(self, shape: TreeShape, group: Group, device: torch.device) -> None:
        self._shape, self._group, self._device = shape, group, device

    def grow(self, anchors: list[int], decides: bool, advance: Advance) -> tuple[DraftTree, ...] | None:
        """The tree behind each anchor. Collective; ranks that do not decide get None."""
        num_requests, shape = len(anchors), self._shape
        levels = Levels(shape, num_requests) if decides else None
        frontier = None
        for level in range(shape.depth):
            logits = advance(frontier)
            if levels is not None:
                levels.add(*self._children(logits, num_requests))
            if level + 1 < shape.depth:
                frontier = self._agree(level, levels, num_requests, frontier)
        return None if levels is None else levels.trees(anchors)

    def _children(self, logits: torch.Tensor, num_requests: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and log-probabilities [R, rows of a request, k] of the likeliest children."""
        law = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        top = law.topk(self._shape.top_k, dim=-1)
        rows = (num_requests, len(logits) // max(num_requests, 1), self._shape.top_k)
        return top.indices.cpu().numpy().reshape(rows), top.values.double().cpu().numpy().reshape(rows)

    def _agree(self, level: int, levels: Levels | None, num_requests: int, before: Frontier | None) -> Frontier:
        """The next frontier, on all ranks."""
        k = self._shape.top_k
        table = torch.empty((num_requests, 2, k), dtype=torch.int64, device=self._device)
        if levels is not None:
            table = torch.from_numpy(np.stack(levels.next_frontier(), axis=1)).to(self._device)
        if num_requests:
            table = broadcast(table, self._group)
        tokens, parents = table.cpu().numpy().transpose(1, 0, 2)
        own = np.broadcast_to(np.eye(k, dtype=bool), (num_requests, k, k))
        above = np.ones((num_requests, k, 1), bool)
        if before is not None:
            above = np.take_along_axis(before.seen, parents[:, :, None], axis=1)
        return Frontier(level + 1, tokens, parents, np.concatenate((above, own), axis=2))


class Levels:
    """All nodes that have come up, level by level. Arrays of a level are [R, m], children of a node side by side."""

    def __init__(self, shape: TreeShape, num_requests: int) -> None:
        first, ratio = RANK_SHARES
        self._ranks = None if shape.is_dynamic else np.log(first) + np.log(ratio) * np.arange(shape.top_k)
        self._shape, self._count = shape, 0
        self._tokens: list[np.ndarray] = []
        self._scores: list[np.ndarray] = []
        self._parents: list[np.ndarray] = []
        # Of the rows that are expanded next: their scores, and their numbers among all nodes.
        self._frontier = np.zeros((num_requests, 1)), np.full((num_requests, 1), ROOT)

    def add(self, tokens: np.ndarray, log_probs: np.ndarray) -> None:
        """The children [R, rows, k] of the rows that were expanded; those of probability 0 do not count."""
        gains = log_probs if self._ranks is None else np.where(np.isfinite(log_probs), self._ranks, -np.inf)
        scores, numbers = self._frontier
        flat = len(tokens), tokens.shape[1] * tokens.shape[2]
        self._tokens.append(tokens.reshape(flat))
        self._scores.append((scores[:, :, None] + gains).reshape(flat))
        self._parents.append(np.repeat(numbers, tokens.shape[2], axis=1))

    def next_frontier(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [R, k] of the best children of the latest level, and the places [R, k] of their parents among the rows
        that were expanded."""
        k, scores = self._shape.top_k, self._scores[-1]
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        self._frontier = np.take_along_axis(scores, best, axis=1), self._count + best
        self._count += scores.shape[1]
        return np.take_along_axis(self._tokens[-1], best, axis=1), best // k

    def trees(self, anchors: list[int]) -> tuple[DraftTree, ...]:
        """The best nodes of each request, behind its anchor."""
        columns = (np.concatenate(x, axis=1) for x in (self._tokens, self._scores, self._parents))
        return tuple(self._tree(anchor, *one) for anchor, *one in zip(anchors, *columns))

    def _tree(self, anchor: int, tokens: np.ndarray, scores: np.ndarray, parents: np.ndarray) -> DraftTree:
        # Stable: of equal scores the earlier node stays, which is never below the later one.
        best = np.argsort(-scores, kind="stable")[: self._shape.num_drafts]
        kept = np.sort(best[np.isfinite(scores[best])])
        above = np.where(parents[kept] == ROOT, 0, 1 + np.searchsorted(kept, parents[kept]))
        return DraftTree(np.concatenate(([anchor], tokens[kept])), np.concatenate(([ROOT], above)))
