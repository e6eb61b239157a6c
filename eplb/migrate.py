"""The exchange of experts' weights between the ranks that hold them, from one map of a layer to the next.

What comes waits in buffers while the old map is in use; only ``Arrivals.put`` overwrites slots. The ranks of the
group are the GPUs of the placement, in order.

Legend: P slots of all ranks, K of them here. A layer's weights are tensors [K, ...], all with one row a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..comm.point_to_point import Message, exchange
from ..parallel.groups import Group
from .moves import Transfer, batches


class Arrivals(NamedTuple):
    """New weights of one layer for some slots of this rank, by local slot: one tensor for each of the layer's."""

    rows: dict[int, tuple[Tensor, ...]]

    def put(self, weights: Sequence[Tensor]) -> None:
        """Write them into the layer's ``weights``."""
        for slot, rows in self.rows.items():
            for weight, row in zip(weights, rows):
                weight[slot].copy_(row)


def fetch(
    moves: Sequence[Transfer],
    old: np.ndarray,
    new: np.ndarray,
    weights: Sequence[Tensor],
    group: Group,
    most_per_gpu: int = 2,
) -> Arrivals:
    """What this rank needs of one layer to go from the map ``old`` [P] to ``new`` [P], which keeps slots where it can.

    ``moves`` are all ranks' transfers of that layer, see :func:`.moves.transfers`; they travel in batches in which no
    rank sends or receives more than ``most_per_gpu`` experts, those within a node first. Collective over ``group``;
    returns when this rank's part is done. Raises ``RuntimeError`` where a transfer fails; no slot has changed then.
    """
    num_slots = len(old) // group.size
    first = group.rank * num_slots
    rows: dict[int, tuple[Tensor, ...]] = {}
    for batch in batches(moves, most_per_gpu):
        sends, receives = [], []
        for move in batch:
            if move.source_gpu == group.rank:
                sends += [Message(move.target_gpu, weight[move.source_slot - first]) for weight in weights]
            if move.target_gpu == group.rank:
                slot = move.target_slot - first
                rows[slot] = tuple(weight.new_empty(weight.shape[1:]) for weight in weights)
                receives += [Message(move.source_gpu, row) for row in rows[slot]]
        exchange(sends, receives, group)
    return Arrivals(_with_copies(rows, old[first : first + num_slots], new[first : first + num_slots], weights))


def _with_copies(
    rows: dict[int, tuple[Tensor, ...]], old: np.ndarray, new: np.ndarray, weights: Sequence[Tensor]
) -> dict[int, tuple[Tensor, ...]]:
    """``rows`` and those of slots whose new expert is on this rank already, or comes to another of its slots."""
    found = dict(rows)
    for slot in np.flatnonzero(old != new).tolist():
        if slot in rows:
            continue
        here = np.flatnonzero(old == new[slot])
        if here.size:
            found[slot] = tuple(weight[int(here[0])].clone() for weight in weights)
        else:
            found[slot] = next(rows[other] for other in rows if new[other] == new[slot])
    return found
