"""Two hops for steps with prefill on any rank, one hop for all others; every rank knows which."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...parallel.groups import Groups
from .base import Dispatcher, DispatchSizes, Order, Received, StepRows
from .low_latency import LowLatency
from .normal import Normal


class Auto:
    """See :class:`.base.Dispatcher`. ``kinds``: classes for steps with and without prefill."""

    all_to_all: ClassVar[bool] = True
    kinds: ClassVar[tuple[type[Dispatcher], type[Dispatcher]]] = (Normal, LowLatency)
    limits: ClassVar[tuple[bool, bool]] = (Normal.limits[0], LowLatency.limits[1])
    sends_fp8: ClassVar[bool] = True

    def __init__(
        self, groups: Groups, sizes: DispatchSizes, members: tuple[Dispatcher, Dispatcher] | None = None
    ) -> None:
        self._groups, self._sizes = groups, sizes
        self._prefill, self._decode = members or tuple(kind(groups, sizes) for kind in self.kinds)
        self._now, self._order = self._prefill, Order()

    def twin(self) -> Auto:
        """See :meth:`.base.Dispatcher.twin`."""
        return type(self)(self._groups, self._sizes, (self._prefill.twin(), self._decode.twin()))

    def open(self, rows: StepRows) -> None:
        """See :meth:`.base.Dispatcher.open`."""
        self._order.enter("open")
        self._now = self._prefill if rows.has_prefill else self._decode
        self._now.open(rows)

    def begin_dispatch(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        """See :meth:`.base.Dispatcher.begin_dispatch`."""
        self._order.enter("begin_dispatch")
        self._now.begin_dispatch(x, experts, weights)

    def finish_dispatch(self) -> Received:
        """See :meth:`.base.Dispatcher.finish_dispatch`."""
        received = self._now.finish_dispatch()
        self._order.enter("finish_dispatch", len(received.pieces))
        return received

    def begin_combine(self, y: torch.Tensor) -> None:
        """See :meth:`.base.Dispatcher.begin_combine`."""
        self._order.enter("begin_combine")
        self._now.begin_combine(y)

    def finish_combine(self) -> torch.Tensor:
        """See :meth:`.base.Dispatcher.finish_combine`."""
        self._order.enter("finish_combine")
        return self._now.finish_combine()
