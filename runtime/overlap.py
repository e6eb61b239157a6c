"""When communication is hidden behind computation, and how a step is cut in two for it.

``tbo``: a step is two half batches whose stages take turns. ``sbo``: the shared expert runs while rows travel, and
finished blocks of the experts' results are sent while others are computed. Both are decided from what all ranks know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .step import Span

MIN_SHARE = 0.48
"""A half is cut inside a request if no border between requests leaves it this share of the tokens."""


class Mode(NamedTuple):
    """``halves``: a step is cut in two. ``pieces``: results are sent back while others are computed."""

    halves: bool
    pieces: bool


MODES = {"none": Mode(False, False), "tbo": Mode(True, False), "sbo": Mode(False, True)}


class Rule:
    """Whether a step overlaps. ``min_rows``: rows on the busiest rank below which it does not pay; ``num_ranks`` of the
    tp group, of which more than one must be there to communicate."""

    def __init__(self, mode: str, min_rows: int, num_ranks: int) -> None:
        self._mode = MODES[mode] if num_ranks > 1 else MODES["none"]
        self._min_rows = min_rows

    @property
    def wants_halves(self) -> bool:
        """Whether any step may be cut in two."""
        return self._mode.halves

    def in_halves(self, counts: Sequence[int], first: Sequence[int], second: Sequence[int]) -> bool:
        """Whether the step of ``counts`` rows by owner is run as halves of ``first`` and ``second`` rows: both must
        have some, on whatever rank."""
        return self._mode.halves and max(counts) >= self._min_rows and sum(first) > 0 < sum(second)

    def in_pieces(self, counts: Sequence[int]) -> bool:
        """Whether the step's results are sent back in pieces."""
        return self._mode.pieces and max(counts) >= self._min_rows


class Cut(NamedTuple):
    """The first half: ``index`` whole requests and the first ``offset`` tokens of the next."""

    index: int
    offset: int


def find_cut(lengths: Sequence[int], has_prefill: bool) -> Cut:
    """Where a step of requests with ``lengths`` tokens is cut.

    Without prefill after half of the requests. With prefill at the border that leaves the halves most alike, of two
    the later; or, if that leaves one with less than :data:`MIN_SHARE` of the tokens, in the middle of the tokens.
    """
    if not has_prefill:
        return Cut(len(lengths) // 2, 0)
    total, left, best = sum(lengths), 0, Cut(0, 0)
    best_left = 0
    for index, length in enumerate(lengths[:-1], start=1):
        left += length
        if index == 1 or abs(total - 2 * left) <= abs(total - 2 * best_left):
            best, best_left = Cut(index, 0), left
    if total < 2 or MIN_SHARE * total <= best_left <= (1 - MIN_SHARE) * total:
        return best
    index, offset = 0, total // 2
    while offset >= lengths[index]:
        offset -= lengths[index]
        index += 1
    return Cut(index, offset)


def halve(spans: Sequence[Span], cut: Cut) -> tuple[list[Span], list[Span]]:
    """The spans of both halves, in order: the second goes on where the first ends. A tree stays whole, in the first."""
    first, second = list(spans[: cut.index]), list(spans[cut.index :])
    if cut.offset and second[0].tree is not None:
        first.append(second.pop(0))
    elif cut.offset:
        slot, start, tokens, num_logits, _ = second[0]
        rest = len(tokens) - cut.offset
        first.append(Span(slot, start, tokens[: cut.offset], max(num_logits - rest, 0)))
        second[0] = Span(slot, start + cut.offset, tokens[cut.offset :], min(num_logits, rest))
    return first, second
