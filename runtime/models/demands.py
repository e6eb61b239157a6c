"""What must be divisible for a model to be cut like a layout."""

from __future__ import annotations

from collections.abc import Sequence

from ...parallel.topology import Topology

Demand = tuple[str, int, str, int]
"""A size of the model, its number, and the axis and number of ranks that it must be divisible by."""


def indivisible(demands: Sequence[Demand]) -> list[str]:
    """The demands that are not met, one sentence each."""
    return [
        f"{what} = {size} is not divisible by {axis} = {ranks}" for what, size, axis, ranks in demands if size % ranks
    ]


def shared_demand(width: int, topology: Topology, all_to_all: bool) -> Demand:
    """What must be divisible for the shared expert, its size, and by which axis and how many ranks it is cut."""
    axis, ranks = "tp" if topology.moe_dp == 1 else "tp / moe_dp", topology.tp // topology.moe_dp
    return "moe_intermediate_size of the shared expert", width, axis, 1 if all_to_all else ranks


def expert_demand(what: str, num_experts: int, redundant: int, topology: Topology) -> Demand:
    """What must be divisible for the slots of ``num_experts`` experts and ``redundant`` copies."""
    return what + (f" + {redundant} redundant ones" if redundant else ""), num_experts + redundant, "ep", topology.ep
