"""Trees of drafts: several continuations of one request that share their beginnings, verified in one forward.

Shapes: n nodes of a tree, N drafts of a tree at most (n <= N + 1), R requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

ROOT = -1
"""The parent of a node that has none."""


@dataclass(frozen=True)
class DraftTree:
    """Node 0 is the anchor, every other node a draft that follows its parent. Siblings differ in their tokens."""

    tokens: np.ndarray
    """[n] int64."""
    parents: np.ndarray
    """[n] int64: ``ROOT`` for node 0, a smaller node for every other."""

    @classmethod
    def lone(cls, anchor: int) -> DraftTree:
        """An anchor without drafts."""
        return cls(np.array([anchor], np.int64), np.array([ROOT], np.int64))

    @property
    def num_drafts(self) -> int:
        """n - 1."""
        return len(self.tokens) - 1

    @cached_property
    def sees(self) -> np.ndarray:
        """[n, n] bool: whether node i is node j or follows it; the tree's part of the attention mask."""
        seen = np.eye(len(self.tokens), dtype=bool)
        for node, parent in enumerate(self.parents[1:].tolist(), start=1):
            seen[node] |= seen[parent]
        return seen

    @cached_property
    def depths(self) -> np.ndarray:
        """[n] int64: drafts up to and including the node; its position behind the anchor's."""
        return self.sees.sum(axis=1) - 1

    @cached_property
    def children(self) -> list[list[int]]:
        """Of each node, in order."""
        found: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents[1:].tolist(), start=1):
            found[parent].append(node)
        return found

    def path(self, node: int) -> list[int]:
        """The nodes from the anchor to ``node``."""
        return np.flatnonzero(self.sees[node]).tolist()

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` with ``token``, if there is one."""
        return next((child for child in self.children[node] if self.tokens[child] == token), None)

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The nodes of ``tokens``, which lead down from the anchor; the anchor itself is the first."""
        nodes = [0]
        for token in tokens:
            nodes.append(self.child(nodes[-1], token))
        assert None not in nodes, (self, tokens)
        return nodes

    def cut(self, depth: int) -> DraftTree:
        """The nodes down to ``depth``."""
        kept = np.flatnonzero(self.depths <= depth)
        if len(kept) == len(self.tokens):
            return self
        parents = np.searchsorted(kept, self.parents[kept])
        parents[0] = ROOT
        return DraftTree(self.tokens[kept], parents)


def trees_to_tensor(trees: Sequence[DraftTree], num_drafts: int) -> torch.Tensor:
    """[R, 1 + 2 (N + 1)] int64 for N = ``num_drafts``: n, tokens, parents. The shape is known to every rank before it
    arrives."""
    table = np.zeros((len(trees), message_width(num_drafts)), np.int64)
    for row, tree in zip(table, trees):
        n = row[0] = len(tree.tokens)
        row[1 : 1 + n], row[2 + num_drafts : 2 + num_drafts + n] = tree.tokens, tree.parents
    return torch.from_numpy(table)


def trees_from_tensor(tensor: torch.Tensor) -> tuple[DraftTree, ...]:
    """The inverse of :func:`trees_to_tensor`, from any device."""
    table = tensor.cpu().numpy()
    half = table.shape[1] // 2
    return tuple(DraftTree(row[1 : 1 + row[0]], row[1 + half : 1 + half + row[0]]) for row in table)


def message_width(num_drafts: int) -> int:
    """Columns of :func:`trees_to_tensor`."""
    return 1 + 2 * (num_drafts + 1)
