"""RMSNorm as a layer."""

from __future__ import annotations

import torch

from .kernels import Bound, Kernels
from .params import Scope


class RMSNorm:
    """[T, width] -> the same, with float32 statistics and weight, cast once at the end."""

    def __init__(self, source: Scope, name: str, eps: float, kernels: Kernels) -> None:
        self._norm = kernels.bind("rms_norm", weight=source.take(f"{name}.weight", dtype=torch.float32), eps=eps)

    @property
    def bound(self) -> Bound:
        """The operation, for :meth:`.Kernels.join`."""
        return self._norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x)
