"""How the compiled core is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` at its first call, kept on disk where a folder for that can be written."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        # Neither the package's folder nor the user's cache folder can be written: every process compiles anew.
        return numba.njit(nogil=True)(function)
