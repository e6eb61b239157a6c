"""The softmax of many keys for several heads at once, one in each lane of the vector registers."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .exp import C2, C3, C4, C5, C6, C7, LEAST, LN2_HIGH, LN2_LOW, LOG2_E, ROUNDER
from .jit import strict
from .product import BYTES, LANES

NUMBER = ir.VectorType(ir.FloatType(), LANES)
BITS = ir.VectorType(ir.IntType(32), LANES)


def _constant(value):
    return ir.Constant(NUMBER, [float(value)] * LANES)


def _exp_below(builder, x):
    """:func:`.exp.exp_below` of a vector, step by step the same."""

    def fma(a, b, c):
        kind = ir.FunctionType(NUMBER, [NUMBER] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), (a, b, c))

    least = _constant(LEAST)
    y = builder.select(builder.fcmp_ordered("<", x, least), least, x)
    t = fma(y, _constant(LOG2_E), _constant(ROUNDER))
    n = builder.fsub(t, _constant(ROUNDER))
    r = fma(n, _constant(-LN2_LOW), fma(n, _constant(-LN2_HIGH), y))
    p = _constant(C7)
    for c in (C6, C5, C4, C3, C2, 1.0, 1.0):
        p = fma(p, r, _constant(c))
    power = builder.shl(builder.bitcast(t, BITS), ir.Constant(BITS, [23] * LANES))
    return builder.fmul(p, builder.bitcast(power, NUMBER))


@intrinsic
def _softmax(typingctx, row, first, num_first, second, num_second, sinks, inverse):

    def emit(context, builder, signature, args):
        row, first, num_first, second, num_second, sinks, inverse = args
        stretches = ((first, num_first), (second, num_second))

        def place(address):
            return builder.inttoptr(address, NUMBER.as_pointer())

        def load(pointer):
            return builder.load(pointer, align=BYTES)

        sink = load(place(sinks))
        highest = cgutils.alloca_once_value(builder, sink)
        for at, num_keys in stretches:
            with cgutils.for_range(builder, num_keys) as loop:
                logits, top = load(place(builder.add(at, builder.mul(row, loop.index)))), builder.load(highest)
                builder.store(builder.select(builder.fcmp_ordered(">", top, logits), top, logits), highest)
        top = builder.load(highest)
        total = cgutils.alloca_once_value(builder, _exp_below(builder, builder.fsub(sink, top)))
        for at, num_keys in stretches:
            with cgutils.for_range(builder, num_keys) as loop:
                to = place(builder.add(at, builder.mul(row, loop.index)))
                share = _exp_below(builder, builder.fsub(load(to), top))
                builder.store(share, to, align=BYTES)
                builder.store(builder.fadd(builder.load(total), share), total)
        builder.store(builder.fdiv(_constant(1.0), builder.load(total)), place(inverse), align=BYTES)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7), emit


@strict
def softmax_lanes(row, first, num_first, second, num_second, sinks, inverse):
    """``e^(logits - top)`` in place of ``LANES`` columns of logits: ``num_first`` rows of these, ``row`` bytes apart,
    from address ``first`` on, and ``num_second`` from ``second`` on; at ``inverse`` one over their sums with the shares
    of the logits at ``sinks``."""
    _softmax(row, first, num_first, second, num_second, sinks, inverse)
