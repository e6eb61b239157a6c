"""How the ranks of a run are arranged: sizes to rank lists and coordinates. Pure integers, no torch, no processes.

Two views of the same ``tp`` block, each with its last axis innermost::

    world rank = pp * TP + tp
    tp         = (attn_dp * CP + attn_cp) * ATTN_TP + attn_tp       attention
    tp         = (moe_dp * EP + moe_ep) * MOE_TP + moe_tp           mixture of experts

so tp groups are contiguous blocks of ranks, and so are attn_tp and moe_tp groups inside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

AXES = ("tp", "pp", "attn_tp", "attn_cp", "attn_dp", "moe_ep", "moe_tp", "moe_dp")

# Far above any cluster; a mistyped size must not fill the memory with tables.
MAX_RANKS = 1 << 16

RankLists = tuple[tuple[int, ...], ...]


class Coords(NamedTuple):
    """Where one rank sits: its index along every axis of both views."""

    pp: int
    attn_dp: int
    attn_cp: int
    attn_tp: int
    moe_dp: int
    moe_ep: int
    moe_tp: int


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def _check_divides(whole: str, n: int, part: str, d: int) -> None:
    if n % d:
        raise ValueError(f"{whole} = {n} is not divisible by {part} = {d}; {part} may be one of {_divisors(n)}")


@dataclass(frozen=True)
class Topology:
    """A valid layout of ``pp * tp`` ranks.

    ``tp`` counts the ranks of one pipeline stage; ``dp``, ``cp`` and attn_tp split it for attention, ``moe_dp``,
    ``ep`` and moe_tp for the experts. ``nodes`` gives the node of every world rank (empty: all on one node); it need
    not be ``rank // ranks_per_node``, since launchers number ranks as they please.

    Raises ``ValueError`` naming both numbers for every layout that cannot be built or would leave a rank without a
    group.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    moe_dp: int = 1
    nodes: tuple[int, ...] = ()

    @classmethod
    def make(
        cls,
        world: int,
        *,
        tp: int | None = None,
        pp: int = 1,
        dp: int = 1,
        cp: int = 1,
        ep: int | None = None,
        moe_dp: int = 1,
        all_to_all: bool = False,
        gpus_per_node: int | None = None,
        nodes: Sequence[int] | None = None,
    ) -> Topology:
        """The layout of ``world`` ranks, with the sizes that follow from others filled in.

        ``tp`` defaults to ``world / pp``. ``ep`` defaults to 1, or, with an ``all_to_all`` dispatcher (experts spread
        over every rank; an ``ep`` of 1 counts as unset there), to ``tp / moe_dp``. Nodes come from ``nodes`` (one
        entry per world rank) or are filled in rank order with ``gpus_per_node`` ranks each.
        """
        for name, value in (("world", world), ("pp", pp), ("moe_dp", moe_dp)):
            if value < 1:
                raise ValueError(f"{name} = {value}; it must be at least 1")
        if world > MAX_RANKS:
            raise ValueError(f"world = {world} is more than the {MAX_RANKS} ranks a layout may have")
        if tp is None:
            _check_divides("world", world, "pp", pp)
            tp = world // pp
        if tp * pp != world:
            raise ValueError(
                f"tp * pp = {tp} * {pp} = {tp * pp}, but there are {world} ranks; start {tp * pp} ranks or leave "
                "--tp out to use all of them"
            )
        if ep is None or (all_to_all and ep == 1):
            if all_to_all:
                _check_divides("tp", tp, "moe_dp", moe_dp)
            ep = tp // moe_dp if all_to_all else 1
        if nodes is None and gpus_per_node is not None:
            if gpus_per_node < 1:
                raise ValueError(f"gpus_per_node = {gpus_per_node}; it must be at least 1")
            if world > gpus_per_node and world % gpus_per_node:
                raise ValueError(
                    f"{world} ranks do not fill nodes of gpus_per_node = {gpus_per_node}; give a number that divides "
                    f"{world}: {_divisors(world)}"
                )
            nodes = [rank // gpus_per_node for rank in range(world)]
        return cls(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, moe_dp=moe_dp, nodes=tuple(nodes or ()))

    def __post_init__(self) -> None:
        tp, dp, cp, ep, moe_dp = self.tp, self.dp, self.cp, self.ep, self.moe_dp
        for name in ("tp", "pp", "dp", "cp", "ep", "moe_dp"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} = {value}; it must be a whole number of at least 1")
        if self.world > MAX_RANKS:
            raise ValueError(f"tp * pp = {tp} * {self.pp} is more than the {MAX_RANKS} ranks a layout may have")
        _check_divides("tp", tp, "dp", dp)
        _check_divides("tp", tp, "cp", cp)
        _check_divides("tp", tp, "dp * cp", dp * cp)
        _check_divides("tp", tp, "moe_dp", moe_dp)
        _check_divides("tp", tp, "ep", ep)
        if ep * moe_dp > tp:
            raise ValueError(
                f"ep * moe_dp = {ep} * {moe_dp} is more than tp = {tp}; lower ep to at most {tp // moe_dp}"
            )
        if moe_dp > 1:
            self._check_moe_dp()
        if self.nodes and len(self.nodes) != self.world:
            raise ValueError(f"the node map has {len(self.nodes)} entries for {self.world} ranks; give one per rank")

    def _check_moe_dp(self) -> None:
        tp, pp, cp, ep, moe_dp = self.tp, self.pp, self.cp, self.ep, self.moe_dp
        if pp > 1:
            raise ValueError(f"moe_dp = {moe_dp} cannot be combined with pp = {pp}; set one of them to 1")
        if ep > 1 and ep * moe_dp != tp:
            raise ValueError(
                f"with moe_dp = {moe_dp}, ep = {ep} must be 1 or tp / moe_dp = {tp // moe_dp}, so that "
                f"ep * moe_dp = tp = {tp}"
            )
        if cp != moe_dp:
            raise ValueError(f"moe_dp = {moe_dp} needs the same cp, but cp = {cp}; set cp to {moe_dp} or moe_dp to 1")

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.pp * self.tp

    @property
    def attn_tp(self) -> int:
        """Ranks that share the heads of one attention."""
        return self.tp // (self.dp * self.cp)

    @property
    def moe_tp(self) -> int:
        """Ranks that share the width of one expert."""
        return self.tp // (self.ep * self.moe_dp)

    @property
    def num_nodes(self) -> int:
        """Distinct nodes of the node map (1 without a map)."""
        return len(set(self.nodes)) or 1

    @property
    def sizes(self) -> dict[str, int]:
        """The six configured sizes by name."""
        return {"tp": self.tp, "pp": self.pp, "dp": self.dp, "cp": self.cp, "ep": self.ep, "moe_dp": self.moe_dp}

    def size_of(self, axis: str) -> int:
        """The length of the rank lists of ``axis``."""
        return len(self.groups[axis][0])

    @cached_property
    def groups(self) -> dict[str, RankLists]:
        """Rank lists of every axis of ``AXES``: each world rank is in exactly one list of each axis.

        With ``cp > moe_dp`` the moe_dp lists are the attn_cp lists: context-parallel partners hold different tokens of
        one sequence and must exchange them before the experts, although the configured moe_dp is 1.
        """
        atp, cp, mtp, ep = self.attn_tp, self.cp, self.moe_tp, self.ep
        groups = {
            "tp": self._lists(1, self.tp),
            "pp": tuple(tuple(range(t, self.world, self.tp)) for t in range(self.tp)),
            "attn_tp": self._lists(1, atp),
            "attn_cp": self._lists(atp, cp),
            "attn_dp": self._lists(atp * cp, self.dp),
            "moe_ep": self._lists(mtp, ep),
            "moe_tp": self._lists(1, mtp),
            "moe_dp": self._lists(mtp * ep, self.moe_dp),
        }
        if self.cp > self.moe_dp:
            groups["moe_dp"] = groups["attn_cp"]
        return groups

    @cached_property
    def attention_groups(self) -> dict[str, RankLists]:
        """Rank lists of what attention axes form together.

        ``attn_block``: the ranks of one attention DP rank (cp x attn_tp), which share requests. ``attn_rows``: ranks
        with the same attn_tp index (dp x cp), which hold different token rows; in order of (dp, cp).
        """
        return {
            "attn_block": self._lists(1, self.cp * self.attn_tp),
            "attn_rows": self._lists(self.attn_tp, self.dp * self.cp),
        }

    @cached_property
    def expert_groups(self) -> dict[str, RankLists]:
        """Rank lists of what expert axes form together, and of the two hops of an exchange between nodes.

        ``moe_block``: the ranks of one moe_dp rank (ep x moe_tp), which hold all experts once. ``moe_rows``: its ranks
        with the same attn_tp index. ``ep_inside``: the ranks of a moe_ep list on one node; ``ep_across``: those with
        the same place on every node. Where a list has unlike numbers of ranks on its nodes, it counts as one node.
        """
        inside: list[tuple[int, ...]] = []
        across: list[tuple[int, ...]] = []
        for ranks in self.groups["moe_ep"]:
            nodes = self._by_node(ranks)
            inside += nodes
            across += zip(*nodes)
        return {
            "moe_block": self._lists(1, self.ep * self.moe_tp),
            "moe_rows": self._lists(self.attn_tp, self.dp * self.cp // self.moe_dp),
            "ep_inside": tuple(inside),
            "ep_across": tuple(across),
        }

    def _by_node(self, ranks: tuple[int, ...]) -> RankLists:
        """``ranks`` by node, in order of the nodes' first ranks; as one list if they are not equally many on each."""
        nodes: dict[int, list[int]] = {}
        for rank in ranks:
            nodes.setdefault(self.node(rank), []).append(rank)
        lists = tuple(tuple(members) for members in nodes.values())
        return lists if len({len(members) for members in lists}) == 1 else (ranks,)

    def expert_places(self, ranks: tuple[int, ...]) -> list[int]:
        """Where each rank of a moe_ep list sits: its node (by order in the list) times ranks of a node, plus its place
        on the node."""
        order = [rank for node in self._by_node(ranks) for rank in node]
        return [order.index(rank) for rank in ranks]

    def _lists(self, stride: int, width: int) -> RankLists:
        """Lists of ``width`` ranks, ``stride`` apart, of every tp block, in the order of their first ranks."""
        period = stride * width
        starts = [first + offset for first in range(0, self.world, period) for offset in range(stride)]
        return tuple(tuple(range(start, start + period, stride)) for start in starts)

    def group_of(self, axis: str, rank: int) -> tuple[int, ...]:
        """The list of ``axis`` that holds world rank ``rank``."""
        self._check_rank(rank)
        return next(ranks for ranks in self.groups[axis] if rank in ranks)

    def alias(self, axis: str) -> str:
        """The axis whose group object ``axis`` uses: tp for groups equal to the whole tp block, attn_cp for a moe_dp
        that follows cp, otherwise itself. pp and attn_dp never alias."""
        if axis not in ("pp", "attn_dp") and self.groups[axis] == self.groups["tp"]:
            return "tp"
        return "attn_cp" if axis == "moe_dp" and self.cp > self.moe_dp else axis

    def coords(self, rank: int) -> Coords:
        """Where world rank ``rank`` sits along every axis."""
        self._check_rank(rank)
        pp, tp = divmod(rank, self.tp)
        rest, attn_tp = divmod(tp, self.attn_tp)
        attn_dp, attn_cp = divmod(rest, self.cp)
        rest, moe_tp = divmod(tp, self.moe_tp)
        moe_dp, moe_ep = divmod(rest, self.ep)
        return Coords(pp, attn_dp, attn_cp, attn_tp, moe_dp, moe_ep, moe_tp)

    def node(self, rank: int) -> int:
        """The node of world rank ``rank``."""
        self._check_rank(rank)
        return self.nodes[rank] if self.nodes else 0

    def nodes_of(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """The distinct nodes these world ranks live on, ascending."""
        return tuple(sorted({self.node(rank) for rank in ranks}))

    def crosses_nodes(self, axis: str) -> bool:
        """Whether any list of ``axis`` has ranks on more than one node."""
        return any(len(self.nodes_of(ranks)) > 1 for ranks in self.groups[axis])

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not one of the {self.world} ranks")
