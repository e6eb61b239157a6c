"""Residual streams: manifold-constrained hyper-connections (mHC), or the unconstrained kind (HC) they came from.

Legend: T rows, n streams, D hidden width. All parameters and the mixing are float32. Nothing here is sharded or kept
between steps; every rank that holds a row needs its whole width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .kernels import Bound, Kernels
from .kernels.hyper_connection import HyperIn
from .params import Scope


class HyperSizes(NamedTuple):
    """``constrained``: mHC (sigmoid, Sinkhorn) rather than HC (tanh)."""

    hc_eps: float
    norm_eps: float
    num_iters: int
    constrained: bool


def spread(x: torch.Tensor, num_streams: int) -> torch.Tensor:
    """The streams [T, n, D] that the first layer reads: ``x`` [T, D] in each of them."""
    return x.unsqueeze(1).expand(-1, num_streams, -1).contiguous()


class HyperConnection:
    """One sublayer's connection: ``read`` gives its normed input, ``write`` the new streams from its output."""

    def __init__(self, source: Scope, prefix: str, norm: str, sizes: HyperSizes, kernels: Kernels) -> None:
        self._read = kernels.bind(
            "hc_pre",
            fn=source.take(f"{prefix}_fn", dtype=torch.float32).t().contiguous(),
            base=source.take(f"{prefix}_base", dtype=torch.float32),
            scale=source.take(f"{prefix}_scale", dtype=torch.float32),
            norm_weight=source.take(f"{norm}.weight", dtype=torch.float32),
            hc_eps=sizes.hc_eps,
            norm_eps=sizes.norm_eps,
            num_iters=sizes.num_iters,
            constrained=sizes.constrained,
        )
        self._write = kernels.bind("hc_post")

    @property
    def bound(self) -> Bound:
        """How it reads, for :meth:`.Kernels.join`."""
        return self._read

    def read(self, streams: torch.Tensor) -> HyperIn:
        """``streams`` [T, n, D] -> the sublayer's normed input [T, D] and the weights for ``write``."""
        return self._read(streams)

    def write(self, streams: torch.Tensor, y: torch.Tensor, mix: HyperIn) -> torch.Tensor:
        """The new streams [T, n, D] from the old ones and the sublayer's output ``y`` [T, D]."""
        return self._write(streams, y, mix.post, mix.comb)


class HyperHead:
    """Collapses the streams [T, n, D] into one, [T, D], before the final norm."""

    def __init__(self, source: Scope, prefix: str, sizes: HyperSizes, kernels: Kernels) -> None:
        self._collapse = kernels.bind(
            "hc_collapse",
            fn=source.take(f"{prefix}_fn", dtype=torch.float32).t().contiguous(),
            base=source.take(f"{prefix}_base", dtype=torch.float32),
            scale=source.take(f"{prefix}_scale", dtype=torch.float32),
            hc_eps=sizes.hc_eps,
            norm_eps=sizes.norm_eps,
        )

    @property
    def bound(self) -> Bound:
        """The operation, for :meth:`.Kernels.join`."""
        return self._collapse

    def __call__(self, streams: torch.Tensor) -> torch.Tensor:
        return self._collapse(streams)
