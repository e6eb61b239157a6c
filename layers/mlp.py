"""The dense feed-forward layer: silu(gate) * up, then down, cut by width over a group."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..comm.collectives import Pending
from ..parallel.groups import Group
from .kernels import Kernels
from .linear import MergedColumnParallelLinear, RowParallelLinear
from .params import Scope
from .stages import Point, Stages


class MLPSizes(NamedTuple):
    """``width``: of gate and up."""

    hidden_size: int
    width: int


class MLP:
    """[T, D] -> [T, D] on the rows of one attention rank; every DP and CP rank has the whole layer."""

    def __init__(self, source: Scope, sizes: MLPSizes, group: Group, kernels: Kernels) -> None:
        outs = {"gate_proj.weight": sizes.width, "up_proj.weight": sizes.width}
        self._gate_up = MergedColumnParallelLinear(source, outs, group, kernels)
        self._swiglu = kernels.bind("swiglu", limit=math.inf)
        self._down = RowParallelLinear(source, "down_proj.weight", sizes.width, group, kernels)

    def stages(self, x: torch.Tensor, start_sum: Callable[[torch.Tensor], Pending]) -> Stages[torch.Tensor]:
        """Normed rows [T, D] -> what ``start_sum`` makes of this rank's summand [T, D]. Collective; yields once, while
        the sum is in flight."""
        pending = start_sum(self._down.partial(self._swiglu(self._gate_up(x))))
        yield Point.SUMMING
        return pending.wait()
