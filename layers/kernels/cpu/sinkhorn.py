"""Sinkhorn's normalisation of many small matrices at once, one in each lane of the vector registers."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .product import BYTES, LANES

SIDE = 4  # rows and columns of a matrix: the usual number of streams


@intrinsic
def balance_lanes(typingctx, at, num_iters, eps):
    """Make rows and columns of ``LANES`` matrices sum to one, in place: columns, then ``num_iters`` - 1 times
    rows and columns. ``at`` is the address of float32 [SIDE, SIDE, LANES]; ``eps`` is added to every sum.

    All numbers stay in registers, which is why it is written in the compiler's language.
    """

    def emit(context, builder, signature, args):
        at, num_iters, eps = args
        size, vector = at.type, ir.VectorType(ir.FloatType(), LANES)
        lane = ir.IntType(32)

        def spread(value):
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, lane(0))
            return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(lane, LANES), [0] * LANES))

        def place(k):
            return builder.inttoptr(builder.add(at, size(k * LANES * BYTES)), vector.as_pointer())

        epsilon, ones = spread(eps), ir.Constant(vector, [1.0] * LANES)
        numbers = [cgutils.alloca_once_value(builder, builder.load(place(k), align=BYTES)) for k in range(SIDE * SIDE)]

        def normalise(members):
            total = epsilon
            for k in members:
                total = builder.fadd(total, builder.load(numbers[k]))
            inverse = builder.fdiv(ones, total)
            for k in members:
                builder.store(builder.fmul(builder.load(numbers[k]), inverse), numbers[k])

        def columns():
            for b in range(SIDE):
                normalise([a * SIDE + b for a in range(SIDE)])

        columns()
        with cgutils.for_range(builder, builder.sub(num_iters, size(1))):
            for a in range(SIDE):
                normalise([a * SIDE + b for b in range(SIDE)])
            columns()
        for k, number in enumerate(numbers):
            builder.store(builder.load(number), place(k), align=BYTES)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32), emit
