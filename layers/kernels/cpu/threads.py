"""How CPU kernels share rows out to threads.

A kernel has a second form, whose one loop gives each thread a run of rows and calls the first form for it. So a row's
result is bitwise the same with any number of threads.
"""

from __future__ import annotations

import importlib
import math
import sys

import numba
import torch

from .jit import COMMON, strict

NO_GUESSING = ("comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion")
# Iterations of a ``prange`` run at the same time; nothing else is changed.
shared = numba.njit(**COMMON, fastmath=False, parallel={**dict.fromkeys(NO_GUESSING, False), "prange": True})

WORTH_SHARING = 100_000
"""Multiply-adds, or what takes as long, that each thread should have to do: several times what it takes to start."""


def use_threads() -> int:
    """The threads for kernels that are bound now: as many as torch uses, which numba is told for the calling thread;
    kernels run on it too. One without OpenMP, since numba's own threads take longer to start than most kernels run.
    """
    of_torch = torch.get_num_threads()
    num_threads = min(of_torch, numba.config.NUMBA_NUM_THREADS)
    if num_threads == 1 or numba.config.THREADING_LAYER.lower() not in ("default", "omp"):
        return 1
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return 1
    numba.set_num_threads(num_threads)
    torch.set_num_threads(of_torch)  # both use one OpenMP, to which numba, when it starts, gives its own number
    return num_threads


def rows_to_share(operations: int, num_threads: int) -> int:
    """From how many rows on, of so many multiply-adds each, threads pay; at least one for each."""
    if num_threads == 1:
        return sys.maxsize
    return max(num_threads, math.ceil(WORTH_SHARING * num_threads / max(operations, 1)))


@strict
def share(num_rows, part, num_parts):
    """The first row of a part, and the first behind it."""
    return num_rows * part // num_parts, num_rows * (part + 1) // num_parts
