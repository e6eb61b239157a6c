"""Tokens that really travel between forked ranks, by every dispatcher and by a flat all-to-all: what the counters of
the collectives say, what the model says of the same routing, and, in network namespaces, what the interfaces say.

Legend: t rows here, k experts a row, D hidden width, W ranks.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...comm.collectives import all_to_all, all_to_all_v, barrier
from ...comm.dispatch import DispatchOptions, StepRows, make_dispatcher
from ...parallel.groups import Group, Groups
from ...parallel.local import run_forked
from ...parallel.namespaces import Namespaces, counted_bytes
from ...parallel.topology import Topology
from . import dispatch_model as model
from .dispatch_model import Cluster, Counts
from .routing_laws import RoutingLaw

MEASURED = (model.FLAT, model.STANDARD, model.NORMAL, model.LOW_LATENCY)


TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25, "fp8": 1.0}
"""How far a sum of a row with its weights may be off, for normal rows and uniform weights."""


@dataclass(frozen=True)
class Load:
    """What every rank sends: made-up tokens of ``law``, ``num_tokens`` a rank, in ``dtype`` (a name)."""

    cluster: Cluster
    law: RoutingLaw
    hidden_size: int
    num_tokens: int
    dtype: str
    seed: int

    def slots(self, rank: int) -> np.ndarray:
        """The experts of the tokens of ``rank``, [t, k]."""
        return self.law.draw(self.num_tokens, np.random.default_rng((self.seed, rank)))

    def expected(self) -> Counts:
        """What the model counts."""
        counts = Counts(self.cluster, self.law.num_slots)
        for rank in range(self.cluster.num_ranks):
            counts.add(rank, self.slots(rank))
        return counts


def measure(load: Load, rounds: int, namespaces: bool, rate: str | None) -> dict[str, Any]:
    """Sums over all ranks by mode, see :func:`on_rank`, and ``interface_bytes`` of each node with ``namespaces``.

    Raises ``RuntimeError`` where no namespaces can be made.
    """
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(Namespaces(load.cluster.num_nodes, rate)) if namespaces else None
        ranks = run_forked(lambda rank: on_rank(load, rank, rounds, namespaces), load.cluster.num_ranks, nodes=nodes)
    result = {}
    for mode in MEASURED:
        lines = [rank[mode] for rank in ranks]
        names = ("dispatch_across", "dispatch_inside", "combine_across", "combine_inside", "other_across")
        result[mode] = {name: sum(line[name] for line in lines) for name in names}
        result[mode]["seconds"] = max(line["seconds"] for line in lines)
        result[mode]["worst_error"] = max(line["worst_error"] for line in lines)
        if namespaces:
            first = range(0, len(ranks), load.cluster.per_node)
            result[mode]["interface_bytes"] = [lines[rank]["interface_sent"] for rank in first]
    return result


def on_rank(load: Load, rank: int, rounds: int, interfaces: bool) -> dict[str, dict[str, float]]:
    """By mode: bytes this rank sent across and inside nodes in one dispatch and one combine, those of sizes and other
    small exchanges across nodes (``other_across``), seconds of one exchange, the worst error of its result, and bytes
    that left the node by its interface in one exchange. Collective over the job."""
    cluster = load.cluster
    places = tuple(rank // cluster.per_node for rank in range(cluster.num_ranks))
    world = cluster.num_ranks
    groups = Groups.build(Topology(tp=world, dp=world, ep=world, nodes=places), rank)
    experts = torch.from_numpy(load.slots(rank))
    draw = torch.Generator().manual_seed(rank)
    dtype = torch.float32 if load.dtype == "float32" else torch.bfloat16
    x = torch.randn(load.num_tokens, load.hidden_size, generator=draw).to(dtype)
    weights = torch.rand(experts.shape, generator=draw)
    want = x.float() * weights.sum(1, keepdim=True)
    lines = {}
    for mode in MEASURED:
        meter = Meter(groups)
        exchange = _exchange(load, mode, groups, dtype, meter)
        out = exchange(x, experts, weights)
        line = meter.line() | {"worst_error": (out.float() - want).abs().max().item() if out.numel() else 0.0}
        before, times = _all_quiet(groups.world, interfaces), []
        for _ in range(rounds):
            start = time.perf_counter()
            exchange(x, experts, weights)
            times.append(time.perf_counter() - start)
        line["seconds"] = statistics.median(times)
        if interfaces:
            line["interface_sent"] = (_all_quiet(groups.world, interfaces) - before) / rounds
        lines[mode] = line
    return lines


def _all_quiet(world: Group, interfaces: bool) -> int:
    """Bytes this node's interface has sent, read while no rank sends any; 0 without interfaces. Collective."""
    barrier(world)
    sent = counted_bytes().sent if interfaces else 0
    barrier(world)
    return sent


