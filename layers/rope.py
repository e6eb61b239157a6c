"""Rotary tables. Rotation is interleaved (pairs 2i, 2i+1) and acts on the trailing ``rope_dim`` channels of a head."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Yarn(NamedTuple):
    """Yarn scaling: see :func:`inverse_frequencies`."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float


class RopeTable(NamedTuple):
    """``cos`` and ``sin``, each float32 [num_positions, rope_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor


def inverse_frequencies(rope_dim: int, theta: float, yarn: Yarn | None = None) -> torch.Tensor:
    """Angular frequencies per channel pair, float32 [rope_dim / 2].

    With yarn, slow channels are interpolated (divided by ``factor``), fast ones kept, with a linear ramp between the
    channels that turn ``beta_fast`` and ``beta_slow`` times over the original length. cos and sin are not rescaled.
    """
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    inv = 1.0 / (theta**exponents)
    if yarn is None:
        return inv

    def channel_of(num_turns: float) -> float:
        return rope_dim * math.log(yarn.original_max_position / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(channel_of(yarn.beta_fast)), 0)
    high = min(math.ceil(channel_of(yarn.beta_slow)), rope_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inv / yarn.factor * ramp + inv * (1 - ramp)


def build_rope_table(
    rope_dim: int, theta: float, num_positions: int, yarn: Yarn | None = None, device: torch.device | str = "cpu"
) -> RopeTable:
    """Tables for positions ``0 .. num_positions - 1``. Angles are float32 products, as the models were trained with."""
    inv = inverse_frequencies(rope_dim, theta, yarn)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv)
    return RopeTable(angles.cos().to(device), angles.sin().to(device))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """``x`` [..., width] with its trailing ``2 * cos.shape[-1]`` channels rotated; ``cos``, ``sin`` broadcast over
    the leading axes. Computed in float32, returned in ``x``'s dtype. ``inverse`` turns the other way."""
    rope_dim = 2 * cos.shape[-1]
    tail = x[..., -rope_dim:].float()
    even, odd = tail[..., 0::2], tail[..., 1::2]
    if inverse:
        sin = -sin
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-rope_dim], rotated.to(x.dtype)), dim=-1)
