"""Two hops with exact sizes: one copy of a row for each node that has experts of it, sent to the rank with the same
place there, which hands it on inside the node to each rank that wants it; and back the same way, with sums on the way.

Legend: t rows here, D hidden width, k experts per row, P pieces. A copy is a row on the first hop (M of them arrive), a
fan a row on the second (N arrive). ``across``: ranks with the same place in each node; ``inside``: ranks of this node.

Sizes are exchanged before rows. On one node the first hop stays at home. Rows carry the piece they are to be sent back
in, so that both sides of a hop know what a piece holds.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch

from ...parallel.groups import Groups
from ..collectives import Pending, all_to_all, start_all_to_all_v
from .base import DispatchSizes, Order, Received, StepRows
from .rows import Cut, RowFormat, count_ids, local_ids, most_rows, num_pieces


class Copies(NamedTuple):
    """The first hop: ``rows`` [C] of x that are copied, by node and then in order; rows ``sent`` to and ``received``
    from each node."""

    rows: torch.Tensor
    sent: list[int]
    received: list[int]


class Fans(NamedTuple):
    """The second hop: which of the M ``copies`` go on, by rank and then in order; rows ``sent`` and ``received``."""

    copies: torch.Tensor
    sent: list[int]
    received: list[int]


class Handle(NamedTuple):
    """The layout of one routing: both hops, how the rows sent (``outgoing``), copies and fans are cut in pieces, local
    experts and weights of the received rows [N, k], and ``counts`` as in :class:`.base.Received`."""

    copies: Copies
    fans: Fans
    outgoing: Cut
    copy_cut: Cut
    fan_cut: Cut
    experts: torch.Tensor
    weights: torch.Tensor
    counts: list[int] | None


class Normal:
    """See :class:`.base.Dispatcher`. After ``finish_dispatch`` its ``handle`` may be given to a later
    ``begin_dispatch`` of the same routing in the same step, which then exchanges neither sizes nor routing."""

    all_to_all: ClassVar[bool] = True
    limits: ClassVar[tuple[bool, bool]] = (False, False)
    sends_fp8: ClassVar[bool] = False

    def __init__(self, groups: Groups, sizes: DispatchSizes) -> None:
        self._groups, self._sizes = groups, sizes
        self._across, self._inside = groups.ep_across, groups.ep_inside
        self._num_local = sizes.num_experts // groups.moe_ep.size
        self._first = groups.moe_ep.rank * self._num_local
        # Where each rank of the expert group sits: node times ranks of a node, plus its place there.
        self._places = torch.tensor(groups.topology.expert_places(groups.moe_ep.ranks), device=sizes.device)
        self._at_home = self._across.rank if self._across.size > 1 else None
        self._format, self._order = RowFormat(sizes), Order()
        self.handle: Handle | None = None

    def twin(self) -> Normal:
        """See :meth:`.base.Dispatcher.twin`."""
        return Normal(self._groups, self._sizes)

    def open(self, rows: StepRows) -> None:
        """See :meth:`.base.Dispatcher.open`."""
        self._order.enter("open")
        self._num_pieces = num_pieces(rows, most_rows(rows, self._groups))

    def begin_dispatch(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, handle: Handle | None = None
    ) -> None:
        """See :meth:`.base.Dispatcher.begin_dispatch`; with a ``handle`` the routing is that of the handle."""
        self._order.enter("begin_dispatch")
        self._num_rows, self._known = x.shape[0], handle
        if handle is None:
            self._copies, self._fan_sizes = self._lay_out(experts)
            x = self._format.pack(x, experts, weights)
        else:
            self._copies = handle.copies
        sizes = self._copies.sent, self._copies.received
        self._going: Pending | None = start_all_to_all_v(x[self._copies.rows], self._across, *sizes)
        self._arriving: Pending | None = None
        if self._across.size == 1:
            self._hand_on()

    def finish_dispatch(self) -> Received:
        """See :meth:`.base.Dispatcher.finish_dispatch`."""
        self._order.enter("finish_dispatch", self._num_pieces)
        self._hand_on()
        arrived = self._arriving.wait()
        if self._known is None:
            self.handle, x = self._describe(arrived), self._format.rows(arrived)
        else:
            self.handle, x = self._known, arrived
        handle, self._piece = self.handle, 0
        self._going, self._returning = None, []
        pieces = [handle.fan_cut.rows(piece) for piece in range(self._num_pieces)]
        return Received(x, handle.experts, handle.weights, handle.counts, pieces)

    def begin_combine(self, y: torch.Tensor) -> None:
        """See :meth:`.base.Dispatcher.begin_combine`."""
        self._order.enter("begin_combine")
        self._pass_back()
        handle = self.handle
        sent = handle.fan_cut.sizes(self._piece)
        received = handle.copy_cut.select(handle.fans.copies, handle.fans.sent).sizes(self._piece)
        self._going = start_all_to_all_v(y, self._inside, sent, received)
        if self._inside.size == 1:
            self._pass_back()

    def finish_combine(self) -> torch.Tensor:
        """See :meth:`.base.Dispatcher.finish_combine`."""
        self._order.enter("finish_combine")
        self._pass_back()
        device, wide = self._places.device, self._sizes.hidden_size
        sums = torch.zeros((self._num_rows, wide), dtype=torch.float32, device=device)
        for piece, pending in enumerate(self._returning):
            y = pending.wait().float()
            sums.index_add_(0, self.handle.copies.rows[self.handle.outgoing.rows(piece)], y)
        return sums.to(self._sizes.dtype)

    def _lay_out(self, experts: torch.Tensor) -> tuple[Copies, tuple[list[int], list[int]]]:
        """The first hop for ``experts`` [t, k], and rows sent and received on the second. Collective."""
        num_nodes, num_inside = self._across.size, self._inside.size
        nowhere = num_nodes * num_inside
        wanted = self._wanted(torch.where(experts < 0, nowhere, self._places[experts // self._num_local]), nowhere)
        wanted = wanted.unflatten(1, (num_nodes, num_inside))
        by_node = wanted.any(2).t()
        counts = torch.cat((by_node.sum(1, keepdim=True), wanted.sum(0)), dim=1)
        arriving = all_to_all(counts, self._across)
        fans_sent = arriving[:, 1:].sum(0)
        fans_received = all_to_all(fans_sent, self._inside)
        copies = Copies(by_node.nonzero()[:, 1], counts[:, 0].tolist(), arriving[:, 0].tolist())
        return copies, (fans_sent.tolist(), fans_received.tolist())

    @staticmethod
    def _wanted(places: torch.Tensor, num_places: int) -> torch.Tensor:
        """Which of the places each row goes to, bool [rows, num_places]; ``places`` [rows, k], the last for none."""
        wanted = torch.zeros((places.shape[0], num_places + 1), dtype=torch.bool, device=places.device)
        return wanted.scatter_(1, places, True)[:, :-1]

    def _hand_on(self) -> None:
        """Start the second hop, if it is not yet, with what the first one brought."""
        if self._arriving is not None:
            return
        copies = self._going.wait()
        if self._known is None:
            self._copy_cut = Cut.blocks(self._copies.received, self._num_pieces, copies.device, self._at_home)
            if self._copy_cut.pieces is not None:
                self._format.numbers(copies).copy_(self._copy_cut.pieces)
            experts, nowhere = self._format.experts(copies), self._inside.size
            places = self._places[experts.clamp(min=0) // self._num_local] - self._across.rank * nowhere
            here = (experts >= 0) & (places >= 0) & (places < nowhere)
            wanted = self._wanted(torch.where(here, places, nowhere), nowhere)
            self._fans = Fans(wanted.t().nonzero()[:, 1], *self._fan_sizes)
        else:
            self._fans = self._known.fans
        self._arriving = start_all_to_all_v(
            copies[self._fans.copies], self._inside, self._fans.sent, self._fans.received
        )

    def _describe(self, arrived: torch.Tensor) -> Handle:
        """The handle of the rows that arrived, uint8 [N, bytes]."""
        local = local_ids(self._format.experts(arrived), self._first, self._num_local)
        one_piece = self._copy_cut.pieces is None
        return Handle(
            self._copies,
            self._fans,
            Cut.blocks(self._copies.sent, self._num_pieces, arrived.device, self._at_home),
            self._copy_cut,
            Cut(None if one_piece else self._format.numbers(arrived), self._fans.received),
            local,
            self._format.weights(arrived),
            count_ids(local, self._num_local, self._sizes.alignment),
        )

    def _pass_back(self) -> None:
        """Send what came back inside the node, summed by copy, on to the nodes that the copies are from."""
        if self._going is None:
            return
        y, self._going = self._going.wait(), None
        handle, piece = self.handle, self._piece
        cut, fans = handle.copy_cut, handle.fans
        sums = torch.zeros((sum(handle.copies.received), y.shape[1]), dtype=torch.float32, device=y.device)
        copies = fans.copies[cut.select(fans.copies, fans.sent).rows(piece)]
        sums = sums.index_add_(0, copies, y.float())[cut.rows(piece)].to(y.dtype)
        sizes = cut.sizes(piece), handle.outgoing.sizes(piece)
        self._returning.append(start_all_to_all_v(sums, self._across, *sizes))
        self._piece += 1