class Meter:
    """Bytes by kind and way between two calls of ``read``."""

    def __init__(self, groups: Groups) -> None:
        self._groups, self._bytes = groups, dict.fromkeys(("dispatch", "combine"), (0, 0))
        self._other, self._last = 0, self._now()

    def _now(self) -> dict[str, tuple[int, int]]:
        """(across, sent) bytes of rows and of sizes so far."""
        total = {"rows": (0, 0), "sizes": (0, 0)}
        for group in self._groups:
            for op, traffic in group.traffic.ops.items():
                kind = "sizes" if op == "all_to_all" else "rows"
                across, sent = total[kind]
                total[kind] = across + traffic.cross_node_bytes, sent + traffic.sent_bytes
        return total

    def read(self, way: str) -> None:
        """Book what was sent since the last call under ``way``."""
        now = self._now()
        (across, sent), (across_before, sent_before) = now["rows"], self._last["rows"]
        self._bytes[way] = across - across_before, sent - sent_before - (across - across_before)
        self._other += now["sizes"][0] - self._last["sizes"][0]
        self._last = now

    def line(self) -> dict[str, float]:
        """The bytes by name."""
        named = {}
        for way, (across, inside) in self._bytes.items():
            named |= {f"{way}_across": across, f"{way}_inside": inside}
        return named | {"other_across": self._other}


Exchange = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _exchange(load: Load, mode: str, groups: Groups, dtype: torch.dtype, meter: Meter) -> Exchange:
    """Rows, experts and weights to the weighted sums that experts give which change nothing; the meter sees it."""
    if mode == model.FLAT:
        return lambda x, experts, weights: _flat(x, experts, weights, load.law.num_slots, groups.moe_ep, meter)
    dispatcher = make_dispatcher(
        DispatchOptions(mode, "torch", load.num_tokens, load.dtype == "fp8"),
        groups,
        num_experts=load.law.num_slots,
        top_k=load.law.top_k,
        hidden_size=load.hidden_size,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    rows = StepRows((load.num_tokens,) * groups.tp.size, has_prefill=False)

    def exchange(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        dispatcher.open(rows)
        dispatcher.begin_dispatch(x, experts, weights)
        received = dispatcher.finish_dispatch()
        meter.read("dispatch")
        shares = torch.where(received.experts >= 0, received.weights, 0.0).sum(1, keepdim=True)
        dispatcher.begin_combine((received.x.float() * shares).to(dtype))
        out = dispatcher.finish_combine()
        meter.read("combine")
        return out

    return exchange


def _flat(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, num_experts: int, group: Group, meter: Meter
) -> torch.Tensor:
    """One all-to-all with a copy of a row for each of its experts, and back."""
    order = experts.flatten().argsort(stable=True)
    rows = order // experts.shape[1]
    sent = torch.bincount(experts.flatten() // (num_experts // group.size), minlength=group.size)
    received = all_to_all(sent, group).tolist()
    arrived = all_to_all_v(x[rows], group, sent.tolist(), received)
    meter.read("dispatch")
    back = all_to_all_v(arrived, group, received, sent.tolist())
    meter.read("combine")
    out = torch.zeros(x.shape, dtype=torch.float32)
    return out.index_add_(0, rows, back.float() * weights.flatten()[order].unsqueeze(1))
