"""Keys in 8-bit floats. Legend: K rows, d key width (even), r rotary width; for the bytes of a row see the plain twin.

``BLOCK`` is a power of two that d fits in. Numbers are held as [rows, groups, GROUP], so that a group's scale is read,
or found, once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ..packed_keys import GROUP, packed_width
from .fp8 import to_e4m3
from .jit import INTERPRETED, launch, narrow, power
from .linear import with_inner_contiguous

SCALED = tl.constexpr(GROUP)


@triton.jit
def _channels(BLOCK: tl.constexpr):
    """The channels [groups, GROUP] of a row."""
    group: tl.constexpr = min(SCALED, BLOCK)
    return tl.arange(0, BLOCK // group)[:, None] * group + tl.arange(0, group)[None, :]


@triton.jit
def store_packed(to, keys, WIDTH: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr):
    """Pack the row ``keys`` float32 [BLOCK] to the bytes from ``to`` on."""
    plain: tl.constexpr = WIDTH - ROTARY
    num_groups: tl.constexpr = (plain + SCALED - 1) // SCALED
    end: tl.constexpr = 2 * ROTARY + plain + num_groups
    channel = _channels(BLOCK)
    own = tl.reshape(keys, (channel.shape[0], channel.shape[1]))
    group = tl.arange(0, channel.shape[0])
    scale = tl.max(tl.where(channel < plain, tl.abs(own), 0.0), axis=1) / 448.0
    exponent = tl.minimum(tl.maximum((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23, 1), 254)
    scaled = own / (exponent << 23).to(tl.float32, bitcast=True)[:, None]
    codes = to_e4m3(tl.minimum(tl.maximum(scaled, -448.0), 448.0)).to(tl.uint8, bitcast=True)
    tl.store(to + 2 * ROTARY + channel, codes, mask=channel < plain)
    tl.store(to + 2 * ROTARY + plain + group, exponent.to(tl.uint8), mask=group < num_groups)
    tail = to.to(tl.pointer_type(tl.bfloat16)) + (channel - plain)
    tl.store(tail, narrow(own, tl.bfloat16), mask=(channel >= plain) & (channel < WIDTH))
    rest = tl.arange(0, 8)
    tl.store(to + end + rest, tl.zeros((8,), dtype=tl.uint8), mask=rest < (8 - end % 8) % 8)


@triton.jit
def load_packed(rows, seen, dtype: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr):
    """The keys [n, BLOCK] in ``dtype`` (exact in bfloat16) whose bytes begin at ``rows`` [n]; zeros unless ``seen``."""
    plain: tl.constexpr = WIDTH - ROTARY
    channel = _channels(BLOCK)[None, :, :]
    row, own, group = rows[:, None, None], seen[:, None, None], tl.arange(0, channel.shape[1])[None, :]
    scaled = seen[:, None] & (group * SCALED < plain)
    exponent = tl.load(rows[:, None] + 2 * ROTARY + plain + group, mask=scaled, other=0).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)[:, :, None]
    codes = tl.load(row + 2 * ROTARY + channel, mask=own & (channel < plain), other=0)
    wide: tl.constexpr = tl.float32 if INTERPRETED else dtype
    keys = (codes.to(tl.float8e4nv, bitcast=True).to(wide) * scale.to(wide)).to(dtype)
    tail = row.to(tl.pointer_type(tl.bfloat16)) + (channel - plain)
    turned = tl.load(tail, mask=own & (channel >= plain) & (channel < WIDTH), other=0.0).to(dtype)
    return tl.reshape(tl.where(channel < plain, keys, turned), (rows.shape[0], BLOCK))


@triton.jit
def _pack(keys, keys_row, packed, WIDTH: tl.constexpr, ROTARY: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr):
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    own = tl.load(keys + row * keys_row + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    store_packed(packed + row * BYTES, own, WIDTH, ROTARY, BLOCK)


def bind_pack_keys(rotary: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..packed_keys.pack_keys`."""

    def pack_keys(keys: torch.Tensor) -> torch.Tensor:
        keys, (num_rows, width) = with_inner_contiguous(keys), keys.shape
        assert width % 2 == 0, f"packed keys have an even width, not {width}"
        packed = torch.empty((num_rows, packed_width(width, rotary)), dtype=torch.uint8, device=keys.device)
        launch(
            _pack, (num_rows,), keys, keys.stride(0), packed,
            WIDTH=width, ROTARY=rotary, BYTES=packed.shape[1], BLOCK=power(width, 2), num_warps=1,
        )  # fmt: skip
        return packed

    return pack_keys
