"""Products of few rows. Above ``MAX_ROWS`` the library product is faster; its sums then depend on the row count, so
``row_by_row`` forbids it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
def _split_linear(x_at, weight, sizes, out):
    """``out``: one [T, size] behind the other."""
    num_in, num_out = weight.shape
    num_rows = out.shape[0] // num_out
    whole = np.empty((num_rows, num_out), np.float32)
    product(floats(x_at, (num_rows, num_in)), weight, whole)
    at, first = 0, 0
    for size in sizes:
        for i in range(num_rows):
            for j in range(size):
                out[at + j] = whole[i, first + j]
            at += size
        first += size


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


def bind_split_linear(
    weight: torch.Tensor, sizes: Sequence[int], row_by_row: bool = False
) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """See :func:`..linear.split_linear`."""
    packed, widths = weight.numpy(), np.array(sizes, np.int64)
    ends = np.cumsum(widths).tolist()
    parts = [(end - size, end, size) for end, size in zip(ends, sizes)]

    def split_linear(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        num_rows = x.shape[0]
        if num_rows > MAX_ROWS and not row_by_row:
            return twin.split_linear(x, weight, sizes)
        x = x.contiguous()
        out = np.empty(num_rows * ends[-1], np.float32)
        _split_linear(address(x), packed, widths, out)
        return tuple(
            torch.from_numpy(out[start * num_rows : end * num_rows].reshape(num_rows, size))
            for start, end, size in parts
        )

    return split_linear


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
