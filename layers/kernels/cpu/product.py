"""Products in registers.

Every number of a product is one chain of fused multiply-adds in the order of the inner index, whatever tile it falls
in. So a row's result is bitwise the same whatever rows are computed with it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import floats, strict

LANES = 8  # float32 numbers in a vector
BYTES = 4  # of a float32


def make_tile(num_rows: int, num_vectors: int, num_panels: int = 1, ahead: int = 0) -> Callable[..., None]:
    """Code for ``num_rows`` rows by ``num_vectors`` vectors of a product, all of whose sums stay in registers.

    For each k it reads ``num_vectors`` vectors of the weight's row k and, of each row, one number, ``x_step`` bytes
    behind the one before, which is spread over a vector. The same of ``num_panels`` weights, ``panel`` bytes apart,
    whose results lie side by side. Row k + ``ahead`` of the weights, and at the end what lies behind them, is asked for
    beforehand. It is written in the compiler's language, since a loop over an array of sums would keep them in memory.
    """

    @intrinsic
    def tile(typingctx, x, x_stride, x_step, weight, weight_stride, panel, out, out_stride, num_in):
        def emit(context, builder, signature, args):
            x, x_stride, x_step, weight, weight_stride, panel, out, out_stride, num_in = args
            number, size = ir.FloatType(), num_in.type
            vector = ir.VectorType(number, LANES)
            zero = ir.Constant(vector, [0.0] * LANES)
            fma = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f32"
            )

            def pointer(base, stride, row, byte, kind):
                start = builder.add(base, builder.mul(stride, row))
                return builder.inttoptr(builder.add(start, byte), kind.as_pointer())

            def spread(value):
                one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
                lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
                return builder.shuffle_vector(one, one, lanes)

            bits = ir.IntType(32)
            fetch = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), bits, bits, bits]),
                "llvm.prefetch.p0i8",
            )
            columns = [(p, v) for p in range(num_panels) for v in range(num_vectors)]
            starts = [builder.add(weight, builder.mul(panel, size(p))) for p in range(num_panels)]
            sums = {(r, c): cgutils.alloca_once_value(builder, zero) for r in range(num_rows) for c in columns}
            with cgutils.for_range(builder, num_in) as loop:
                k = loop.index
                for start in starts if ahead else ():
                    at = pointer(start, weight_stride, builder.add(k, size(ahead)), size(0), ir.IntType(8))
                    builder.call(fetch, [at, bits(0), bits(3), bits(1)])  # to be read, into the nearest cache, data
                loaded = {
                    (p, v): builder.load(
                        pointer(starts[p], weight_stride, k, size(v * LANES * BYTES), vector), align=BYTES
                    )
                    for p, v in columns
                }
                for r in range(num_rows):
                    byte = builder.mul(k, x_step)
                    value = spread(builder.load(pointer(x, x_stride, size(r), byte, number), align=BYTES))
                    for c in columns:
                        total = builder.call(fma, (value, loaded[c], builder.load(sums[r, c])))
                        builder.store(total, sums[r, c])
            for (r, (p, v)), total in sums.items():
                to = pointer(out, out_stride, size(r), size((p * num_vectors + v) * LANES * BYTES), vector)
                builder.store(builder.load(total), to, align=BYTES)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), emit

    return tile


# About eight chains at a time hide the latency of a multiply-add; one row, bound by memory, reads longer stretches.
_tile_1_16, _tile_1_8, _tile_1_4, _tile_1_2, _tile_1_1 = (make_tile(1, v) for v in (16, 8, 4, 2, 1))
_tile_2_4, _tile_2_2, _tile_2_1 = (make_tile(2, v) for v in (4, 2, 1))
_tile_4_2, _tile_4_1 = (make_tile(4, v) for v in (2, 1))
_tile_6_2, _tile_6_1 = (make_tile(6, v) for v in (2, 1))


@strict
def _tile(num_rows, left, x, x_stride, x_step, weight, weight_stride, out, out_stride, num_in):
    """One tile of ``num_rows`` (1, 2, 4 or 6) rows and at most ``left`` vectors; how many vectors it had."""
    if num_rows == 6:
        if left >= 2:
            _tile_6_2(x, x_stride, x_step, weight, weight_stride, 0, out, out_stride, num_in)
            return 2
        _tile_6_1(x, x_stride, x_step, weight, weight_stride, 0, out, out_stride, num_in)
        return 1
    if num_rows == 4:
        if left >= 2:
            _tile_4_2(x, x_stride, x_step, weight, weight_stride, 0, out, out_stride, num_in)
            return 2
        _tile_4_1(x, x_stride, x_step, weight, weight_stride, 0, out, out_stride, num_in)
        return 1
    if num_rows == 2:
        if left >= 4:
            _tile_2_4(x, x_stride, x_step, weight, weight_stride, 0, out, out_stride, num_in)
            return 4
        if left >= 2:
            _tile_2_2(x, x_stride, x_step, weight, weight_stride, 0, out, out_stride, num_in)
            return 2
        _tile_2_1(x, x_stride, x_step, weight, weight_stride, 0, out, out_stride, num_in)
        return 1
    if left >= 16:
        _tile_1_16(x, x_stride, x_step, weight, weight_stride, 0, out, out_stride, num_in)
        return 16
    if left >= 8:
        _tile_1_8(x, x_stride, x_step, weight, weight_stride, 0, out, out_stride, num_in)
        return 8
    if left >= 4:
        _tile_1_4(x, x_stride, x_step, weight, weight_stride, 0, out, out_stride, num_in)
        return 4
    if left >= 2:
        _tile_1_2(x, x_stride, x_step, weight, weight_stride, 0, out, out_stride, num_in)
        return 2
    _tile_1_1(x, x_stride, x_step, weight, weight_stride, 0, out, out_stride, num_in)
    return 1


@intrinsic
def _fma(typingctx, a, b, c):
    """``a b + c`` in float32, rounded once."""

    def emit(context, builder, signature, args):
        number = ir.FloatType()
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(number, [number] * 3), "llvm.fma.f32")
        return builder.call(fma, args)

    return types.float32(types.float32, types.float32, types.float32), emit


@strict
def in_vectors(count):
    """The numbers of as many whole vectors as hold ``count``."""
    return (count + LANES - 1) // LANES * LANES


@strict
def spot(x, row, column):
    """Where number [row, column] of a C-contiguous matrix lies."""
    return x.ctypes.data + BYTES * (row * x.shape[1] + column)


@strict
def _narrow_product(x, x_row, x_step, weight, weight_row, out, out_row, num_rows, num_in, num_out):
    x, weight = floats(x, (num_rows * x_row + num_in * x_step,)), floats(weight, (num_in, weight_row))
    result = floats(out, (num_rows, out_row))
    for i in range(num_rows):
        for j in range(num_out):
            total = np.float32(0)
            for k in range(num_in):
                total = _fma(x[i * x_row + k * x_step], weight[k, j], total)
            result[i, j] = total


@strict
def part_product(x, x_row, x_step, weight, weight_row, out, out_row, num_rows, num_in, num_out):
    """``out = x @ weight`` for parts of matrices that are not known beforehand (else see ``packed.py``).

    Each is given by the address of its first number and by how many numbers further the next row begins, ``x`` also by
    how many further the next number of a row lies: 1, or the width of a matrix of which ``x`` is the transpose. ``x``
    is [num_rows, num_in], ``weight`` [num_in, num_out].
    """
    if num_out < LANES:
        _narrow_product(x, x_row, x_step, weight, weight_row, out, out_row, num_rows, num_in, num_out)
        return
    i = 0
    while i < num_rows:
        rest = num_rows - i
        rows = 6 if rest >= 6 else 4 if rest >= 4 else 2 if rest >= 2 else 1
        x_at, out_at = x + BYTES * i * x_row, out + BYTES * i * out_row
        j = 0
        while j < num_out:
            # The last vector may overlap the one before: those numbers come out the same once more.
            j = min(j, num_out - LANES)
            left, step = (num_out - j) // LANES, BYTES * j
            j += LANES * _tile(
                rows, left, x_at, BYTES * x_row, BYTES * x_step, weight + step, BYTES * weight_row, out_at + step,
                BYTES * out_row, num_in,
            )  # fmt: skip
        i += rows
