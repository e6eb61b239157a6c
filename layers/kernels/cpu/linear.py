"""Products of few rows. Above ``MAX_ROWS`` the library product is faster; its sums then depend on the row count, so
``row_by_row`` forbids it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .. import linear as twin
from .jit import host, jit

MAX_ROWS = 16


@jit
def accumulate_row(x, weight, out):
    """``out += x @ weight`` for one row: ``x`` [in], ``weight`` [in, out], ``out`` [out]."""
    num_in, num_out = weight.shape
    whole = num_in - num_in % 4
    for k in range(0, whole, 4):
        x0, x1, x2, x3 = x[k], x[k + 1], x[k + 2], x[k + 3]
        for j in range(num_out):
            out[j] += (x0 * weight[k, j] + x1 * weight[k + 1, j]) + (x2 * weight[k + 2, j] + x3 * weight[k + 3, j])
    for k in range(whole, num_in):
        x0 = x[k]
        for j in range(num_out):
            out[j] += x0 * weight[k, j]


@jit
def _linear(x, weight, out):
    out[:] = 0
    for i in range(x.shape[0]):
        accumulate_row(x[i], weight, out[i])


@jit
def _grouped_linear(x, weight, out):
    num_out = weight.shape[2]
    out[:] = 0
    for i in range(x.shape[0]):
        for g in range(weight.shape[0]):
            accumulate_row(x[i, g], weight[g], out[i, g * num_out : (g + 1) * num_out])


def bind_linear(weight: torch.Tensor, row_by_row: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..linear.linear`."""
    packed = weight.numpy()

    def linear(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > MAX_ROWS and not row_by_row:
            return twin.linear(x, weight)
        out = np.empty((x.shape[0], packed.shape[1]), np.float32)
        _linear(host(x), packed, out)
        return torch.from_numpy(out)

    return linear


def bind_grouped_linear(weight: torch.Tensor, row_by_row: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..linear.grouped_linear`."""
    packed = weight.numpy()
    num_groups, _, num_out = packed.shape

    def grouped_linear(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > MAX_ROWS and not row_by_row:
            return twin.grouped_linear(x, weight)
        out = np.empty((x.shape[0], num_groups * num_out), np.float32)
        _grouped_linear(host(x), packed, out)
        return torch.from_numpy(out)

    return grouped_linear
