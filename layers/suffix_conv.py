"""The convolution that a DFlash 2 draft runs around each sublayer, over the rows of a block.

Legend: T rows, blocks of w of them side by side, D hidden width, K taps, G groups of D / G neighbouring channels.

    y_i = sum over taps k of (base_k + delta_{i,k,group}) x_{i-k}

where rows before the block are zero. The kernels delta of a sublayer's input and of its output come from one product of
the row as it enters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .kernels import Kernels
from .linear import MergedLinear, Part
from .params import Scope


class ConvSizes(NamedTuple):
    """``taps`` K; ``group_size`` channels share a kernel; ``width`` rows a block."""

    hidden_size: int
    taps: int
    group_size: int
    width: int

    @property
    def num_kernels(self) -> int:
        """Numbers of both kernels of a row."""
        return 2 * self.taps * (self.hidden_size // self.group_size)


def grouped_conv(x: torch.Tensor, delta: torch.Tensor, base: torch.Tensor, width: int) -> torch.Tensor:
    """``x`` [T, D] convolved block by block with ``base`` [K, D] plus ``delta`` [T, K, G]; [T, D] of ``x``'s dtype."""
    num_blocks, num_groups = len(x) // width, delta.shape[2]
    blocks = x.view(num_blocks, width, num_groups, x.shape[1] // num_groups)
    delta = delta.reshape(num_blocks, width, *delta.shape[1:], 1)
    base = base.view(len(base), *blocks.shape[2:])
    out = (base[0] + delta[:, :, 0]) * blocks
    for tap in range(1, min(len(base), width)):
        out[:, tap:] += (base[tap] + delta[:, tap:, tap]) * blocks[:, :-tap]
    return out.view(x.shape).to(x.dtype)


class SuffixConv:
    """Both convolutions of a sublayer; every rank has them whole."""

    def __init__(self, source: Scope, sizes: ConvSizes, kernels: Kernels) -> None:
        self._sizes = sizes
        self._base = source.take("base_kernel")
        self._project = MergedLinear(source, [Part("kernel_projection.weight", 0, sizes.num_kernels)], kernels)

    def enter(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the sublayer reads [T, D] of normed rows ``x`` [T, D], and the kernels [T, K, G] for :meth:`leave`."""
        sizes = self._sizes
        shape = (len(x), 2, sizes.taps, sizes.hidden_size // sizes.group_size)
        before, after = self._project(x).view(shape).unbind(1)
        return grouped_conv(x, before, self._base[0], self._sizes.width), after

    def leave(self, y: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        """What is added to the residual [T, D] of the sublayer's output ``y`` [T, D]."""
        return grouped_conv(y, kernels, self._base[1], self._sizes.width)
