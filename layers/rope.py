"""Rotary tables. Rotation is interleaved (pairs 2i, 2i+1) on the trailing ``rope_dim`` channels of a head, or, where
:func:`rotate_halves` says so, of pairs (i, i + rope_dim / 2)."""

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


class Llama3(NamedTuple):
    """Llama 3 scaling: channels that turn less than ``low`` times over the original length are divided by ``factor``,
    those that turn more than ``high`` times are kept, with a smooth change between."""

    factor: float
    original_max_position: int
    low: float
    high: float


class RopeTable(NamedTuple):
    """``cos`` and ``sin``, each float32 [num_positions, rope_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor


def inverse_frequencies(rope_dim: int, theta: float, scaling: Yarn | Llama3 | None = None) -> torch.Tensor:
    """Angular frequencies per channel pair, float32 [rope_dim / 2].

    With yarn, slow channels are interpolated (divided by ``factor``), fast ones kept, with a linear ramp between the
    channels that turn ``beta_fast`` and ``beta_slow`` times over the original length. cos and sin are not rescaled.
    """
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    inv = 1.0 / (theta**exponents)
    if scaling is None:
        return inv
    if isinstance(scaling, Llama3):
        turns = scaling.original_max_position * inv / (2 * math.pi)
        kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        return inv * kept + inv / scaling.factor * (1 - kept)
    yarn = scaling

    def channel_of(num_turns: float) -> float:
        return rope_dim * math.log(yarn.original_max_position / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(channel_of(yarn.beta_fast)), 0)
    high = min(math.ceil(channel_of(yarn.beta_slow)), rope_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return inv / yarn.factor * ramp + inv * (1 - ramp)


def build_rope_table(
    rope_dim: int,
    theta: float,
    num_positions: int,
    scaling: Yarn | Llama3 | None = None,
    device: torch.device | str = "cpu",
    magnitude: float = 1.0,
) -> RopeTable:
    """Tables for positions ``0 .. num_positions - 1``. Angles are float32 products, as the models were trained with;
    cos and sin are multiplied by ``magnitude``."""
    inv = inverse_frequencies(rope_dim, theta, scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv)
    return RopeTable((angles.cos() * magnitude).to(device), (angles.sin() * magnitude).to(device))


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [..., width] with its leading ``2 * cos.shape[-1]`` channels rotated in pairs (i, i + half); ``cos``,
    ``sin`` broadcast over the leading axes. Computed in float32, returned in ``x``'s dtype."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if x.shape[-1] == 2 * half else torch.cat((rotated, x[..., 2 * half :]), dim=-1)


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
