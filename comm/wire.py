"""Number formats on the wire: what every backend moves as it is, and the rest as bytes."""

from __future__ import annotations

import torch
from torch import Tensor

ARITHMETIC = frozenset(
    (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8)
)
_TRAVELS_AS_IS = ARITHMETIC | {torch.bool}


def to_wire(x: Tensor) -> Tensor:
    """``x`` contiguous, in a format every backend moves: [..., itemsize] bytes where it would refuse the dtype."""
    x = x.contiguous()
    return x if x.dtype in _TRAVELS_AS_IS else x.unsqueeze(-1).view(torch.uint8)


def from_wire(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`to_wire`, back in ``dtype``."""
    return x if x.dtype == dtype else x.view(dtype).squeeze(-1)
