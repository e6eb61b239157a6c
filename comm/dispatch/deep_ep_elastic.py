"""Rows moved by deep_ep's class ``ElasticBuffer``: one kind of call for prefill and decoding, on buffers of a fixed
size.

Legend: t rows here, D hidden width, k experts per row, W ranks of the expert group, N rows received.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ...parallel.groups import Groups
from .base import DispatchSizes, Order, Received, StepRows
from .deep_ep_library import check_elastic, load_everywhere
from .rows import check_most_rows


class Elastic:
    """See :class:`.base.Dispatcher`. Results are not cut into pieces. Making one is collective over ``moe_ep``."""

    all_to_all: ClassVar[bool] = True
    limits: ClassVar[tuple[bool, bool]] = (True, True)
    sends_fp8: ClassVar[bool] = False

    def __init__(self, groups: Groups, sizes: DispatchSizes, library: Any = None) -> None:
        self._groups, self._sizes, self._order = groups, sizes, Order()
        if library is None:
            check_elastic(groups, sizes)
            buffer_class = load_everywhere("ElasticBuffer", groups, sizes)
            shape = (sizes.max_tokens_per_rank, sizes.hidden_size, sizes.top_k)
            num_bytes = buffer_class.get_buffer_size_hint(groups.moe_ep.pg, *shape)
            names = dict(zip(("num_max_tokens_per_rank", "hidden", "num_topk"), shape))
            library = buffer_class(groups.moe_ep.pg, num_bytes=num_bytes, **names)
        self._library = library

    def twin(self) -> Elastic:
        """See :meth:`.base.Dispatcher.twin`."""
        return Elastic(self._groups, self._sizes, self._library)

    def open(self, rows: StepRows) -> None:
        """See :meth:`.base.Dispatcher.open`."""
        self._order.enter("open")
        check_most_rows(rows, self._groups, self._sizes.max_tokens_per_rank)

    def begin_dispatch(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        """See :meth:`.base.Dispatcher.begin_dispatch`. The host waits for the numbers of rows."""
        self._order.enter("begin_dispatch")
        self._sent = (x.contiguous(), experts.contiguous(), weights.contiguous())
        self._arriving = self._library.dispatch(
            *self._sent,
            num_experts=self._sizes.num_experts,
            num_max_tokens_per_rank=self._sizes.max_tokens_per_rank,
            expert_alignment=max(1, self._sizes.alignment),
            async_with_compute_stream=True,
        )

    def finish_dispatch(self) -> Received:
        """See :meth:`.base.Dispatcher.finish_dispatch`."""
        self._order.enter("finish_dispatch", 1)
        x, experts, weights, self._handle, event = self._arriving
        event.current_stream_wait()
        # The library leaves the weights of other ranks' experts in place.
        weights = torch.where(experts >= 0, weights, 0.0)
        counts = self._handle.num_recv_tokens_per_expert_list if self._sizes.alignment else None
        return Received(x, experts, weights, counts)

    def begin_combine(self, y: torch.Tensor) -> None:
        """See :meth:`.base.Dispatcher.begin_combine`."""
        self._order.enter("begin_combine")
        self._sent = (y.contiguous(),)
        self._returning = self._library.combine(*self._sent, self._handle, async_with_compute_stream=True)

    def finish_combine(self) -> torch.Tensor:
        """See :meth:`.base.Dispatcher.finish_combine`."""
        self._order.enter("finish_combine")
        out, _, event = self._returning
        event.current_stream_wait()
        self._sent = self._arriving = self._handle = self._returning = None
        return out
