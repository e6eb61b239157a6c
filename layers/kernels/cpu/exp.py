"""The exponential function in float32, written so that a loop that calls it runs on vector registers."""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import fused, jit

LOG2_E = np.float32(math.log2(math.e))
# ln 2 in two parts: the first has 9 bits, so that n LN2_HIGH is exact for every exponent n of a float.
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(math.log(2.0) - 0.693359375)
# Beyond these the result is zero or infinity.
LOWEST, HIGHEST = np.float32(-105.0), np.float32(89.5)
# From here on a factor 2^n is a normal number, and n from -126 to 0.
LEAST = np.float32(-87.0)
C2, C3, C4, C5, C6, C7 = (np.float32(1.0 / math.factorial(n)) for n in range(2, 8))
HALF, ONE = np.float32(0.5), np.float32(1.0)
# Added to a small number, it leaves the nearest whole number and 127 in the last bits of the sum.
ROUNDER = np.float32(1.5 * 2**23 + 127)


@intrinsic
def _power_of_two(typingctx, n):
    """2^n for a whole float32 ``n`` from -126 to 127: its exponent bits, put together."""

    def emit(context, builder, signature, args):
        bits = ir.IntType(32)
        exponent = builder.add(builder.fptosi(args[0], bits), ir.Constant(bits, 127))
        return builder.bitcast(builder.shl(exponent, ir.Constant(bits, 23)), ir.FloatType())

    return types.float32(types.float32), emit


@intrinsic
def _exponent(typingctx, t):
    """2^n for ``t = n + ROUNDER``: the last 9 bits of ``t``, moved to where an exponent is."""

    def emit(context, builder, signature, args):
        bits = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.bitcast(args[0], bits), ir.Constant(bits, 23)), ir.FloatType())

    return types.float32(types.float32), emit


@fused
def _series(y, n):
    """``e^(y - n ln 2)``."""
    r = (y - n * LN2_HIGH) - n * LN2_LOW
    p = ((((C7 * r + C6) * r + C5) * r + C4) * r + C3) * r + C2
    return (p * r + ONE) * r + ONE


@fused
def exp(x):
    """``e^x`` of a float32, within 2 units in the last place; 0, infinity and NaN where they belong.

    x = n ln 2 + r with a whole n and |r| <= ln 2 / 2, so e^x = 2^n e^r, and e^r is a short Taylor sum. 2^n is taken as
    two factors, since the exponents of the smallest and largest results do not fit one.
    """
    y = x if x > LOWEST else LOWEST
    y = y if y < HIGHEST else HIGHEST
    n = np.floor(y * LOG2_E + HALF)
    half = np.floor(n * HALF)
    result = _series(y, n) * _power_of_two(half) * _power_of_two(n - half)
    return result if x == x else x


@fused
def exp_below(x):
    """``e^x`` of a float32 ``x <= 0``, for sums that hold a 1; below ``LEAST`` it stays at e^-87, nothing beside that.
    NaN where it belongs."""
    y = LEAST if x < LEAST else x
    t = y * LOG2_E + ROUNDER
    return _series(y, t - ROUNDER) * _exponent(t)


@jit
def sigmoid(x):
    """``1 / (1 + e^-x)``."""
    return ONE / (ONE + exp(-x))
