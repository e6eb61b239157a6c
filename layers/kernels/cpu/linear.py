"""Linear layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import prange

from .jit import address, floats, jit
from .packed import pack, packed_part_product, packed_product
from .product import BYTES, spot
from .threads import rows_to_share, share, shared, use_threads


@jit
def linear_rows(x_at, panels, out):
    packed_product(floats(x_at, (out.shape[0], panels.shape[1])), panels, out)


@shared
def _linear_shared(num_parts, x_at, panels, out):
    for part in prange(num_parts):
        first, last = share(out.shape[0], part, num_parts)
        linear_rows(x_at + BYTES * panels.shape[1] * first, panels, out[first:last])


@jit
def grouped_linear_rows(x_at, panels, num_out, out):
    num_groups, num_in = panels.shape[0], panels.shape[2]
    for g in range(num_groups):
        at = x_at + BYTES * g * num_in
        packed_part_product(
            at, num_groups * num_in, panels[g], spot(out, 0, g * num_out), out.shape[1], out.shape[0], num_out
        )


@shared
def _grouped_linear_shared(num_parts, x_at, panels, num_out, out):
    for part in prange(num_parts):
        first, last = share(out.shape[0], part, num_parts)
        at = x_at + BYTES * panels.shape[0] * panels.shape[2] * first
        grouped_linear_rows(at, panels, num_out, out[first:last])


def bind_linear(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..linear.linear`."""
    panels, num_out, threads = pack(weight), weight.shape[1], use_threads()
    many = rows_to_share(weight.numel(), threads)

    def linear(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = np.empty((x.shape[0], num_out), np.float32)
        if x.shape[0] < many:
            linear_rows(address(x), panels, out)
        else:
            _linear_shared(threads, address(x), panels, out)
        return torch.from_numpy(out)

    linear.weights = (panels, num_out)
    return linear


def bind_grouped_linear(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..linear.grouped_linear`."""
    panels, (num_groups, _, num_out), threads = pack(weight), weight.shape, use_threads()
    many = rows_to_share(weight.numel(), threads)

    def grouped_linear(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = np.empty((x.shape[0], num_groups * num_out), np.float32)
        if x.shape[0] < many:
            grouped_linear_rows(address(x), panels, num_out, out)
        else:
            _grouped_linear_shared(threads, address(x), panels, num_out, out)
        return torch.from_numpy(out)

    grouped_linear.weights = (panels, num_out)
    return grouped_linear
