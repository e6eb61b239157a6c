"""Mixture of experts: router, routed experts, and the shared expert that every token passes.

Legend: T rows, D hidden width, E experts, k experts per token, I expert width.

Experts are cut over the MoE ranks as ep x moe_tp: whole experts over ``moe_ep``, each expert's width over ``moe_tp``.
A dispatcher brings rows to experts and sums back. Where no row travels, every rank sees all rows of its group, and the
shared expert is cut by width over that group, so it is part of the same sum exactly once. Where rows travel, each rank
adds the whole shared expert to its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..comm.collectives import all_reduce
from ..comm.dispatch import Exchange, Received
from ..parallel.groups import Group, Groups
from .expert_slots import CopyRule, ExpertSlots
from .kernels import Bound, Kernels
from .kernels.moe import Routing
from .kernels.quantised import bytes_of, stack_weights
from .linear import MergedColumnParallelLinear, RowParallelLinear, columns_of, divide
from .params import Scope
from .probe import Probe
from .stages import Point, Stages


class MoESizes(NamedTuple):
    """``limit``: the swiglu clamp, infinity for none. ``hashed``: experts are chosen by token id.
    Experts are chosen from the best ``topk_groups`` of ``num_groups`` groups of neighbouring experts.
    ``slots``: the expert in every slot, contiguous by rank of moe_ep; None: each once, in order, for good.
    ``copy_rule``: of slots and this rank of moe_ep, see :class:`ExpertSlots`."""

    hidden_size: int
    num_experts: int
    top_k: int
    width: int
    limit: float
    scoring: str
    renormalise: bool
    scale: float
    hashed: bool
    vocab_size: int
    num_groups: int = 1
    topk_groups: int = 1
    slots: tuple[int, ...] | None = None
    copy_rule: Callable[[Sequence[int], int], CopyRule | None] = lambda slots, rank: None

    @property
    def num_slots(self) -> int:
        """Places for experts, all ranks together."""
        return self.num_experts if self.slots is None else len(self.slots)


class Router:
    """Chooses experts: by score plus a correction bias, or by token id with weights from the scores."""

    def __init__(self, source: Scope, sizes: MoESizes, kernels: Kernels) -> None:
        weight = source.take("weight", dtype=torch.float32).t().contiguous()
        self._gate = kernels.bind("linear", weight=weight)
        law = {"scoring": sizes.scoring, "renormalise": sizes.renormalise, "scale": sizes.scale}
        if sizes.hashed:
            table = source.take("tid2eid").long()
            route = kernels.bind("route_hashed", **law)
            self._route = lambda logits, ids: route(logits, table[ids])
        else:
            bias = source.take("bias", dtype=torch.float32)
            law |= {"bias": bias, "top_k": sizes.top_k}
            if sizes.num_groups > 1:
                groups = {"num_groups": sizes.num_groups, "topk_groups": sizes.topk_groups}
                route = kernels.bind("route_grouped", **law, **groups)
            else:
                route = kernels.bind("route_scored", **law)
            self._by_score = route
            self._route = lambda logits, ids: route(logits)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor) -> Routing:
        """Normed rows ``x`` [T, D] and token ids [T] -> experts and weights [T, k]; gate and scores in float32."""
        return self._route(self._gate(x.float()), ids)

    @property
    def bound(self) -> dict[str, Bound]:
        """The operations of a router by scores, for :meth:`.Kernels.join`."""
        return {"gate": self._gate, "route": self._by_score}


class Experts:
    """This rank's routed experts: those of its share of the slots, each ``width / moe_tp`` wide.

    ``weights``: all that an expert consists of, tensors [slots here, ...], packed if the kernels keep them so; call
    :meth:`bind` after writing to them.
    """

    def __init__(self, source: Scope, sizes: MoESizes, moe_ep: Group, moe_tp: Group, kernels: Kernels) -> None:
        num_local = divide("number of routed experts", sizes.num_slots, moe_ep)
        slots = range(sizes.num_experts) if sizes.slots is None else sizes.slots
        share = divide("expert width", sizes.width, moe_tp)
        span = {"start": moe_tp.rank * share, "stop": (moe_tp.rank + 1) * share}
        gate_up, down = [], []
        for expert in slots[moe_ep.rank * num_local : (moe_ep.rank + 1) * num_local]:
            weights = source.scope(str(expert))
            halves = (weights.take("w1.weight", **span), weights.take("w3.weight", **span))
            gate_up.append(kernels.pack("experts_forward", torch.cat(halves).t()))
            down.append(kernels.pack("experts_forward", weights.take("w2.weight", dim=1, **span).t()))
        self._products = stack_weights(gate_up), stack_weights(down)
        self.weights = (*bytes_of(self._products[0]), *bytes_of(self._products[1]))
        self._kernels, self._limit = kernels, sizes.limit
        self.bind()

    def bind(self) -> None:
        """Make the kernel see the weights as they are now; it may keep them in a form of its own."""
        gate_up, down = self._products
        self._forward = self._kernels.bind("experts_forward", gate_up=gate_up, down=down, limit=self._limit)

    @property
    def bound(self) -> Bound:
        """The operation, for :meth:`.Kernels.join`."""
        return self._forward

    def __call__(self, received: Received, rows: torch.Tensor | slice) -> torch.Tensor:
        """The weighted sums [T, D] of this rank's experts for the given ``rows`` of those received."""
        return self._forward(received.x[rows], Routing(received.experts[rows], received.weights[rows]))


