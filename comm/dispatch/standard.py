"""No row travels to an expert: every rank of the group sees all rows, adds what its experts contribute, and one sum
over the group completes both cuts of the experts, by whole ones (ep) and by width (moe_tp).

Legend: t rows here, M rows of the group, D hidden width, k experts per row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from ...parallel.groups import Groups
from ..collectives import Pending
from ..dp_attention import TokenExchange
from .base import DispatchSizes, Order, Received, StepRows
from .rows import RowFormat, count_ids, local_ids


class Standard:
    """See :class:`.base.Dispatcher`. Rows and routing of all owners of a moe_dp block are gathered, if there are
    several; results are not cut into pieces."""

    all_to_all: ClassVar[bool] = False
    limits: ClassVar[tuple[bool, bool]] = (False, False)
    sends_fp8: ClassVar[bool] = False

    def __init__(self, groups: Groups, sizes: DispatchSizes) -> None:
        self._groups, self._sizes = groups, sizes
        self._num_local = sizes.num_experts // groups.moe_ep.size
        self._first = groups.moe_ep.rank * self._num_local
        self._format, self._order = RowFormat(sizes), Order()
        self._finish: Callable[[], torch.Tensor] | None = None

    def twin(self) -> Standard:
        """See :meth:`.base.Dispatcher.twin`."""
        return Standard(self._groups, self._sizes)

    def open(self, rows: StepRows) -> None:
        """See :meth:`.base.Dispatcher.open`."""
        self._order.enter("open")
        self._exchange = TokenExchange(self._groups, rows.counts, rows.has_prefill)

    def begin_dispatch(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        """See :meth:`.base.Dispatcher.begin_dispatch`."""
        self._order.enter("begin_dispatch")
        if self._groups.moe_rows.size == 1:
            self._pending, self._routed = Pending(x), (experts, weights)
        else:
            self._pending, self._routed = self._exchange.start_gather(self._format.pack(x, experts, weights)), None

    def finish_dispatch(self) -> Received:
        """See :meth:`.base.Dispatcher.finish_dispatch`."""
        self._order.enter("finish_dispatch", 1)
        x = self._pending.wait()
        if self._routed is None:
            x, experts, weights = self._format.rows(x), self._format.experts(x), self._format.weights(x)
        else:
            experts, weights = self._routed
        local = experts if self._groups.moe_ep.size == 1 else local_ids(experts, self._first, self._num_local)
        return Received(x, local, weights, count_ids(local, self._num_local, self._sizes.alignment))

    def begin_combine(self, y: torch.Tensor) -> None:
        """See :meth:`.base.Dispatcher.begin_combine`. ``y`` must be left alone."""
        self._order.enter("begin_combine")
        self._finish = self._exchange.start_scatter_sum(y)

    def finish_combine(self) -> torch.Tensor:
        """See :meth:`.base.Dispatcher.finish_combine`."""
        self._order.enter("finish_combine")
        return self._finish()
