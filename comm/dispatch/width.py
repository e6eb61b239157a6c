"""Experts that are also cut by width: the ranks of a moe_tp group share their rows, and each sends all of them.

The rows of the group are gathered before the dispatch, every rank exchanges them with the ranks that hold the same cut,
and the sums, of which each rank has a part, are completed by a reduce-scatter that leaves each rank its own rows.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ...parallel.groups import Groups
from ..collectives import all_gather_v, reduce_scatter_v
from .base import Dispatcher, DispatchSizes, Received, StepRows
from .rows import RowFormat, rows_by_rank


class OverWidth:
    """See :class:`.base.Dispatcher`; ``inner`` exchanges between ranks with the same cut."""

    all_to_all: ClassVar[bool] = True

    def __init__(self, groups: Groups, sizes: DispatchSizes, inner: Dispatcher) -> None:
        self._groups, self._sizes, self._inner, self._format = groups, sizes, inner, RowFormat(sizes)

    def twin(self) -> OverWidth:
        """See :meth:`.base.Dispatcher.twin`."""
        return OverWidth(self._groups, self._sizes, self._inner.twin())

    def open(self, rows: StepRows) -> None:
        """See :meth:`.base.Dispatcher.open`."""
        by_rank, width = rows_by_rank(rows.counts, self._groups.attn_tp.size), self._groups.moe_tp.size
        first = self._groups.tp.rank - self._groups.moe_tp.rank
        self._shares = by_rank[first : first + width]
        self._inner.open(rows)

    def begin_dispatch(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        """See :meth:`.base.Dispatcher.begin_dispatch`."""
        form = self._format
        rows = all_gather_v(form.pack(x, experts, weights), self._groups.moe_tp, self._shares)
        self._inner.begin_dispatch(form.rows(rows), form.experts(rows), form.weights(rows))

    def finish_dispatch(self) -> Received:
        """See :meth:`.base.Dispatcher.finish_dispatch`."""
        return self._inner.finish_dispatch()

    def begin_combine(self, y: torch.Tensor) -> None:
        """See :meth:`.base.Dispatcher.begin_combine`."""
        self._inner.begin_combine(y)

    def finish_combine(self) -> torch.Tensor:
        """See :meth:`.base.Dispatcher.finish_combine`."""
        return reduce_scatter_v(self._inner.finish_combine(), self._groups.moe_tp, self._shares)