class WholeSumExperts:
    """As :class:`Experts`, such that no sum is rounded otherwise than on one rank.

    The first products are cut as there. What comes out of them is brought together (collective), and the second
    products, of all experts, are cut by output columns over ``group``; the summand has those columns, and zeros.
    """

    def __init__(self, source: Scope, sizes: MoESizes, groups: Groups, kernels: Kernels) -> None:
        self._group, self._moe_tp = groups.moe_block, groups.moe_tp
        share = divide("expert width", sizes.width, groups.moe_tp)
        num_local = divide("number of routed experts", sizes.num_experts, groups.moe_ep)
        self._first, self._width = groups.moe_ep.rank * num_local, sizes.width
        self._columns, self._num_out = columns_of(sizes.hidden_size, self._group), sizes.hidden_size
        span = {"start": self._moe_tp.rank * share, "stop": (self._moe_tp.rank + 1) * share}
        columns = {"start": self._columns.start, "stop": self._columns.stop}
        scopes = [source.scope(str(expert)) for expert in range(sizes.num_experts)]
        gate_up = [
            torch.cat((weights.take("w1.weight", **span), weights.take("w3.weight", **span))).t()
            for weights in scopes[self._first : self._first + num_local]
        ]
        down = [weights.take("w2.weight", **columns).t() for weights in scopes]
        self._inner = kernels.bind("experts_inner", gate_up=torch.stack(gate_up), limit=sizes.limit)
        self._outer = kernels.bind("experts_outer", down=torch.stack(down))

    def __call__(self, received: Received, rows: torch.Tensor | slice) -> torch.Tensor:
        """This rank's summand [T, D] for the given ``rows`` of those received, which are the same on all ranks."""
        x, local = received.x[rows], received.experts[rows]
        inner = self._inner(x, local)
        # Each number comes from one rank, beside zeros of the others; so do the experts' ids plus one.
        start, stop = self._moe_tp.rank * inner.shape[2], (self._moe_tp.rank + 1) * inner.shape[2]
        message = x.new_zeros((*local.shape, self._width + 1))
        message[..., start:stop] = inner
        if self._moe_tp.rank == 0:
            message[..., -1] = torch.where(local >= 0, local + self._first + 1, 0)
        message = all_reduce(message, self._group)
        experts = message[..., -1].long() - 1
        y = self._outer(message[..., :-1], Routing(experts, received.weights[rows]))
        return torch.nn.functional.pad(y, (self._columns.start, self._num_out - self._columns.stop))


