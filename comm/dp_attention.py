"""Rows between attention ranks and the experts, when no token travels to an expert by itself.

Attention works on the rows of its own DP and CP rank (the same rows on all its attn_tp ranks); a mixture of experts
without an all-to-all works on the rows of the whole tp group, and every rank adds what its experts contribute.

Legend: W row owners (dp x cp ranks), ``counts[w]`` rows of owner w, t rows here, M gathered rows, D width.

Two layouts of the gathered rows. SUM_LEN: rows of all owners one behind the other; the sums come back by an all-reduce
and a slice. MAX_LEN: every owner has the rows of the longest, rounded up to a multiple of attn_tp; the sums come back
by a reduce-scatter over tp and an all-gather over attn_tp, which moves less when the counts are alike.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch

from ..parallel.groups import Groups
from .collectives import all_gather, all_gather_v, start_all_reduce, start_reduce_scatter


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
    """The exchange of one step. ``counts``: rows of each owner, the same on every rank of the tp group.

    ``real``: bool [M], False for padding, or None when there is none.
    """

    def __init__(self, groups: Groups, counts: Sequence[int], padding: Padding, device: torch.device) -> None:
        self._groups, self._counts, self._padding = groups, list(counts), padding
        self._here = groups.attn_rows.rank
        self._longest = round_up(max(counts), groups.attn_tp.size)
        self.real: torch.Tensor | None = None
        if len(counts) > 1 and padding is Padding.MAX_LEN and any(count != self._longest for count in counts):
            real = torch.arange(self._longest) < torch.tensor(self._counts).unsqueeze(1)
            self.real = real.flatten().to(device)

    @property
    def num_rows(self) -> int:
        """M."""
        if len(self._counts) > 1 and self._padding is Padding.MAX_LEN:
            return self._longest * len(self._counts)
        return sum(self._counts)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [t, ...] -> the rows of all owners [M, ...]; padding is zero. Collective over the tp group."""
        owners = self._groups.attn_rows
        if self._padding is Padding.SUM_LEN:
            return all_gather_v(x, owners, self._counts)
        return all_gather(self._padded(x), owners)

    def start_scatter_sum(self, y: torch.Tensor) -> Callable[[], torch.Tensor]:
        """``y`` [M, D], this rank's summand for all rows; calling the result gives the sums of its own rows [t, D].

        Collective over the tp group; the sum is in flight until the result is called. ``y`` must be left alone.
        """
        tp, attn_tp, count = self._groups.tp, self._groups.attn_tp, self._counts[self._here]
        if len(self._counts) == 1:
            return start_all_reduce(y, tp).wait
        if self._padding is Padding.SUM_LEN:
            first, reduced = sum(self._counts[: self._here]), start_all_reduce(y, tp)
            return lambda: reduced.wait()[first : first + count]
        scattered = start_reduce_scatter(y, tp)
        return lambda: all_gather(scattered.wait(), attn_tp)[:count]

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        missing = self._longest - x.shape[0] if len(self._counts) > 1 else 0
        return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x
