"""Prefixes that several requests share: a tree of pages by the tokens in them, and the ring rows to resume behind each.

Legend: N snapshots, w rows saved, R ring rows.

A node stands for one page of tokens behind its parent's, so a path from the root spells a prefix. Entries are written
only by positions inside their page, so a full page never changes and any number of requests may read it. Rings do
change; what a request that goes on behind a page boundary reads of them is saved when the first request gets there, for
the target and for the draft, and put into the slot of each request that resumes there. The tree is a function of tokens
alone, so all ranks that hold a part of a request keep the same tree and restore their own part.

A request locks the path it stands on. Room is made by dropping the least recently used leaf that nobody stands on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .cache import Cache


@dataclass(eq=False)
class PrefixNode:
    """``page``: where the entries of its tokens are; ``snapshot``: the ring rows at its end; ``depth``: pages from the
    root on; ``users``: requests that stand on it or below."""

    key: tuple[int, ...]
    parent: PrefixNode | None
    page: int
    snapshot: int
    depth: int
    users: int = 0
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)

    def path(self) -> Iterator[PrefixNode]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class PrefixTree:
    """The stored prefixes of one DP rank, at most ``num_snapshots`` pages of them."""

    def __init__(self, cache: Cache, num_snapshots: int) -> None:
        self._cache, self.page_tokens = cache, cache.layout.page_tokens
        self._root = PrefixNode((), None, -1, -1, 0)
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._by_use: dict[PrefixNode, None] = {}
        self.num_evictable = 0
        """Pages that :meth:`make_room` can still give back."""
        self.num_evicted = 0
        """Pages dropped so far."""

    def __len__(self) -> int:
        return len(self._by_use)

    @property
    def root(self) -> PrefixNode:
        """The empty prefix."""
        return self._root

    def find(self, tokens: Sequence[int]) -> PrefixNode:
        """The deepest stored prefix of ``tokens`` that leaves at least one of them to run."""
        node, size = self._root, self.page_tokens
        for start in range(0, (len(tokens) - 1) // size * size, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            node = child
        return node

    def lock(self, node: PrefixNode) -> list[int]:
        """Stand on ``node``; the pages from the root to it, in order."""
        pages = []
        for above in node.path():
            self._add_user(above)
            self._touch(above)
            pages.append(above.page)
        return pages[::-1]

    def unlock(self, node: PrefixNode) -> None:
        """Stop standing on ``node``."""
        for above in node.path():
            above.users -= 1
            self.num_evictable += above.users == 0

    def extend(self, node: PrefixNode, key: Sequence[int], page: int) -> tuple[PrefixNode, bool] | None:
        """Move one that stands on ``node`` to its child for the tokens ``key``, and whether that is new.

        A new child stores ``page`` and takes a snapshot; None if there is none to take.
        """
        key = tuple(key)
        child = node.children.get(key)
        is_new = child is None
        if child is None:
            if not self._free and not self._evict():
                return None
            child = PrefixNode(key, node, page, self._free.pop(), node.depth + 1)
            node.children[key] = child
            self._cache.hold(page)
            self.num_evictable += 1
        self._add_user(child)
        for above in child.path():
            self._touch(above)
        return child, is_new

    def make_room(self, num_pages: int) -> bool:
        """Drop stored pages until the cache has ``num_pages`` free ones; False, dropping nothing, if it cannot."""
        if num_pages > self._cache.num_free_pages + self.num_evictable:
            return False
        while self._cache.num_free_pages < num_pages:
            if not self._evict():
                return False
        return True

    def clear(self) -> None:
        """Drop everything that nobody stands on."""
        while self._evict():
            pass

    def _add_user(self, node: PrefixNode) -> None:
        self.num_evictable -= node.users == 0
        node.users += 1

    def _touch(self, node: PrefixNode) -> None:
        """Paths are touched from the end, so that a node is never older than those below it."""
        self._by_use.pop(node, None)
        self._by_use[node] = None

    def _evict(self) -> bool:
        node = next((node for node in self._by_use if not node.users and not node.children), None)
        if node is None:
            return False
        del self._by_use[node]
        del node.parent.children[node.key]
        self._free.append(node.snapshot)
        self._cache.drop(node.page)
        self.num_evictable -= 1
        self.num_evicted += 1
        return True


class RingCopy(NamedTuple):
    """Save the ring rows of ``slot`` before ``position`` as ``snapshot``, or restore them from it."""

    slot: int
    position: int
    snapshot: int
    restores: bool


class RingSnapshots:
    """Room for ``num_snapshots`` copies of the ring rows that a request resuming at a page boundary reads."""

    def __init__(self, cache: Cache, num_snapshots: int) -> None:
        self._layers, layout = cache.layers, cache.layout
        self._device = cache.page_table.device
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        for sizes, layer in zip(layout.layers, cache.layers):
            rows = layout.resume_rows(sizes)
            self._saved.append(
                tuple(
                    ring.new_empty((num_snapshots, count, ring.shape[2]))
                    for ring, count in zip((layer.window, layer.raw), rows)
                )
            )

    def apply(self, copy: RingCopy) -> None:
        """Save or restore; positions before the first token are copied too, and never read."""
        for layer, saved in zip(self._layers, self._saved):
            for ring, rows in zip((layer.window, layer.raw), saved):
                count = rows.shape[1]
                if not count:
                    continue
                at = torch.arange(copy.position - count, copy.position, device=self._device) % ring.shape[1]
                if copy.restores:
                    ring[copy.slot, at] = rows[copy.snapshot]
                else:
                    rows[copy.snapshot] = ring[copy.slot, at]
