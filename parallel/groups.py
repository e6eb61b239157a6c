"""The live process groups of one rank, built once from a :class:`Topology` and passed to whoever communicates.

There are no getters: a layer that needs a group takes it in its constructor, so two models with different layouts can
live in one process.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch.distributed as dist

from .journal import Journal
from .topology import AXES, Topology

COMBINED = {
    "attn_block": ("tp", "attn_tp"),
    "attn_rows": ("tp", "attn_tp"),
    "moe_block": ("tp", "moe_ep", "moe_tp"),
    "moe_rows": ("tp", "attn_rows"),
    "ep_inside": ("moe_ep",),
    "ep_across": ("moe_ep",),
}
"""Groups of several axes or of part of one, and the groups whose object they are if the ranks are the same."""


@dataclass(slots=True)
class Traffic:
    """What one kind of collective has moved so far, seen from this rank.

    ``calls`` counts operations. The rest are bytes, as integers:

    - ``bytes``: the payload, i.e. the size of the tensor this rank handed in (for a broadcast the tensor's size on
      every rank, for a barrier 0). It does not depend on how the operation is carried out.
    - ``sent_bytes``: what this rank sends to other ranks when every piece goes straight to the rank that needs it. With
      ``n`` payload bytes in a group of ``W``: all-gather ``n (W-1)``; reduce-scatter and all-to-all the pieces of the
      others (``n (W-1) / W`` when equal); broadcast ``n (W-1)`` on the source and 0 elsewhere; all-reduce
      ``2 n (W-1) / W``, a reduce-scatter and an all-gather, except that small ones on CPU are sent whole:
      ``n (W-1)``.
    - ``cross_node_bytes``: the part of ``sent_bytes`` whose receiver is on another node.

    On CPU this is what is sent, broadcasts apart, whose copies may be relayed; NCCL may route differently (its rings
    cross a node border once, not once per pair).
    """

    calls: int = 0
    bytes: int = 0
    sent_bytes: int = 0
    cross_node_bytes: int = 0


class TrafficCounter:
    """The :class:`Traffic` of one group by operation name (``all_reduce``, ``all_to_all_v``, ...).

    What is counted is also noted in ``journal``, under the group's ``name``.
    """

    __slots__ = ("ops", "_name", "_journal")

    def __init__(self, name: str = "", journal: Journal | None = None) -> None:
        self.ops: dict[str, Traffic] = {}
        self._name, self._journal = name, Journal() if journal is None else journal

    def add(self, op: str, num_bytes: int, sent: int, crossing: int) -> None:
        """Count one call of ``op``, which is about to happen; see :class:`Traffic` for the units."""
        self.note(op, num_bytes)
        traffic = self.ops.get(op)
        if traffic is None:
            traffic = self.ops[op] = Traffic()
        traffic.calls += 1
        traffic.bytes += num_bytes
        traffic.sent_bytes += sent
        traffic.cross_node_bytes += crossing

    def note(self, op: str, num_bytes: int) -> None:
        """Put a call of ``op`` into the journal alone, such as the receiving end of what the sender counts."""
        self._journal.note(self._name, op, num_bytes)

    def __getitem__(self, op: str) -> Traffic:
        """The figures of ``op``; zeros if it was never called."""
        return self.ops.get(op) or Traffic()

    def total(self) -> Traffic:
        """The sum over all operations."""
        total = Traffic()
        for traffic in self.ops.values():
            total.calls += traffic.calls
            total.bytes += traffic.bytes
            total.sent_bytes += traffic.sent_bytes
            total.cross_node_bytes += traffic.cross_node_bytes
        return total

    def reset(self) -> None:
        """Start counting from zero."""
        self.ops.clear()


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that communicate with each other, as one of them sees it.

    ``ranks`` are world ranks, ``rank`` is this process's index in them. ``pg`` is None exactly for a group of one,
    which needs no communication. ``remote_peers`` are the group ranks on other nodes than this one.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    pg: dist.ProcessGroup | None = None
    remote_peers: tuple[int, ...] = ()
    traffic: TrafficCounter = field(default_factory=TrafficCounter)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))
        assert 0 <= self.rank < self.size and (self.pg is None) == (self.size == 1), (self.name, self.ranks, self.rank)

    @classmethod
    def alone(cls, name: str = "self", rank: int = 0) -> Group:
        """A group of world rank ``rank`` only; every collective on it does nothing."""
        return cls(name, (rank,), 0)

    @property
    def crosses_nodes(self) -> bool:
        """Whether its ranks live on more than one node."""
        return bool(self.remote_peers)

    def __repr__(self) -> str:
        return f"Group({self.name}, rank {self.rank} of {self.size}, world ranks {list(self.ranks)})"


@dataclass(frozen=True, eq=False)
class Groups:
    """Every group this rank belongs to; the axes are those of :class:`Topology`, and what its axes form together.

    A group equal to the whole tp block is the tp object itself, and a combined one equal to a group it is made of is
    that group; other groups with equal rank lists are different objects (each with its own traffic counter) on one
    process group.
    """

    topology: Topology
    world: Group
    tp: Group
    pp: Group
    attn_tp: Group
    attn_cp: Group
    attn_dp: Group
    moe_ep: Group
    moe_tp: Group
    moe_dp: Group
    attn_block: Group
    attn_rows: Group
    moe_block: Group
    moe_rows: Group
    ep_inside: Group
    ep_across: Group
    journal: Journal = field(default_factory=Journal)

    @classmethod
    def single(cls, rank: int = 0) -> Groups:
        """The groups of a model that one rank runs alone, without torch.distributed."""
        group = Group.alone("tp", rank)
        alone = {axis: Group.alone(axis, rank) for axis in ("world", "pp", "attn_dp", "attn_rows")}
        alone["moe_rows"] = alone["attn_rows"]
        return cls(topology=Topology(), **{axis: alone.get(axis, group) for axis in ("world", *AXES, *COMBINED)})

    @classmethod
    def build(
        cls,
        topology: Topology,
        rank: int,
        *,
        timeout: datetime.timedelta | None = None,
        journal: Journal | None = None,
    ) -> Groups:
        """The groups of world rank ``rank`` in the running ``torch.distributed`` job.

        Collective over the whole job: every rank creates every group, in the same order. A layout of one rank needs no
        running job. ``timeout`` bounds each collective of the new groups (default: that of the job); they are noted
        in ``journal``. Raises ``ValueError`` when the job has another size or this process another rank.
        """
        journal = Journal() if journal is None else journal
        if topology.world == 1:
            return replace(cls.single(rank), journal=journal)
        if not dist.is_initialized():
            raise ValueError(f"a layout of {topology.world} ranks needs a running process group; none was started")
        if dist.get_world_size() != topology.world or dist.get_rank() != rank:
            raise ValueError(
                f"the layout has {topology.world} ranks and this is rank {rank}, but the running job has "
                f"{dist.get_world_size()} ranks and this process is rank {dist.get_rank()}"
            )
        everyone = tuple(range(topology.world))
        pgs: dict[tuple[int, ...], dist.ProcessGroup] = {everyone: dist.group.WORLD}
        combined = topology.attention_groups | topology.expert_groups
        lists = topology.groups | combined
        for axis, rank_lists in lists.items():
            for ranks in rank_lists:
                if len(ranks) > 1 and ranks not in pgs:
                    pgs[ranks] = dist.new_group(list(ranks), timeout=timeout, group_desc=axis)
        here = topology.node(rank)

        def group(name: str, ranks: tuple[int, ...]) -> Group:
            remote = tuple(i for i, peer in enumerate(ranks) if topology.node(peer) != here)
            return Group(name, ranks, ranks.index(rank), pgs.get(ranks), remote, TrafficCounter(name, journal))

        own = {axis: group(axis, topology.group_of(axis, rank)) for axis in AXES if topology.alias(axis) == axis}
        members = {axis: own[topology.alias(axis)] for axis in AXES}
        for axis in COMBINED:
            ranks = next(ranks for ranks in combined[axis] if rank in ranks)
            parts = (members[part] for part in COMBINED[axis])
            members[axis] = next((part for part in parts if part.ranks == ranks), None) or group(axis, ranks)
        return cls(topology=topology, world=group("world", everyone), **members, journal=journal)

    def __iter__(self) -> Iterator[Group]:
        """Each distinct group object once, the world first."""
        seen: dict[int, Group] = {}
        for name in ("world", *AXES, *COMBINED):
            group: Group = getattr(self, name)
            seen.setdefault(id(group), group)
        return iter(seen.values())

    def alone(self, name: str = "self") -> Group:
        """A group of this rank only, for a part that must not be spread (a draft model, a replicated layer)."""
        return Group.alone(name, self.world.ranks[self.world.rank])

    def twin(self, axis: str) -> Group:
        """A second group over the ranks of ``axis`` with connections of its own, for what runs beside the layers.

        Collective over the whole job.
        """
        group: Group = getattr(self, axis)
        own = None
        for ranks in self.topology.groups[axis]:
            if len(ranks) > 1:
                pg = dist.new_group(list(ranks), group_desc=f"{axis} beside")
                own = pg if ranks == group.ranks else own
        return Group(f"{axis}_beside", group.ranks, group.rank, own, group.remote_peers)

    def traffic(self) -> dict[str, TrafficCounter]:
        """The counters of every distinct group by its name."""
        return {group.name: group.traffic for group in self}

    def reset_traffic(self) -> None:
        """Start every counter from zero."""
        for group in self:
            group.traffic.reset()
