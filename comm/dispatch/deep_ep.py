"""Rows moved by deep_ep's class ``Buffer``: its normal mode (two hops, exact sizes) and low latency (one hop, fixed
buffers).

Legend: t rows here, D hidden width, k experts per row, L local experts, W ranks of the expert group, N rows received.

Both modes may share one buffer, but normal mode leaves it dirty for low latency, so it is cleaned when the mode
changes; steps are of one mode on all ranks, so all clean at once. What the library starts runs on its own stream; a
finish makes the current stream wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch

from ...parallel.groups import Groups
from .auto import Auto as AutoOf
from .base import DispatchSizes, Order, Received, StepRows
from .deep_ep_library import check_buffer, load_everywhere
from .low_latency import FP8_GROUP
from .rows import aligned, check_most_rows

DEFAULT_QUEUES = 24
ROWS_STEP = 4
"""The library wants ranks x rows of the fixed buffers to be a multiple of this."""


class SharedBuffer:
    """The library's buffer of one expert group, for one mode or both. Making it is collective over ``moe_ep``.

    Raises ``ValueError`` for sizes beyond the library's limits, and if it cannot be used.
    """

    def __init__(self, groups: Groups, sizes: DispatchSizes, *, normal: bool, low_latency: bool) -> None:
        check_buffer(groups, sizes, normal, low_latency)
        library, size = load_everywhere("Buffer", groups, sizes), groups.moe_ep.size
        num_local = sizes.num_experts // size
        self.max_tokens = -(-sizes.max_tokens_per_rank // ROWS_STEP) * ROWS_STEP
        self._sizes, self._dirty, self._open = sizes, False, 0
        self._arriving: Callable[[], None] | None = None
        num_nvl = num_rdma = 0
        if normal:
            for config in (library.get_dispatch_config(size), library.get_combine_config(size)):
                num_nvl = max(num_nvl, config.get_nvl_buffer_size_hint(2 * sizes.hidden_size, size))
                num_rdma = max(num_rdma, config.get_rdma_buffer_size_hint(2 * sizes.hidden_size, size))
        if low_latency:
            shape = (self.max_tokens, sizes.hidden_size, size, sizes.num_experts)
            num_rdma = max(num_rdma, library.get_low_latency_rdma_size_hint(*shape))
        self.api = library(
            groups.moe_ep.pg,
            num_nvl_bytes=num_nvl,
            num_rdma_bytes=num_rdma,
            low_latency_mode=low_latency,
            num_qps_per_rank=max(DEFAULT_QUEUES, num_local) if normal else num_local,
        )
        if low_latency:
            self._check_queues(self.api.nvshmem_qp_depth)

    def _check_queues(self, depth: int) -> None:
        if depth < 2 * (self.max_tokens + 1):
            raise ValueError(
                f"deep_ep's queues hold {depth} messages (NVSHMEM_QP_DEPTH), but --max-tokens-per-rank "
                f"{self.max_tokens} needs {2 * (self.max_tokens + 1)}; raise the one or lower the other"
            )

    def use_normal(self) -> None:
        """A step of normal mode begins."""
        self._dirty = True

    def use_low_latency(self) -> None:
        """A step of low latency begins. Collective over ``moe_ep`` if the last one was of normal mode."""
        if self._dirty:
            sizes = self._sizes
            self.api.clean_low_latency_buffer(self.max_tokens, sizes.hidden_size, sizes.num_experts)
            self._dirty = False

    def begin_exchange(self) -> None:
        """Low latency has two buffers; ``RuntimeError`` if both are in use."""
        if self._open == 2:
            raise RuntimeError("two dispatches are under way, and there are two buffers: finish a combine first")
        self._open += 1

    def before_sending(self) -> None:
        """Receive what is still on its way: each low-latency kernel that sends clears the flags of the other buffer."""
        if self._arriving is not None:
            self._arriving()

    def sent(self, hook: Callable[[], None]) -> Callable[[], None]:
        """The receiving ``hook`` of a low-latency kernel just started, made safe to be called again."""

        def receive() -> None:
            if self._arriving is receive:
                self._arriving = None
                hook()

        self._arriving = receive
        return receive

    def end_exchange(self) -> None:
        """The buffer of an exchange is free again."""
        self._open -= 1


class Normal:
    """See :class:`.base.Dispatcher`. Results are not cut into pieces."""

    all_to_all: ClassVar[bool] = True
    limits: ClassVar[tuple[bool, bool]] = (False, False)
    sends_fp8: ClassVar[bool] = False

    def __init__(self, groups: Groups, sizes: DispatchSizes, buffer: SharedBuffer | None = None) -> None:
        self._groups, self._sizes, self._order = groups, sizes, Order()
        self._buffer = buffer or SharedBuffer(groups, sizes, normal=True, low_latency=False)

    def twin(self) -> Normal:
        """See :meth:`.base.Dispatcher.twin`."""
        return Normal(self._groups, self._sizes, self._buffer)

    def open(self, rows: StepRows) -> None:
        """See :meth:`.base.Dispatcher.open`."""
        self._order.enter("open")
        self._buffer.use_normal()

    def begin_dispatch(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        """See :meth:`.base.Dispatcher.begin_dispatch`. The host waits for the numbers of rows."""
        self._order.enter("begin_dispatch")
        library, self._sent = self._buffer.api, (x.contiguous(), experts.contiguous(), weights.contiguous())
        x, experts, weights = self._sent
        per_rank, per_node, per_expert, in_rank, _ = library.get_dispatch_layout(experts, self._sizes.num_experts)
        self._arriving = library.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=experts,
            topk_weights=weights,
            expert_alignment=max(1, self._sizes.alignment),
            async_finish=True,
        )

    def finish_dispatch(self) -> Received:
        """See :meth:`.base.Dispatcher.finish_dispatch`."""
        self._order.enter("finish_dispatch", 1)
        x, experts, weights, counts, self._handle, event = self._arriving
        event.current_stream_wait()
        return Received(x, experts, weights, counts if self._sizes.alignment else None)

    def begin_combine(self, y: torch.Tensor) -> None:
        """See :meth:`.base.Dispatcher.begin_combine`."""
        self._order.enter("begin_combine")
        self._sent = (y.contiguous(),)
        self._returning = self._buffer.api.combine(*self._sent, self._handle, async_finish=True)

    def finish_combine(self) -> torch.Tensor:
        """See :meth:`.base.Dispatcher.finish_combine`."""
        self._order.enter("finish_combine")
        out, _, event = self._returning
        event.current_stream_wait()
        self._sent = self._arriving = self._handle = self._returning = None
        return out


class LowLatency:
    """See :class:`.base.Dispatcher`. Results are not cut into pieces."""

    all_to_all: ClassVar[bool] = True
    limits: ClassVar[tuple[bool, bool]] = (True, True)
    sends_fp8: ClassVar[bool] = True

    def __init__(self, groups: Groups, sizes: DispatchSizes, buffer: SharedBuffer | None = None) -> None:
        self._groups, self._sizes, self._order = groups, sizes, Order()
        self._buffer = buffer or SharedBuffer(groups, sizes, normal=False, low_latency=True)

    def twin(self) -> LowLatency:
        """See :meth:`.base.Dispatcher.twin`."""
        return LowLatency(self._groups, self._sizes, self._buffer)

    def open(self, rows: StepRows) -> None:
        """See :meth:`.base.Dispatcher.open`."""
        self._order.enter("open")
        check_most_rows(rows, self._groups, self._sizes.max_tokens_per_rank)
        self._buffer.use_low_latency()

    def begin_dispatch(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        """See :meth:`.base.Dispatcher.begin_dispatch`."""
        self._order.enter("begin_dispatch")
        self._buffer.begin_exchange()
        self._buffer.before_sending()
        self._sent = (x.contiguous(), experts.contiguous(), weights.contiguous())
        *self._arriving, _, hook = self._buffer.api.low_latency_dispatch(
            *self._sent[:2],
            self._buffer.max_tokens,
            self._sizes.num_experts,
            use_fp8=self._sizes.fp8,
            return_recv_hook=True,
        )
        self._receive = self._buffer.sent(hook)

    def finish_dispatch(self) -> Received:
        """See :meth:`.base.Dispatcher.finish_dispatch`. Every received row is for one expert."""
        self._order.enter("finish_dispatch", 1)
        self._receive()
        received, counts, self._handle = self._arriving
        x, scales = received if self._sizes.fp8 else (received, None)
        self._filled = torch.arange(x.shape[1], device=x.device) < counts.unsqueeze(1)
        rows = x[self._filled]
        if scales is not None:
            blocks = rows.float().unflatten(1, (-1, FP8_GROUP)) * scales[self._filled].unsqueeze(2)
            rows = blocks.flatten(1).to(self._sizes.dtype)
        experts = torch.arange(x.shape[0], device=x.device).repeat_interleave(counts.long(), output_size=rows.shape[0])
        weights = torch.ones((rows.shape[0], 1), dtype=torch.float32, device=x.device)
        return Received(rows, experts.unsqueeze(1), weights, aligned(counts, self._sizes.alignment))

    def begin_combine(self, y: torch.Tensor) -> None:
        """See :meth:`.base.Dispatcher.begin_combine`."""
        self._order.enter("begin_combine")
        library = self._buffer.api
        outgoing = library.get_next_low_latency_combine_buffer(self._handle)
        outgoing[self._filled] = y
        _, experts, weights = self._sent
        self._buffer.before_sending()
        self._returning, _, hook = library.low_latency_combine(
            outgoing, experts, weights, self._handle, zero_copy=True, return_recv_hook=True
        )
        self._receive = self._buffer.sent(hook)

    def finish_combine(self) -> torch.Tensor:
        """See :meth:`.base.Dispatcher.finish_combine`. Good until the second exchange after this one."""
        self._order.enter("finish_combine")
        self._receive()
        self._buffer.end_exchange()
        out, self._sent, self._arriving, self._handle, self._returning = self._returning, None, None, None, None
        return out


class Auto(AutoOf):
    """See :class:`.auto.Auto`; both modes on one buffer."""

    kinds: ClassVar = (Normal, LowLatency)
    limits: ClassVar[tuple[bool, bool]] = (False, True)

    def __init__(self, groups: Groups, sizes: DispatchSizes, members: tuple[Normal, LowLatency] | None = None) -> None:
        if members is None:
            buffer = SharedBuffer(groups, sizes, normal=True, low_latency=True)
            members = (Normal(groups, sizes, buffer), LowLatency(groups, sizes, buffer))
        super().__init__(groups, sizes, members)
