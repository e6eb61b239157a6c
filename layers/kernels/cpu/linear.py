"""Products of few rows. Above ``MAX_ROWS`` the library product is faster; its sums then depend on the row count, so
``row_by_row`` forbids it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .. import linear as twin
from .jit import address, floats, jit
from .product import BYTES, part_product, product, spot

MAX_ROWS = 64


@jit
def _linear(x_at, weight, out):
    product(floats(x_at, (out.shape[0], weight.shape[0])), weight, out)


@jit
def _grouped_linear(x_at, weight, out):
    num_rows, (num_groups, num_in, num_out) = out.shape[0], weight.shape
    for g in range(num_groups):
        part_product(
            x_at + BYTES * g * num_in, num_groups * num_in, weight.ctypes.data + BYTES * g * num_in * num_out, num_out,
            spot(out, 0, g * num_out), num_groups * num_out, num_rows, num_in, num_out,
        )  # fmt: skip


def bind_linear(weight: torch.Tensor, row_by_row: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..linear.linear`."""
    packed = weight.numpy()
    num_out = packed.shape[1]

    def linear(x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        if num_rows > MAX_ROWS and not row_by_row:
            return twin.linear(x, weight)
        x = x.contiguous()
        out = np.empty((num_rows, num_out), np.float32)
        _linear(address(x), packed, out)
        return torch.from_numpy(out)

    return linear


def bind_grouped_linear(weight: torch.Tensor, row_by_row: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..linear.grouped_linear`."""
    packed = weight.numpy()
    num_groups, _, num_out = packed.shape

    def grouped_linear(x: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        if num_rows > MAX_ROWS and not row_by_row:
            return twin.grouped_linear(x, weight)
        x = x.contiguous()
        out = np.empty((num_rows, num_groups * num_out), np.float32)
        _grouped_linear(address(x), packed, out)
        return torch.from_numpy(out)

    return grouped_linear
