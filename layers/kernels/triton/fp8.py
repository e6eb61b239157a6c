"""FP8 rows and products. Legend: T rows, D width; a row has a scale for every 128 channels, a weight for 128 by 128."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ..quantised import BLOCK, FP8, ROW_GROUP, PackedRows, PackedWeight
from .jit import INTERPRETED, dot, launch, narrow, power
from .linear import ROW_BY_ROW_BLOCK, with_inner_contiguous

BLOCK_N = 128


@triton.jit
def to_e4m3(x):
    """float32 ``x``, within the format's range, as e4m3 to nearest even. The interpreter rounds wrongly, so there the
    rounding is done before: by adding and taking away a number so large that only 3 mantissa bits are left."""
    if INTERPRETED:
        exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 121)  # 2^-6: below, steps are equal
        shift = ((exponent + 20) << 23).to(tl.float32, bitcast=True) * 1.5
        x = (x + shift) - shift
    return x.to(tl.float8e4nv)


@triton.jit
def _pack_rows(x, x_row, values, scales, width, num_groups, GROUP: tl.constexpr):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = group * GROUP + tl.arange(0, GROUP)
    own = tl.load(x + row * x_row + channel, mask=channel < width, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(own)), 1e-30) / 448.0
    packed = to_e4m3(tl.minimum(tl.maximum(tl.div_rn(own, scale), -448.0), 448.0))
    tl.store(values + row * width + channel, packed, mask=channel < width)
    tl.store(scales + row * num_groups + group, scale)


def bind_pack_rows() -> Callable[[torch.Tensor], PackedRows]:
    """See :func:`..quantised.pack_rows`."""

    def pack_rows(x: torch.Tensor) -> PackedRows:
        x, (num_rows, width) = with_inner_contiguous(x), x.shape
        num_groups = triton.cdiv(width, ROW_GROUP)
        values = torch.empty((num_rows, width), dtype=FP8, device=x.device)
        scales = torch.empty((num_rows, num_groups), dtype=torch.float32, device=x.device)
        grid = (num_rows, num_groups)
        launch(_pack_rows, grid, x, x.stride(0), values, scales, width, num_groups, GROUP=ROW_GROUP, num_warps=1)
        return PackedRows(values, scales)

    return pack_rows


@triton.jit
def _scaled_product(
    x, x_scales, weight, weight_scales, out, num_rows, num_in, num_out, num_groups, num_blocks,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_M, 128] of ``x`` [T, in] times ``weight`` [out, in]: both operands run along the inner axis, as
    FP8 matrix instructions want them. Every 128 inputs are a product of their own, scaled when it is added."""
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(num_groups):
        k = group * BLOCK_K + tl.arange(0, BLOCK_K)
        a_mask = (rows < num_rows)[:, None] & (k < num_in)[None, :]
        a = tl.load(x + rows[:, None] * num_in + k[None, :], mask=a_mask, other=0.0)
        b_mask = (columns < num_out)[None, :] & (k < num_in)[:, None]
        b = tl.load(weight + columns.to(tl.int64)[None, :] * num_in + k[:, None], mask=b_mask, other=0.0)
        part = dot(a, b, tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32))
        row_scales = tl.load(x_scales + rows * num_groups + group, mask=rows < num_rows, other=0.0)
        acc += part * (row_scales * tl.load(weight_scales + group * num_blocks + tl.program_id(0)))[:, None]
    to = out + rows[:, None] * num_out + columns[None, :]
    keep = (rows < num_rows)[:, None] & (columns < num_out)[None, :]
    tl.store(to, narrow(acc, out.dtype.element_ty), mask=keep)


def bind_scaled_linear(weight: PackedWeight, row_by_row: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..quantised.scaled_linear`."""
    pack, values = bind_pack_rows(), weight.values.view(torch.uint8).t().contiguous().view(FP8)
    (num_out, num_in), scales = values.shape, weight.scales

    def scaled_linear(x: torch.Tensor) -> torch.Tensor:
        rows, num_rows = pack(x), x.shape[0]
        out = torch.empty((num_rows, num_out), dtype=x.dtype, device=x.device)
        block_m = ROW_BY_ROW_BLOCK if row_by_row else min(power(num_rows, 16), 128)
        launch(
            _scaled_product, (triton.cdiv(num_out, BLOCK_N), triton.cdiv(num_rows, block_m)),
            *rows, values, scales, out, num_rows, num_in, num_out, rows.scales.shape[1], scales.shape[1],
            BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK, num_warps=4 if block_m < 128 else 8, num_stages=3,
        )  # fmt: skip
        return out

    return scaled_linear
