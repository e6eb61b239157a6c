"""The rows of one forward between attention and experts.

Legend: T rows of this attention rank (the same on its attn_tp ranks), t of them that the layers outside attention work
on here: all, or this rank's slice where rows travel to their experts.
"""

from __future__ import annotations

import torch

from ...parallel.groups import Groups
from ..collectives import Pending, all_gather_v, start_all_reduce, start_reduce_scatter_v
from .base import Dispatcher, StepRows
from .rows import shares


class Exchange:
    """Opens ``dispatcher`` for a step of ``rows``; raises as :meth:`.base.Dispatcher.open` does.

    ``in_pieces``: whether the experts send back finished blocks while they compute others. ``is_first``: whether this
    rank is the first context-parallel rank with its rows.
    """

    def __init__(self, groups: Groups, dispatcher: Dispatcher, rows: StepRows) -> None:
        self.dispatcher, self.in_pieces = dispatcher, rows.in_pieces
        self.is_first = rows.is_split or groups.attn_cp.rank == 0
        self._group, count = groups.attn_tp, rows.counts[groups.attn_rows.rank]
        self._shares = shares(count, self._group.size) if dispatcher.all_to_all else None
        dispatcher.open(rows)

    def count_own(self, num_rows: int) -> int:
        """t, of T = ``num_rows``."""
        return num_rows if self._shares is None else self._shares[self._group.rank]

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """The rows here [t, ...] of attention rows [T, ...]."""
        return x if self._shares is None else x.split(self._shares)[self._group.rank]

    def for_attention(self, x: torch.Tensor) -> torch.Tensor:
        """The attention rows [T, ...] from those here [t, ...]. Collective over attn_tp where they are slices."""
        return x if self._shares is None else all_gather_v(x, self._group, self._shares)

    def start_sum(self, x: torch.Tensor) -> Pending:
        """Sums over attn_tp of ``x`` [T, D], this rank's summand, for the rows here [t, D], in flight. Collective."""
        if self._shares is None:
            return start_all_reduce(x, self._group)
        return start_reduce_scatter_v(x, self._group, self._shares)
