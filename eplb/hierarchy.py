"""Placement with expert groups pinned to nodes: choose the nodes of the groups, then place each node alone.

The fullest node bounds what any placement inside the nodes can reach, so groupings are tried from the most even one on,
and one that cannot beat what was reached is skipped. Few groups: every way to spread them over the nodes is on the
list. Many groups: the search itself spreads them.

Shapes: L layers, E experts, M groups, N nodes, P slots.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from .cores import Core
from .flat import Aim, place, tops
from .rows import Rows
from .schedule import Effort
from .shape import Shape

# Up to this many ways to spread the groups are listed; so many of them are tried for one layer.
MOST_WAYS = 5000
MOST_TRIES = 12


def place_groups(units: np.ndarray, shape: Shape, core: Core, effort: Effort, aim: Aim) -> np.ndarray:
    """Experts of the slots, [L, P] int32, for loads ``units`` [L, E] int32."""
    num_layers, num_nodes = len(units), shape.num_nodes
    node = shape.node_shape()
    slots = np.zeros((num_layers, shape.num_slots), np.int32)
    reached = np.full(num_layers, np.inf)
    groupings, fullest = rank_groupings(units.reshape(num_layers, shape.num_groups, -1).sum(2), num_nodes, core, effort)
    for attempt in range(groupings.shape[1]):
        # A grouping whose fullest node alone is too full for a gain of a thousandth is not worth a search.
        todo = np.flatnonzero(fullest[:, attempt] / node.num_gpus < 0.999 * reached)
        if not todo.size:
            continue
        experts = _experts_of(groupings[todo, attempt], shape)
        own = np.take_along_axis(units[todo], experts.reshape(len(todo), -1), 1).reshape(-1, node.num_experts)
        local = place(own, node, core, effort, aim, together=num_nodes)
        found = np.take_along_axis(experts.reshape(-1, node.num_experts), local, 1).reshape(len(todo), -1)
        top = tops(units[todo], found, shape)
        better = top < reached[todo]
        slots[todo[better]], reached[todo[better]] = found[better], top[better]
    return slots


def rank_groupings(group_load: np.ndarray, num_nodes: int, core: Core, effort: Effort) -> tuple[np.ndarray, np.ndarray]:
    """Groups of the nodes, [L, tries, N, M / N], the most even first, and the load of the fullest node, [L, tries].

    ``group_load`` is [L, M] in whole units.
    """
    num_layers, num_groups = group_load.shape
    per_node = num_groups // num_nodes
    if num_ways(num_groups, num_nodes) <= MOST_WAYS:
        every = np.array(list(spreads(tuple(range(num_groups)), per_node)), np.int64)
        tops = group_load[:, every].sum(3).max(2)
        order = np.argsort(tops, axis=1, kind="stable")[:, :MOST_TRIES]
        return every[order], np.take_along_axis(tops, order, 1)
    single = np.ones(group_load.shape, np.int64)
    rows = Rows.of(group_load, single, core.deal(group_load, single, num_nodes))
    even = np.ceil(group_load.sum(1) / num_nodes).astype(np.int32)
    core.refine(rows, even, even, effort)
    return rows.slot[:, None].astype(np.int64), rows.load.max(1, keepdims=True)


def even_groupings(group_load: np.ndarray, num_nodes: int) -> float:
    """The least load that the fullest node can have, for ``group_load`` [M]; a lower bound where the ways are many."""
    num_groups = len(group_load)
    if num_ways(num_groups, num_nodes) <= MOST_WAYS:
        every = np.array(list(spreads(tuple(range(num_groups)), num_groups // num_nodes)), np.int64)
        return float(group_load[every].sum(2).max(1).min())
    beside = np.sort(group_load)[: num_groups // num_nodes - 1].sum()
    return float(max(group_load.sum() / num_nodes, group_load.max() + beside))


def num_ways(num_groups: int, num_nodes: int) -> int:
    """Ways to spread the groups evenly over the nodes, nodes being alike."""
    per_node = num_groups // num_nodes
    return math.factorial(num_groups) // (math.factorial(per_node) ** num_nodes * math.factorial(num_nodes))


def spreads(groups: tuple[int, ...], per_node: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every way to put ``per_node`` of ``groups`` on each node, nodes being alike: tuples of tuples."""
    if not groups:
        return iter([()])
    first, rest = groups[0], groups[1:]
    return (
        ((first, *others), *more)
        for others in itertools.combinations(rest, per_node - 1)
        for more in spreads(tuple(g for g in rest if g not in others), per_node)
    )


def _experts_of(groups: np.ndarray, shape: Shape) -> np.ndarray:
    """Experts of every node, [L, N, E / N], from its groups [L, N, M / N]."""
    size = shape.num_experts // shape.num_groups
    return (groups[..., None] * size + np.arange(size)).reshape(len(groups), shape.num_nodes, -1)
