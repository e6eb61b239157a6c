"""One hop, straight to the rank of each expert: for few rows, whose way must be short.

Legend: t rows here, D hidden width, k experts per row, E experts, W ranks, picks: (row, expert) pairs.

Each pick is one message without routing: rows are sorted by expert, and the numbers of rows for each expert travel
first. They arrive in one of two fixed buffers that hold the worst case, so nothing is allocated and nothing can
overflow; hence at most two exchanges may be under way, and a result is good until its combine ends. Weights stay at
home and are applied when the experts' outputs come back.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ...parallel.groups import Groups
from ..collectives import all_to_all, start_all_to_all_v
from .base import DispatchSizes, Order, Received, StepRows
from .rows import Cut, aligned, check_most_rows, num_pieces

FP8_GROUP = 128
"""Neighbouring numbers that share a scale."""


class Buffers:
    """Two receive buffers of ``capacity`` rows [capacity, row bytes], uint8, taken in turn."""

    def __init__(self, capacity: int, num_bytes: int, device: torch.device) -> None:
        self._free = [torch.empty((capacity, num_bytes), dtype=torch.uint8, device=device) for _ in range(2)]

    def take(self) -> torch.Tensor:
        """A free one; ``RuntimeError`` if both hold live results."""
        if not self._free:
            raise RuntimeError("two dispatches are under way, and there are two buffers: finish a combine first")
        return self._free.pop(0)

    def give_back(self, buffer: torch.Tensor) -> None:
        """The result in ``buffer`` is no longer needed."""
        self._free.append(buffer)


class LowLatency:
    """See :class:`.base.Dispatcher`."""

    all_to_all: ClassVar[bool] = True
    limits: ClassVar[tuple[bool, bool]] = (True, True)
    sends_fp8: ClassVar[bool] = True

    def __init__(self, groups: Groups, sizes: DispatchSizes, buffers: Buffers | None = None) -> None:
        self._groups, self._sizes, self._group = groups, sizes, groups.moe_ep
        self._num_local = sizes.num_experts // self._group.size
        if sizes.fp8 and sizes.hidden_size % FP8_GROUP:
            raise ValueError(f"8-bit dispatch needs a hidden size divisible by {FP8_GROUP}, not {sizes.hidden_size}")
        most = self._group.size * sizes.max_tokens_per_rank * min(sizes.top_k, self._num_local)
        self._buffers = buffers or Buffers(most, self._row_bytes, sizes.device)
        self._order = Order()

    @property
    def _row_bytes(self) -> int:
        wide = self._sizes.hidden_size
        return wide + 4 * (wide // FP8_GROUP) if self._sizes.fp8 else wide * self._sizes.dtype.itemsize

    def twin(self) -> LowLatency:
        """See :meth:`.base.Dispatcher.twin`."""
        return LowLatency(self._groups, self._sizes, self._buffers)

    def open(self, rows: StepRows) -> None:
        """See :meth:`.base.Dispatcher.open`."""
        self._order.enter("open")
        most = check_most_rows(rows, self._groups, self._sizes.max_tokens_per_rank)
        self._num_pieces = num_pieces(rows, most)

    def begin_dispatch(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        """See :meth:`.base.Dispatcher.begin_dispatch`."""
        self._order.enter("begin_dispatch")
        flat, size = experts.flatten(), self._group.size
        counts = torch.bincount(flat + 1, minlength=self._sizes.num_experts + 1)
        picks = flat.argsort(stable=True)[int(counts[0]) :]
        self._rows, self._weights = picks // experts.shape[1], weights.flatten()[picks].unsqueeze(1)
        self._num_rows, counts = x.shape[0], counts[1:].view(size, self._num_local)
        self._arriving = all_to_all(counts, self._group)
        self._sent, self._received = counts.sum(1).tolist(), self._arriving.sum(1).tolist()
        self._buffer = self._buffers.take()
        message = self._encode(x)[self._rows]
        self._pending = start_all_to_all_v(message, self._group, self._sent, self._received, self._buffer)

    def finish_dispatch(self) -> Received:
        """See :meth:`.base.Dispatcher.finish_dispatch`. Every received row is for one expert."""
        self._order.enter("finish_dispatch", self._num_pieces)
        x = self._decode(self._pending.wait())
        ids = torch.arange(self._num_local, device=x.device).repeat(self._group.size)
        local = ids.repeat_interleave(self._arriving.flatten())
        self._cut, self._returning = Cut.blocks(self._received, self._num_pieces, x.device, self._group.rank), []
        self._outgoing = Cut.blocks(self._sent, self._num_pieces, x.device, self._group.rank)
        counts = aligned(self._arriving.sum(0), self._sizes.alignment)
        ones = torch.ones((x.shape[0], 1), dtype=torch.float32, device=x.device)
        pieces = [self._cut.rows(piece) for piece in range(self._num_pieces)]
        return Received(x, local.unsqueeze(1), ones, counts, pieces)

    def begin_combine(self, y: torch.Tensor) -> None:
        """See :meth:`.base.Dispatcher.begin_combine`."""
        self._order.enter("begin_combine")
        piece = len(self._returning)
        sizes = self._cut.sizes(piece), self._outgoing.sizes(piece)
        self._returning.append(start_all_to_all_v(y, self._group, *sizes))

    def finish_combine(self) -> torch.Tensor:
        """See :meth:`.base.Dispatcher.finish_combine`."""
        self._order.enter("finish_combine")
        sums = torch.zeros((self._num_rows, self._sizes.hidden_size), dtype=torch.float32, device=self._rows.device)
        for piece, pending in enumerate(self._returning):
            y, here = pending.wait().float(), self._outgoing.rows(piece)
            sums.index_add_(0, self._rows[here], y * self._weights[here])
        self._buffers.give_back(self._buffer)
        return sums.to(self._sizes.dtype)

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [t, D] as bytes: its numbers, or 8-bit floats followed by a float32 scale for each group."""
        if not self._sizes.fp8:
            return x.contiguous().unsqueeze(-1).view(torch.uint8).flatten(1)
        groups = x.float().unflatten(1, (-1, FP8_GROUP))
        scales = groups.abs().amax(2).clamp(min=1e-10) / torch.finfo(torch.float8_e4m3fn).max
        small = (groups / scales.unsqueeze(2)).to(torch.float8_e4m3fn).flatten(1)
        return torch.cat((small.view(torch.uint8), scales.view(torch.uint8)), dim=1)

    def _decode(self, message: torch.Tensor) -> torch.Tensor:
        """The rows [N, D] of bytes [N, bytes]."""
        if not self._sizes.fp8:
            return message.view(self._sizes.dtype)
        wide = self._sizes.hidden_size
        groups = message[:, :wide].contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (-1, FP8_GROUP))
        scales = message[:, wide:].contiguous().view(torch.float32)
        return (groups * scales.unsqueeze(2)).flatten(1).to(self._sizes.dtype)
