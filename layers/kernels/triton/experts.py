"""Expert products. Legend: T rows, D hidden width, E local experts, k experts per token, I expert width, P picks (T k).

A pick is one expert of one row, numbered row times k plus place. Picks are grouped by expert on the device, each
expert's filled up to whole tiles of rows, so that a tile of the products has one expert. Four kernels follow each
other: counts, places, the first product with swiglu, the second product; then a row's picks are added in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..moe import Routing
from ..quantised import PackedWeight
from .jit import dot, launch, narrow, power

BLOCK_N, BLOCK_K = 64, 64
ROW_BY_ROW_BLOCK = 16  # rows of a tile if results must not depend on how many rows there are


class Tiles(NamedTuple):
    """Picks by expert: ``order`` int32 [N BLOCK_M], the pick at each place or -1; ``experts`` int32 [N], the expert of
    each tile or -1. N is an upper bound that depends on shapes alone."""

    order: torch.Tensor
    experts: torch.Tensor
    block: int


@triton.jit
def _count_picks(experts, counts, num_picks, BLOCK: tl.constexpr):
    expert, at = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.int32)
    for begin in range(0, num_picks, BLOCK):
        own = tl.load(experts + begin + at, mask=begin + at < num_picks, other=-1)
        total += (own == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(total))


@triton.jit
def _place_picks(
    experts, counts, order, tile_experts, num_picks, num_experts,
    BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The picks of one expert, in order, behind the tiles of those before it."""
    expert, at, other = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, EXPERTS)
    tiles = tl.cdiv(tl.load(counts + other, mask=other < expert, other=0), BLOCK_M)
    first_tile = tl.sum(tl.where(other < expert, tiles, 0))
    count = tl.load(counts + expert)
    for tile in range(tl.cdiv(count, BLOCK_M)):
        tl.store(tile_experts + first_tile + tile, expert)
    placed = first_tile * BLOCK_M
    if count > 0:
        for begin in range(0, num_picks, BLOCK):
            pick = begin + at
            own = tl.load(experts + pick, mask=pick < num_picks, other=-1) == expert
            place = placed + tl.cumsum(own.to(tl.int32), 0) - 1
            tl.store(order + place, pick, mask=own)
            placed += tl.sum(own.to(tl.int32))


def group_by_expert(experts: torch.Tensor, num_experts: int, block: int) -> Tiles:
    """Tiles of ``block`` rows of the picks ``experts`` [T, k] (local ids, -1 is none)."""
    experts, num_picks = experts.contiguous(), experts.numel()
    num_tiles = num_picks // block + min(num_experts, num_picks)
    made = torch.full((num_tiles * (block + 1),), -1, dtype=torch.int32, device=experts.device)
    order, tile_experts = made[: num_tiles * block], made[num_tiles * block :]
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    step = min(power(num_picks, 16), 1024)
    launch(_count_picks, (num_experts,), experts, counts, num_picks, BLOCK=step, num_warps=4)
    launch(
        _place_picks, (num_experts,), experts, counts, order, tile_experts, num_picks, num_experts,
        BLOCK_M=block, EXPERTS=power(num_experts), BLOCK=step, num_warps=4,
    )  # fmt: skip
    return Tiles(order, tile_experts, block)


@triton.jit
def swiglu(gate, up, limit):
    """``silu(min(gate, limit)) * clip(up, -limit, limit)``."""
    gate = tl.minimum(gate, limit)
    return gate * tl.sigmoid(gate) * tl.minimum(tl.maximum(up, -limit), limit)


NATIVE, FP8, FP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _e2m1(code):
    """The numbers of FP4 codes, float32."""
    exponent, mantissa = (code >> 1) & 3, (code & 1).to(tl.float32)
    size = tl.where(exponent == 0, 0.5 * mantissa, (1.0 + 0.5 * mantissa) * (1 << exponent).to(tl.float32) * 0.5)
    return tl.where((code & 8) != 0, -size, size)


