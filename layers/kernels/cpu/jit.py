"""The one place that says how CPU kernels are compiled."""

from __future__ import annotations

import numba
import numpy as np
import torch

# Reassociation lets sums use vector registers; NaN and infinity keep their meaning.
jit = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


def host(x: torch.Tensor) -> np.ndarray:
    """``x`` as a C-contiguous numpy array; a copy only where its rows are strided."""
    return x.contiguous().numpy()
