"""Products in plain torch. Weights are kept input axis first, so that a row's products run along contiguous outputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x`` [T, in] times ``weight`` [in, out]; [T, out]."""
    return x @ weight


def split_linear(x: torch.Tensor, weight: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """``x`` [T, in] times ``weight`` [in, sum of ``sizes``], cut into one contiguous [T, size] for each of ``sizes``."""
    return tuple(part.contiguous() for part in (x @ weight).split(list(sizes), dim=-1))


def grouped_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each group of ``x`` [T, G, in] times its own block of ``weight`` [G, in, out], side by side; [T, G out]."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).flatten(1)
