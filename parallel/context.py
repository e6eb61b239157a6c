"""Which tokens of a step each context-parallel rank holds, and how much causal work that gives it. Pure.

T tokens of a step, request after request; R context-parallel ranks. A split lists, for every rank, the indices of its
tokens in the order in which it holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Split:
    """``owned[r]``: int64 indices of rank r's tokens, in its row order. ``rows``: rows every rank has with padding."""

    owned: tuple[np.ndarray, ...]
    rows: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(len(tokens) for tokens in self.owned)

    def token_rows(self) -> np.ndarray:
        """[T] int64: where each token lies among the ``R * rows`` padded rows, gathered in rank order."""
        where = np.empty(sum(self.sizes), dtype=np.int64)
        for rank, tokens in enumerate(self.owned):
            where[tokens] = rank * self.rows + np.arange(len(tokens))
        return where

    def per_request(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """For each rank, how many of its tokens belong to each request."""
        ends = np.cumsum(lengths)
        return tuple(
            tuple(np.bincount(np.searchsorted(ends, tokens, side="right"), minlength=len(lengths)).tolist())
            for tokens in self.owned
        )


def _split(owned: Sequence[np.ndarray], multiple: int) -> Split:
    longest = max(len(tokens) for tokens in owned)
    return Split(tuple(owned), -(-longest // multiple) * multiple)


def contiguous(num_tokens: int, cp: int) -> Split:
    """Rank r holds one run of tokens, from ``r T / R`` to ``(r + 1) T / R`` rounded down."""
    borders = [rank * num_tokens // cp for rank in range(cp + 1)]
    return _split([np.arange(a, b) for a, b in zip(borders, borders[1:])], 1)


def striped(num_tokens: int, cp: int) -> Split:
    """Rank r holds tokens r, r + R, r + 2R, ..."""
    return _split([np.arange(rank, num_tokens, cp) for rank in range(cp)], 1)


def interleave(num_tokens: int, cp: int) -> Split:
    """As :func:`striped`, over a whole batch whatever its requests, with rows padded to a multiple of R."""
    return _split(striped(num_tokens, cp).owned, cp)


def zigzag(lengths: Sequence[int], cp: int) -> Split:
    """Each request is cut in 2R blocks (the first ``length mod 2R`` one longer); rank r holds blocks r and 2R - 1 - r.

    A rank holds its early blocks of all requests, then its late ones; rows are padded to a multiple of 2R.
    """
    blocks: list[list[np.ndarray]] = [[] for _ in range(2 * cp)]
    start = 0
    for length in lengths:
        size, longer = divmod(length, 2 * cp)
        for index in range(2 * cp):
            end = start + size + (index < longer)
            blocks[index].append(np.arange(start, end))
            start = end
    early_late = [blocks[rank] + blocks[2 * cp - 1 - rank] for rank in range(cp)]
    empty = np.empty(0, dtype=np.int64)
    return _split([np.concatenate([empty, *runs]) for runs in early_late], 2 * cp)


def causal_pairs(split: Split) -> np.ndarray:
    """[R, R] int64: query-key pairs of one causal sequence between the queries of rank i and the keys of rank j."""
    keys = [np.sort(tokens) for tokens in split.owned]
    pairs = [[int(np.searchsorted(k, q, side="right").sum()) for k in keys] for q in split.owned]
    return np.array(pairs, dtype=np.int64)


def imbalance(split: Split) -> float:
    """The most causal work of a rank over the mean; 1.0 is perfect."""
    work = causal_pairs(split).sum(1)
    return float(work.max() / work.mean())


def ring_wall(split: Split) -> int:
    """Pairs on the critical path of a ring: in step s rank r sees the keys of rank r - s; all wait for the slowest."""
    pairs, ranks = causal_pairs(split), np.arange(len(split.owned))
    return int(sum(pairs[ranks, (ranks - step) % len(ranks)].max() for step in range(len(ranks))))
