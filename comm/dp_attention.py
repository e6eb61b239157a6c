"""Rows between attention ranks and the experts, when no token travels to an expert by itself.

Attention works on the rows of its own DP and CP rank (the same rows on all its attn_tp ranks); a mixture of experts
without an all-to-all works on the rows of the whole tp group, or of its moe_dp block, and every rank adds what its
experts contribute.

Legend: W row owners (dp x cp ranks), ``counts[w]`` rows of owner w, t rows here, M gathered rows, D width.

Two layouts of the gathered rows. SUM_LEN: rows of all owners one behind the other; the sums come back by an all-reduce
and a slice. MAX_LEN: every owner has the rows of the longest, rounded up to a multiple of attn_tp; the sums come back
by a reduce-scatter over the block and an all-gather over attn_tp, which moves less when the counts are alike.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch

from ..parallel.groups import Groups
from .collectives import (
    Pending,
    all_gather,
    start_all_gather,
    start_all_gather_v,
    start_all_reduce,
    start_reduce_scatter,
)


class Padding(enum.Enum):
    """How gathered rows are laid out, see the module text."""

    SUM_LEN = "sum_len"
    MAX_LEN = "max_len"


def round_up(count: int, multiple: int) -> int:
    """``count`` rounded up to a multiple of ``multiple``."""
    return -(-count // multiple) * multiple


def choose_padding(counts: Sequence[int], has_prefill: bool) -> Padding:
    """The layout for ``counts``, a function of what all ranks know.

    A single owner needs no padding decision (MAX_LEN). A step with prefill on any rank uses SUM_LEN, since lengths
    differ much; otherwise MAX_LEN as long as it is at most twice as many rows, counted as ``2 * sum >= max * W``.
    """
    if len(counts) == 1:
        return Padding.MAX_LEN
    if has_prefill:
        return Padding.SUM_LEN
    return Padding.MAX_LEN if 2 * sum(counts) >= max(counts) * len(counts) else Padding.SUM_LEN


class TokenExchange:
    """The exchange of one step between the owners of one moe_dp block (all owners, with one copy of the experts).

    ``counts``: rows of each owner of the tp group, the same on all its ranks. Padding rows are zero bytes.
    """

    def __init__(self, groups: Groups, counts: Sequence[int], has_prefill: bool) -> None:
        self._groups, self._here = groups, groups.moe_rows.rank
        first = groups.attn_rows.rank - self._here
        self._counts = list(counts[first : first + groups.moe_rows.size])
        self.padding = choose_padding(self._counts, has_prefill)
        self._longest = round_up(max(self._counts), groups.attn_tp.size)

    def start_gather(self, x: torch.Tensor) -> Pending:
        """``x`` [t, ...] -> the rows of all owners [M, ...], in flight. Collective over the block."""
        owners = self._groups.moe_rows
        if self.padding is Padding.SUM_LEN:
            return start_all_gather_v(x, owners, self._counts)
        return start_all_gather(self._padded(x), owners)

    def start_scatter_sum(self, y: torch.Tensor) -> Callable[[], torch.Tensor]:
        """``y`` [M, D], this rank's summand for all rows; calling the result gives the sums of its own rows [t, D].

        Collective over the block; the sum is in flight until the result is called. ``y`` must be left alone.
        """
        block, attn_tp, count = self._groups.moe_block, self._groups.attn_tp, self._counts[self._here]
        if len(self._counts) == 1:
            return start_all_reduce(y, block).wait
        if self.padding is Padding.SUM_LEN:
            first, reduced = sum(self._counts[: self._here]), start_all_reduce(y, block)
            return lambda: reduced.wait()[first : first + count]
        scattered = start_reduce_scatter(y, block)
        return lambda: all_gather(scattered.wait(), attn_tp)[:count]

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        missing = self._longest - x.shape[0] if len(self._counts) > 1 else 0
        return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x
