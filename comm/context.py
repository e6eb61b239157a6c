"""Rows between context-parallel ranks: every rank has some rows of a step and gets all of them, in token order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..parallel.groups import Group
from .collectives import all_gather_v


class RowGather:
    """Gathers rows over ``group``.

    ``owned``: for each rank, the places (in the whole) of the rows it holds, in its order; together 0 .. K - 1, each
    once.
    """

    def __init__(self, group: Group, owned: Sequence[np.ndarray], device: torch.device) -> None:
        self._group, self._sizes = group, [len(places) for places in owned]
        order = np.argsort(np.concatenate(list(owned)), kind="stable")
        self._order = torch.from_numpy(order).to(device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows ``x`` [t, ...] -> all rows [K, ...]. Collective over the group."""
        return all_gather_v(x, self._group, self._sizes)[self._order]


def whole(x: torch.Tensor) -> torch.Tensor:
    """The gather of rows that every rank has already."""
    return x
