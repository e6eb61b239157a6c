"""Products of rows with weights. Legend: T rows, G groups, S slices of the inner axis.

With few rows a product is the reading of its weight: tiles of few rows and many columns, and the inner axis cut into S
slices so that every multiprocessor reads. A second kernel adds the slices' sums in order. With many rows the
vendor's library takes over, unless rows must not know each other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .. import linear as twin
from .jit import NUM_SMS, dot, launch, narrow, power

MAX_ROWS = 256  # above, the library's product
BLOCK_N, BLOCK_K = 64, 128
ROW_BY_ROW_BLOCK = 16  # rows of a tile if results must not depend on how many rows there are


@triton.jit
def _product(
    x, weight, out, num_rows, num_in, num_out, num_slices, slice_len, x_row, x_group, out_row, out_group, out_slice,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_M, BLOCK_N] of one slice of one group: ``x`` [T, G, in] times ``weight`` [G, in, out]."""
    group, part = tl.program_id(2) // num_slices, (tl.program_id(2) % num_slices).to(tl.int64)
    rows = (tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    columns = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    x += group * x_group + rows * x_row
    weight += group.to(tl.int64) * num_in * num_out + columns
    first = tl.program_id(2) % num_slices * slice_len
    last = tl.minimum(num_in, first + slice_len)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(first, last, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        a = tl.load(x + k[None, :], mask=(rows < num_rows) & (k[None, :] < last), other=0.0)
        b_mask = (k[:, None] < last) & (columns < num_out)
        b = tl.load(weight + k.to(tl.int64)[:, None] * num_out, mask=b_mask, other=0.0)
        acc = dot(a, b, acc)
    at = out + part * out_slice + group * out_group + rows * out_row + columns
    tl.store(at, narrow(acc, out.dtype.element_ty), mask=(rows < num_rows) & (columns < num_out))


@triton.jit
def _add_slices(parts, out, size, num_slices, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(num_slices):
        total += tl.load(parts + part * size + at, mask=at < size, other=0.0)
    tl.store(out + at, narrow(total, out.dtype.element_ty), mask=at < size)


def product(x: torch.Tensor, weight: torch.Tensor, row_by_row: bool) -> torch.Tensor:
    """``x`` [T, G, in], inner axis contiguous, times ``weight`` [G, in, out]; [T, G out] in ``x``'s dtype."""
    (num_rows, num_groups, num_in), num_out = x.shape, weight.shape[2]
    block_m = ROW_BY_ROW_BLOCK if row_by_row else min(power(num_rows, 16), 64)
    tiles = (triton.cdiv(num_out, BLOCK_N), triton.cdiv(num_rows, block_m))
    filled = num_groups * tiles[0] * (1 if row_by_row else tiles[1])
    num_slices = max(min(NUM_SMS * 2 // max(filled, 1), triton.cdiv(num_in, 2 * BLOCK_K), 8), 1)
    slice_len = triton.cdiv(triton.cdiv(num_in, num_slices), BLOCK_K) * BLOCK_K
    num_slices = triton.cdiv(num_in, slice_len)
    out = torch.empty((num_rows, num_groups * num_out), dtype=x.dtype, device=x.device)
    sums = out if num_slices == 1 else torch.empty((num_slices, *out.shape), dtype=torch.float32, device=x.device)
    strides = (x.stride(0), x.stride(1), num_groups * num_out, num_out, out.numel())
    launch(
        _product, (*tiles, num_groups * num_slices),
        x, weight, sums, num_rows, num_in, num_out, num_slices, slice_len, *strides,
        BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4, num_stages=4 if x.itemsize == 2 else 2,
    )  # fmt: skip
    if num_slices > 1:
        grid = (triton.cdiv(out.numel(), 1024),)
        launch(_add_slices, grid, sums, out, out.numel(), num_slices, BLOCK=1024, num_warps=4)
    return out


def with_inner_contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself if its last axis is contiguous, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def bind_linear(weight: torch.Tensor, row_by_row: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..linear.linear`."""

    def linear(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > MAX_ROWS and not row_by_row:
            return twin.linear(x, weight)
        return product(with_inner_contiguous(x).unsqueeze(1), weight.unsqueeze(0), row_by_row)

    return linear


def bind_grouped_linear(weight: torch.Tensor, row_by_row: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..linear.grouped_linear`."""

    def grouped_linear(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > MAX_ROWS and not row_by_row:
            return twin.grouped_linear(x, weight)
        return product(with_inner_contiguous(x), weight, row_by_row)

    return grouped_linear
