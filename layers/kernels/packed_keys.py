"""Keys of V4's attention in 8-bit floats, in plain torch.

Legend: K rows, d key width, r rotary width (the tail of a key), n = d - r.

A packed row is bytes, so that a cache moves it without knowing more than its width: the tail as r bfloat16 numbers; the
n numbers before it as e4m3; for every 64 of those (the last of them fewer) the exponent of their scale, a power of two
2^(byte - 127); zeros up to a multiple of 8 bytes. At d = 512 and r = 64 these are 584 bytes for 1,024 in bfloat16.

Error: a number of the first n is off by at most 1/16 of itself, or 2^-10 of its scale if that is more, and a scale is
below 2 / 448 of the largest magnitude among its 64; a number of the tail is off by at most 1/256 of itself.
"""

from __future__ import annotations

import torch

from .quantised import FP8, FP8_MAX

GROUP = 64


def packed_width(width: int, rotary: int) -> int:
    """Bytes of a packed row."""
    plain = width - rotary
    return -(-(2 * rotary + plain + -(-plain // GROUP)) // 8) * 8


def is_packed(rows: torch.Tensor) -> bool:
    """Whether these are packed rows rather than numbers."""
    return rows.dtype == torch.uint8


def pack_keys(keys: torch.Tensor, rotary: int) -> torch.Tensor:
    """``keys`` [K, d] of any float dtype, the last ``rotary`` of them in bfloat16: uint8 [K, :func:`packed_width`]."""
    num_rows, width = keys.shape
    plain = width - rotary
    num_groups = -(-plain // GROUP)
    wide = torch.nn.functional.pad(keys[:, :plain].float(), (0, num_groups * GROUP - plain))
    groups = wide.unflatten(1, (num_groups, GROUP))
    exponents = _exponents(groups.abs().amax(2) / FP8_MAX)
    values = (groups / _powers(exponents).unsqueeze(2)).clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
    tail = keys[:, plain:].to(torch.bfloat16).reshape(-1).view(torch.uint8).view(num_rows, 2 * rotary)
    row = torch.cat((tail, values.flatten(1)[:, :plain], exponents.to(torch.uint8)), dim=1)
    return torch.nn.functional.pad(row, (0, packed_width(width, rotary) - row.shape[1]))


def unpack_keys(rows: torch.Tensor, width: int, rotary: int) -> torch.Tensor:
    """float32 [..., width] of packed ``rows`` [..., :func:`packed_width`]."""
    plain, begin = width - rotary, 2 * rotary
    tail = rows[..., :begin].reshape(-1).view(torch.bfloat16).view(*rows.shape[:-1], rotary).float()
    values = rows[..., begin : begin + plain].view(FP8).float()
    exponents = rows[..., begin + plain : begin + plain + -(-plain // GROUP)]
    scales = _powers(exponents.int()).repeat_interleave(GROUP, -1)[..., :plain]
    return torch.cat((values * scales, tail), dim=-1)


def _exponents(scales: torch.Tensor) -> torch.Tensor:
    """The biased exponents, from 1 on, of the smallest powers of two not below ``scales``; int32."""
    return ((scales.view(torch.int32) + 0x7FFFFF) >> 23).clamp(1, 254)


def _powers(exponents: torch.Tensor) -> torch.Tensor:
    """2^(e - 127), float32."""
    return (exponents << 23).view(torch.float32)
