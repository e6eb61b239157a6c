"""The tables of a layout for people: groups by axis, and what each rank is."""

from __future__ import annotations

from collections.abc import Sequence

from ..parallel.roll_call import Present
from ..parallel.topology import AXES, Coords, Topology


def groups_table(topology: Topology) -> list[str]:
    """Sizes, then one line an axis: its groups, which of them cross nodes, and their ranks."""
    t = topology
    lines = [
        f"{t.world} ranks on {t.num_nodes} node{'s' if t.num_nodes > 1 else ''} = pp {t.pp} x tp {t.tp}",
        f"attention: tp {t.tp} = dp {t.dp} x cp {t.cp} x attn_tp {t.attn_tp}",
        f"experts:   tp {t.tp} = moe_dp {t.moe_dp} x ep {t.ep} x moe_tp {t.moe_tp}",
        "",
        f"{'axis':<8} {'size':>5} {'groups':>6}  {'crosses nodes':<13}  {'shares':<7}  ranks",
    ]
    for axis in AXES:
        groups = t.groups[axis]
        alias = t.alias(axis)
        lines.append(
            f"{axis:<8} {t.size_of(axis):>5} {len(groups):>6}  {'yes' if t.crosses_nodes(axis) else 'no':<13}  "
            f"{alias if alias != axis else '-':<7}  {_ranks(groups)}"
        )
    return lines


def coordinates_table(topology: Topology, present: Sequence[Present] = ()) -> list[str]:
    """One line a rank: its node, its place on every axis and, where ranks are ``present``, host, device and process."""
    lines = [f"{'rank':>5} {'node':>5}  " + "  ".join(Coords._fields) + ("  host, device, process" if present else "")]
    for rank in range(topology.world):
        cells = "  ".join(f"{value:>{len(name)}}" for name, value in topology.coords(rank)._asdict().items())
        where = "  {0.host}, {0.device}, {0.pid}".format(present[rank]) if present else ""
        lines.append(f"{rank:>5} {topology.node(rank):>5}  {cells}{where}")
    return lines


def ranks_table(topology: Topology, present: Sequence[Present] = ()) -> str:
    """Both tables."""
    return "\n".join([*groups_table(topology), "", *coordinates_table(topology, present)])


def _ranks(groups: tuple[tuple[int, ...], ...], most: int = 8) -> str:
    shown = " ".join(_one(ranks) for ranks in groups[:most])
    return shown if len(groups) <= most else f"{shown} ... and {len(groups) - most} more"


def _one(ranks: tuple[int, ...]) -> str:
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) <= 2:
        return "[" + ",".join(map(str, ranks)) + "]"
    return f"[{ranks[0]}-{ranks[-1]}]" if step == 1 else f"[{ranks[0]}-{ranks[-1]} step {step}]"
