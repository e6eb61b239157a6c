"""What all kernels share: how they are launched, products, rotation, and what Triton's interpreter cannot do by itself.

The interpreter (``TRITON_INTERPRET=1``, on CPU tensors) multiplies bfloat16 numbers as if they were integers, so
operands are widened there; everything else runs the same code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))

# How many programs fill the device: an H100 or H200, or the interpreter, which runs one after the other.
NUM_SMS = 4 if INTERPRETED.value else 132


def launch(kernel, grid: tuple[int, ...], *args: object, **options: object) -> None:
    """Run ``kernel`` over ``grid``; nothing if the grid is empty, as on a rank without rows."""
    if all(grid):
        kernel[grid](*args, **options)


def power(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``size`` and ``least``."""
    return max(triton.next_power_of_2(size), least)


def warps_for(block: int) -> int:
    """Warps of a program that keeps ``block`` numbers of a row in registers, about 16 a thread."""
    return min(max(block // 512, 1), 16)


def check_device(device: torch.device) -> None:
    """Raise ``ValueError`` if Triton cannot run kernels on ``device``."""
    if device.type == "cpu" and not INTERPRETED.value:
        raise ValueError(
            "--kernels triton on the CPU needs Triton's interpreter: set TRITON_INTERPRET=1 (slow, for checks only)"
        )
    if device.type != "cpu" and INTERPRETED.value:
        raise ValueError("TRITON_INTERPRET=1 is set, but the device is a GPU: unset it, or use --device cpu")


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b``; ``acc`` float32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 ``x`` in ``dtype``, rounded to nearest even; the interpreter would cut bfloat16 off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return ((bits >> 16) << 16).to(tl.float32, bitcast=True).to(tl.bfloat16)
    return x.to(dtype)


@triton.jit
def rotate_pairs(x, cos, sin):
    """``x`` [rows, 2 pairs] turned pair by pair; ``cos`` and ``sin`` broadcast against [rows, pairs]."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (x.shape[0], x.shape[1]))


@triton.jit
def load_angles(table, position, channel_pairs, first_pair, num_pairs, other):
    """Row ``position`` of a rope table [P, pairs] at ``channel_pairs`` of a head whose first rotated pair is
    ``first_pair``; ``other`` for pairs that are not rotated."""
    pair = channel_pairs - first_pair
    return tl.load(table + position * num_pairs + pair, mask=(pair >= 0) & (pair < num_pairs), other=other)