class SharedExpert:
    """The expert of every token, cut by width over ``group``; gives this rank's summand [T, D]."""

    def __init__(self, source: Scope, sizes: MoESizes, group: Group, kernels: Kernels) -> None:
        outs = {"w1.weight": sizes.width, "w3.weight": sizes.width}
        self._gate_up = MergedColumnParallelLinear(source, outs, group, kernels)
        self._swiglu = kernels.bind("swiglu", limit=sizes.limit)
        self._down = RowParallelLinear(source, "w2.weight", sizes.width, group, kernels)

    @property
    def bound(self) -> dict[str, Bound]:
        """The operations, for :meth:`.Kernels.join`."""
        return {"shared_in": self._gate_up.bound, "swiglu": self._swiglu, "shared_out": self._down.partial}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down.partial(self._swiglu(self._gate_up(x)))


class MoE:
    """Router, routed experts and shared expert. ``all_to_all``: whether rows travel to their experts."""

    def __init__(
        self, source: Scope, sizes: MoESizes, groups: Groups, kernels: Kernels, layer: int, all_to_all: bool = False
    ) -> None:
        self._layer, self._adds_shared = layer, all_to_all
        self._router = Router(source.scope("gate"), sizes, kernels)
        if kernels.whole_sums and groups.moe_block.size > 1:
            self._experts = WholeSumExperts(source.scope("experts"), sizes, groups, kernels)
        else:
            self._experts = Experts(source.scope("experts"), sizes, groups.moe_ep, groups.moe_tp, kernels)
        shared_by = groups.alone() if all_to_all else groups.moe_block
        self._shared = SharedExpert(source.scope("shared_experts"), sizes, shared_by, kernels)
        self.slots: ExpertSlots | None = None
        if sizes.slots is not None:
            # Rows that travel are this rank's own; else its attn_tp peers route the same ones and must agree.
            turn = groups.tp.rank if all_to_all else groups.attn_rows.rank
            counts = all_to_all or groups.attn_tp.rank == 0
            device, ep_rank = self.weights[0].device, groups.moe_ep.rank
            rows = groups.moe_block if all_to_all else groups.moe_rows
            rule = lambda slots: sizes.copy_rule(slots, ep_rank)
            self.slots = ExpertSlots(sizes.slots, sizes.num_experts, turn, counts, device, rows, rule)

    @property
    def weights(self) -> Sequence[torch.Tensor]:
        """Of the experts in this rank's slots, see :class:`Experts`."""
        return self._experts.weights

    @property
    def bound(self) -> dict[str, Bound]:
        """The operations of a layer by scores whose experts are all here for good, for :meth:`.Kernels.join`."""
        return {**self._router.bound, "experts": self._experts.bound, **self._shared.bound}

    def use_slots(self, slots: Sequence[int]) -> None:
        """From now on the slots of all ranks hold these experts; the weights of those here were written before."""
        self.slots.set(slots)
        self._experts.bind()

    def stages(self, x: torch.Tensor, ids: torch.Tensor, exchange: Exchange, probe: Probe) -> Stages[torch.Tensor]:
        """Normed rows ``x`` [t, D] of this rank and their token ids [t] -> [t, D]. Collective."""
        routing, dispatcher = self._router(x, ids), exchange.dispatcher
        probe("experts", self._layer, routing.experts)
        probe("expert_weights", self._layer, routing.weights)
        if self.slots is not None:
            routing = self.slots.choose(routing, exchange.is_first)
        yield Point.ROUTED
        dispatcher.begin_dispatch(x, routing.experts, routing.weights)
        shared = self._shared(x) if self._adds_shared and exchange.in_pieces else None
        yield Point.SENT
        received = dispatcher.finish_dispatch()
        for rows in received.pieces:
            y = self._experts(received, rows)
            dispatcher.begin_combine(y if self._adds_shared else y + self._shared(received.x[rows]))
        yield Point.RETURNING
        out = dispatcher.finish_combine()
        if self._adds_shared:
            out = out + (self._shared(x) if shared is None else shared)
        probe("moe_out", self._layer, out)
        yield Point.RETURNED
        return out
