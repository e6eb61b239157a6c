"""Products in plain torch. Weights are kept input axis first, so that a row's products run along contiguous outputs."""

from __future__ import annotations

import torch


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x`` [T, in] times ``weight`` [in, out]; [T, out]."""
    return x @ weight


def grouped_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each group of ``x`` [T, G, in] times its own block of ``weight`` [G, in, out], side by side; [T, G out]."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).flatten(1)