@triton.jit
def _load_weight(
    values, scales, expert, begin, column, num_in, num_out, inside, dtype: tl.constexpr,
    BLOCK_K: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Rows ``begin`` .. + BLOCK_K of an expert's weight at ``column`` [1, n], unpacked to ``dtype``; packed formats are
    exact in bfloat16, since their scales are powers of two."""
    k = (begin + tl.arange(0, BLOCK_K))[:, None]
    mask = (k < num_in) & inside
    if FORMAT == FP4:
        pair = (begin // 2 + tl.arange(0, BLOCK_K // 2))[:, None]
        at = values + (expert * tl.cdiv(num_in, 2) + pair) * num_out + column
        codes = tl.load(at, mask=(2 * pair < num_in) & inside, other=0).to(tl.int32)
        both = tl.permute(tl.join(_e2m1(codes & 15), _e2m1(codes >> 4)), (0, 2, 1))
        weight = tl.reshape(both, (BLOCK_K, column.shape[1]))
        scale = tl.load(scales + (expert * tl.cdiv(num_in, 32) + k // 32) * num_out + column, mask=mask, other=0.0)
        weight = weight * scale
    elif FORMAT == FP8:  # a tile lies in one row of blocks
        blocks = tl.cdiv(num_out, 128)
        at = scales + (expert * tl.cdiv(num_in, 128) + begin // 128) * blocks + column // 128
        codes = tl.load(values + (expert * num_in + k) * num_out + column, mask=mask, other=0.0)
        weight = codes.to(tl.float32) * tl.load(at, mask=inside, other=0.0)
    else:
        weight = tl.load(values + (expert * num_in + k) * num_out + column, mask=mask, other=0.0)
    return weight.to(dtype)


@triton.jit
def _first_product(
    x, x_row, gate_up, scales, order, tile_experts, out, num_in, width, top_k, limit,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """``out`` [N BLOCK_M, I]: swiglu of the gate and up products of the picks' rows, at the picks' places."""
    expert = tl.load(tile_experts + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    place = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    pick = tl.load(order + place)
    rows, real = (tl.maximum(pick, 0) // top_k).to(tl.int64)[:, None], (pick >= 0)[:, None]
    columns = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    inside = columns < width
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, num_in, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        a = tl.load(x + rows * x_row + k[None, :], mask=real & (k[None, :] < num_in), other=0.0)
        of_gate = _load_weight(
            gate_up, scales, expert, begin, columns, num_in, 2 * width, inside, a.dtype, BLOCK_K, FORMAT
        )
        gate = dot(a, of_gate, gate)
        of_up = _load_weight(
            gate_up, scales, expert, begin, columns + width, num_in, 2 * width, inside, a.dtype, BLOCK_K, FORMAT
        )
        up = dot(a, of_up, up)
    result = narrow(swiglu(gate, up, limit), out.dtype.element_ty)
    tl.store(out + place[:, None] * width + columns, result, mask=real & inside)


@triton.jit
def _second_product(
    inner, down, scales, order, tile_experts, out, width, num_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """``out`` [P, D]: the down products of ``inner`` [N BLOCK_M, I], each at its pick."""
    expert = tl.load(tile_experts + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    place = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    pick = tl.load(order + place).to(tl.int64)[:, None]
    columns = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    inside = columns < num_out
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, width, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        a = tl.load(inner + place[:, None] * width + k[None, :], mask=(pick >= 0) & (k[None, :] < width), other=0.0)
        b = _load_weight(down, scales, expert, begin, columns, width, num_out, inside, a.dtype, BLOCK_K, FORMAT)
        acc = dot(a, b, acc)
    tl.store(out + pick * num_out + columns, narrow(acc, out.dtype.element_ty), mask=(pick >= 0) & inside)


@triton.jit
def _combine(parts, experts, weights, out, top_k, width, BLOCK: tl.constexpr):
    """A stretch of one row: the weighted sum of its picks, in their order."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(top_k):
        pick = row * top_k + k
        here = tl.load(experts + pick) >= 0
        part = tl.load(parts + pick * width + column, mask=(column < width) & here, other=0.0).to(tl.float32)
        total += tl.load(weights + pick) * part
    tl.store(out + row * width + column, narrow(total, out.dtype.element_ty), mask=column < width)


def combine(parts: torch.Tensor, routing: Routing, out: torch.Tensor) -> torch.Tensor:
    """``out`` [T, D]: the sum over k of ``routing.weights`` times ``parts`` [T k, D], without picks of -1."""
    (num_rows, width), top_k = out.shape, routing.experts.shape[1]
    block = min(power(width), 1024)
    launch(
        _combine, (num_rows, triton.cdiv(width, block)), parts, routing.experts.contiguous(),
        routing.weights.contiguous(), out, top_k, width, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def tile_rows(num_picks: int, num_experts: int, row_by_row: bool) -> int:
    """Rows of a tile: about as many as an expert gets."""
    return ROW_BY_ROW_BLOCK if row_by_row else min(power(triton.cdiv(num_picks, num_experts), 16), 128)


def _forward(
    x: torch.Tensor, routing: Routing, gate_up: PackedWeight, down: PackedWeight, limit: float, row_by_row: bool
) -> torch.Tensor:
    num_experts, num_in, width = gate_up.values.shape[0], gate_up.num_in, down.num_in
    x, num_picks = x.contiguous(), routing.experts.numel()
    block = tile_rows(num_picks, num_experts, row_by_row)
    tiles = group_by_expert(routing.experts, num_experts, block)
    num_tiles = tiles.experts.shape[0]
    inner = torch.empty((num_tiles * block, width), dtype=x.dtype, device=x.device)
    parts = torch.empty((num_picks, num_in), dtype=x.dtype, device=x.device)
    sizes = {"BLOCK_M": block, "BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K, "num_warps": 4 if block < 128 else 8}
    sizes["FORMAT"] = {torch.float8_e4m3fn: 1, torch.uint8: 2}.get(gate_up.values.dtype, 0)
    launch(
        _first_product, (triton.cdiv(width, BLOCK_N), num_tiles), x, x.stride(0), gate_up.values, gate_up.scales,
        tiles.order, tiles.experts, inner, num_in, width, routing.experts.shape[1], limit, **sizes, num_stages=3,
    )  # fmt: skip
    launch(
        _second_product, (triton.cdiv(num_in, BLOCK_N), num_tiles), inner, down.values, down.scales, tiles.order,
        tiles.experts, parts, width, num_in, **sizes, num_stages=4,
    )  # fmt: skip
    return combine(parts, routing, torch.empty_like(x))


def bind_experts_forward(
    gate_up: torch.Tensor, down: torch.Tensor, limit: float, row_by_row: bool = False
) -> Callable[[torch.Tensor, Routing], torch.Tensor]:
    """See :func:`..moe.experts_forward`. A row's sums run in the order of its picks."""
    first, second = (PackedWeight(weight, weight, weight.shape[1]) for weight in (gate_up, down))
    return lambda x, routing: _forward(x, routing, first, second, limit, row_by_row)


def bind_scaled_experts_forward(
    gate_up: PackedWeight, down: PackedWeight, limit: float, row_by_row: bool = False
) -> Callable[[torch.Tensor, Routing], torch.Tensor]:
    """See :func:`..quantised.scaled_experts_forward`."""
    return lambda x, routing: _forward(x, routing, gate_up, down, limit, row_by_row)


@triton.jit
def _swiglu_rows(gate_up, out, width, limit, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = gate_up + row * 2 * width + column
    gate = tl.load(at, mask=column < width, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, narrow(swiglu(gate, up, limit), out.dtype.element_ty), mask=column < width)


def bind_swiglu(limit: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..moe.swiglu`."""

    def forward(gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out, block = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device), min(power(width), 1024)
        launch(_swiglu_rows, (num_rows, triton.cdiv(width, block)), gate_up, out, width, limit, BLOCK=block)
        return out

    return forward
