"""Narrow formats in plain torch: packing rows and weights, and what is computed from them.

Legend: T rows, D width, E experts. FP8 is e4m3 (3 mantissa bits, at most 448), FP4 is e2m1 (at most 6, two a byte, the
even row in the low bits). Scales of weights are powers of two, so a weight that a checkpoint stores in the same format
is packed without loss, and unpacked values are exact in bfloat16. A value is off by at most 1/16 of itself in FP8 and
1/4 in FP4, or by the distance between the format's smallest numbers times the scale, whichever is more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .moe import Routing, experts_forward

FP8, FP8_MAX, FP4_MAX = torch.float8_e4m3fn, 448.0, 6.0
ROW_GROUP, BLOCK, FP4_GROUP = 128, 128, 32
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class PackedRows(NamedTuple):
    """``values`` e4m3 [T, D] and ``scales`` float32 [T, ceil(D / 128)], one for 128 neighbours of a row."""

    values: torch.Tensor
    scales: torch.Tensor


class PackedWeight(NamedTuple):
    """Weights [.., in, out]. FP8: ``values`` e4m3 of that shape, ``scales`` float32 [.., in / 128, out / 128]. FP4:
    ``values`` uint8 [.., in / 2, out], ``scales`` float32 [.., in / 32, out]. All sizes of scales are rounded up."""

    values: torch.Tensor
    scales: torch.Tensor
    num_in: int


def _in_groups(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """``x`` with axis ``dim`` filled up with zeros to whole groups and split into (groups, size)."""
    missing = -x.shape[dim] % size
    if missing:
        shape = list(x.shape)
        shape[dim] = missing
        x = torch.cat((x, x.new_zeros(shape)), dim=dim)
    return x.unflatten(dim, (-1, size))


def _power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """The smallest powers of two not below ``scale``; 1 for zeros."""
    return torch.where(scale > 0, torch.exp2(torch.log2(scale.double()).ceil()).float(), 1.0)


def pack_rows(x: torch.Tensor) -> PackedRows:
    """``x`` [T, D] with a scale for every 128 channels of a row: their largest magnitude over 448."""
    groups = _in_groups(x.float(), 1, ROW_GROUP)
    scales = groups.abs().amax(2).clamp_min(1e-30) / FP8_MAX
    values = (groups / scales.unsqueeze(2)).clamp(-FP8_MAX, FP8_MAX).flatten(1)[:, : x.shape[1]]
    return PackedRows(values.to(FP8), scales)


def unpack_rows(packed: PackedRows) -> torch.Tensor:
    """float32 [T, D]."""
    width = packed.values.shape[1]
    return packed.values.float() * packed.scales.repeat_interleave(ROW_GROUP, 1)[:, :width]


def pack_fp8(weight: torch.Tensor) -> PackedWeight:
    """``weight`` [.., in, out] in blocks of 128 by 128."""
    num_in, num_out = weight.shape[-2:]
    blocks = _in_groups(_in_groups(weight.float(), -1, BLOCK), -3, BLOCK)  # [.., in blocks, 128, out blocks, 128]
    scales = _power_of_two(blocks.abs().amax((-3, -1)) / FP8_MAX)
    values = (blocks / scales[..., :, None, :, None]).flatten(-4, -3).flatten(-2)[..., :num_in, :num_out]
    return PackedWeight(values.to(FP8).contiguous(), scales, num_in)


def pack_fp4(weight: torch.Tensor) -> PackedWeight:
    """``weight`` [.., in, out] with a scale for every 32 inputs of an output, ties rounded to the even code."""
    num_in, num_out = weight.shape[-2:]
    groups = _in_groups(weight.float(), -2, FP4_GROUP)
    scales = _power_of_two(groups.abs().amax(-2) / FP4_MAX)
    scaled = (groups / scales.unsqueeze(-2)).flatten(-3, -2)
    known = torch.tensor(FP4_VALUES, device=weight.device)
    between = (known[1:] + known[:-1]) / 2
    sizes = scaled.abs().contiguous()
    above, at_least = torch.bucketize(sizes, between), torch.bucketize(sizes, between, right=True)
    codes = torch.where(above % 2 == 0, above, at_least) + 8 * (scaled < 0)
    pairs = codes.to(torch.uint8).unflatten(-2, (-1, 2))
    values = pairs[..., 0, :] | pairs[..., 1, :] << 4
    return PackedWeight(values[..., : -(-num_in // 2), :].contiguous(), scales, num_in)


FORMATS: dict[str, Callable[[torch.Tensor], PackedWeight]] = {"fp8": pack_fp8, "fp4": pack_fp4}


def stack_weights(weights: Sequence[torch.Tensor | PackedWeight]) -> torch.Tensor | PackedWeight:
    """Weights of equal sizes and format along a new first axis."""
    if isinstance(weights[0], torch.Tensor):
        return torch.stack(weights)
    values, scales, num_in = zip(*weights)
    return PackedWeight(torch.stack(values), torch.stack(scales), num_in[0])


def bytes_of(weight: torch.Tensor | PackedWeight) -> tuple[torch.Tensor, ...]:
    """The tensors that ``weight`` consists of, in types that every collective takes; views, so writing to them changes
    the weight."""
    if isinstance(weight, torch.Tensor):
        return (weight,)
    return weight.values.view(torch.uint8), weight.scales


def unpack_weight(packed: PackedWeight) -> torch.Tensor:
    """float32 [.., in, out]."""
    num_out = packed.values.shape[-1]
    if packed.values.dtype == FP8:
        scales = packed.scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
        return packed.values.float() * scales[..., : packed.num_in, :num_out]
    pairs = torch.stack((packed.values & 15, packed.values >> 4), dim=-2).flatten(-3, -2)[..., : packed.num_in, :]
    known = torch.tensor(FP4_VALUES, device=pairs.device)
    values = known[(pairs & 7).long()] * torch.where(pairs >= 8, -1.0, 1.0)
    return values * packed.scales.repeat_interleave(FP4_GROUP, -2)[..., : packed.num_in, :]


def scaled_linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """``x`` [T, in], packed by :func:`pack_rows`, times an FP8 ``weight`` [in, out], in float32; [T, out] as ``x``."""
    return (unpack_rows(pack_rows(x)) @ unpack_weight(weight)).to(x.dtype)


def scaled_experts_forward(
    x: torch.Tensor, routing: Routing, gate_up: PackedWeight, down: PackedWeight, limit: float
) -> torch.Tensor:
    """:func:`..moe.experts_forward` with packed weights; rows keep their dtype."""
    return experts_forward(x, routing, unpack_weight(gate_up).to(x.dtype), unpack_weight(down).to(x.dtype), limit)
