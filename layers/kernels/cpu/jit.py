"""How CPU kernels are compiled, and how they see tensors.

Reading a tensor into numpy costs as much as many of the kernels do, so kernels take the address of an activation's
first number (:func:`address`) and look at it as an array (:func:`floats`). Weights and results are numpy arrays.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from numba import carray, types
from numba.extending import intrinsic

COMMON = {"cache": True, "nogil": True, "error_model": "numpy"}
# Reassociation lets sums use vector registers; NaN and infinity keep their meaning.
jit = numba.njit(**COMMON, fastmath={"reassoc", "contract", "nsz"})
# Every operation as written: where the order of a sum, or the rounding of a difference, is the point. It has to be
# said: a function that says nothing is compiled in the way of whoever calls it first.
strict = numba.njit(**COMMON, fastmath=False)
# As written, but a product and a sum may be one operation, rounded once.
fused = numba.njit(**COMMON, fastmath={"contract"})


def address(x: torch.Tensor) -> int:
    """Where the numbers of the float32 tensor ``x`` begin. It must be contiguous, and outlive the kernel's call."""
    assert x.dtype == torch.float32, f"compiled kernels compute in float32, not {x.dtype}"
    return x.data_ptr()


@intrinsic
def _pointer(typingctx, at):
    def emit(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), emit


@strict
def floats(at, shape):
    """The float32 numbers that begin at ``at`` as a C-contiguous array."""
    return carray(_pointer(at), shape, np.float32)


@numba.njit(**COMMON, fastmath={"reassoc", "nsz", "nnan"})
def largest(x):
    """The maximum of ``x``, of which none is NaN: only so is the loop one of vector instructions."""
    top = x[0]
    for k in range(1, x.shape[0]):
        top = max(top, x[k])
    return top
