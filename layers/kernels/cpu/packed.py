"""Products with weights that are known beforehand, packed once so that they are read in the order in which they lie.

A weight [in, out] becomes panels [P, in, 16] of 16 columns each. The last panel may repeat columns of the one before;
a weight of fewer than 16 columns is one panel filled up with zeros. Every number of a product is one chain of fused
multiply-adds in the order of the inner index, so a row's result is bitwise the same whatever rows are computed with it.
"""

from __future__ import annotations

import numpy as np
import torch

from .jit import floats, strict
from .product import BYTES, LANES, make_tile

WIDTH = 2 * LANES  # columns of a panel
CACHE_LINE = 64  # bytes, as many as a row of a panel has
AHEAD = 16  # rows of a panel that are under way from slower memory

# Eight chains or more at a time hide the latency of a multiply-add; twelve are as many as there are registers for.
_tile_1_4, _tile_1_2, _tile_1_1 = (make_tile(1, 2, panels, AHEAD) for panels in (4, 2, 1))
_tile_2_2, _tile_2_1 = (make_tile(2, 2, panels, AHEAD) for panels in (2, 1))
_tile_3_1, _tile_4_1, _tile_5_1, _tile_6_1 = (make_tile(rows, 2, 1, AHEAD) for rows in (3, 4, 5, 6))


def pack(weight: torch.Tensor) -> np.ndarray:
    """The panels [..., P, in, 16] of float32 ``weight`` [..., in, out], which is copied."""
    *leading, num_in, num_out = weight.shape
    starts = np.minimum(np.arange(0, num_out, WIDTH), max(num_out - WIDTH, 0))
    panels = _aligned((*leading, len(starts), num_in, WIDTH))
    for panel, start in enumerate(starts):
        columns = weight.numpy()[..., start : start + WIDTH]
        panels[..., panel, :, : columns.shape[-1]] = columns
        panels[..., panel, :, columns.shape[-1] :] = 0
    return panels


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """An empty float32 array whose rows of 16 numbers do not straddle cache lines."""
    size = BYTES * int(np.prod(shape))
    memory = np.empty(size + CACHE_LINE, np.uint8)
    skip = -memory.ctypes.data % CACHE_LINE
    return memory[skip : skip + size].view(np.float32).reshape(shape)


@strict
def _one_or_two_rows(two, x, x_stride, panels, panel, num_panels, out, out_stride, num_in):
    """Panels whose results lie side by side; several at a time, for enough chains."""
    p = 0
    while p < num_panels:
        weight, to, left = panels + panel * p, out + BYTES * WIDTH * p, num_panels - p
        if two and left >= 2:
            _tile_2_2(x, x_stride, BYTES, weight, BYTES * WIDTH, panel, to, out_stride, num_in)
            p += 2
        elif two:
            _tile_2_1(x, x_stride, BYTES, weight, BYTES * WIDTH, panel, to, out_stride, num_in)
            p += 1
        elif left >= 4:
            _tile_1_4(x, x_stride, BYTES, weight, BYTES * WIDTH, panel, to, out_stride, num_in)
            p += 4
        elif left >= 2:
            _tile_1_2(x, x_stride, BYTES, weight, BYTES * WIDTH, panel, to, out_stride, num_in)
            p += 2
        else:
            _tile_1_1(x, x_stride, BYTES, weight, BYTES * WIDTH, panel, to, out_stride, num_in)
            p += 1


@strict
def _one_panel(x, x_stride, weight, out, out_stride, num_rows, num_in):
    """All rows of one panel, in tiles of like height."""
    num_tiles = (num_rows + 5) // 6
    first = 0
    for t in range(num_tiles):
        rows = (num_rows - first) // (num_tiles - t)
        at, to = x + x_stride * first, out + out_stride * first
        if rows == 6:
            _tile_6_1(at, x_stride, BYTES, weight, BYTES * WIDTH, 0, to, out_stride, num_in)
        elif rows == 5:
            _tile_5_1(at, x_stride, BYTES, weight, BYTES * WIDTH, 0, to, out_stride, num_in)
        elif rows == 4:
            _tile_4_1(at, x_stride, BYTES, weight, BYTES * WIDTH, 0, to, out_stride, num_in)
        elif rows == 3:
            _tile_3_1(at, x_stride, BYTES, weight, BYTES * WIDTH, 0, to, out_stride, num_in)
        elif rows == 2:
            _tile_2_1(at, x_stride, BYTES, weight, BYTES * WIDTH, 0, to, out_stride, num_in)
        else:
            _tile_1_1(at, x_stride, BYTES, weight, BYTES * WIDTH, 0, to, out_stride, num_in)
        first += rows


@strict
def _narrow(x, x_stride, weight, out, out_width, num_rows, num_in, num_out):
    """A product of fewer columns than a panel has."""
    wide, result = np.empty((num_rows, WIDTH), np.float32), floats(out, (num_rows, out_width))
    _one_panel(x, x_stride, weight, wide.ctypes.data, BYTES * WIDTH, num_rows, num_in)
    for i in range(num_rows):
        for j in range(num_out):
            result[i, j] = wide[i, j]


@strict
def packed_part_product(x, x_width, panels, out, out_width, num_rows, num_out):
    """``out = x @ weight`` for a packed weight ``panels`` [P, in, 16] of ``num_out`` columns.

    ``x`` and ``out`` are parts of matrices, each given by the address of its first number and by the width of the whole
    matrix.
    """
    num_in = panels.shape[1]
    weight, x_stride, out_stride, panel = panels.ctypes.data, BYTES * x_width, BYTES * out_width, BYTES * WIDTH * num_in
    if num_rows == 0 or num_out == 0:
        return
    if num_out < WIDTH:
        _narrow(x, x_stride, weight, out, out_width, num_rows, num_in, num_out)
        return
    num_whole, last = num_out // WIDTH, BYTES * (num_out - WIDTH)
    if num_rows <= 2:
        _one_or_two_rows(num_rows == 2, x, x_stride, weight, panel, num_whole, out, out_stride, num_in)
    else:
        for p in range(num_whole):
            _one_panel(x, x_stride, weight + panel * p, out + BYTES * WIDTH * p, out_stride, num_rows, num_in)
    if num_out % WIDTH:
        _one_panel(x, x_stride, weight + panel * num_whole, out + last, out_stride, num_rows, num_in)


@strict
def packed_product(x, panels, out):
    """``out = x @ weight`` for a packed weight: ``x`` [T, in], ``out`` [T, out], C-contiguous."""
    num_rows, num_out = out.shape
    packed_part_product(x.ctypes.data, x.shape[1], panels, out.ctypes.data, num_out, num_rows, num_out)
