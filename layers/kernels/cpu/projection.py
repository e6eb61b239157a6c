"""Everything that one layer's attention reads from its rows. Legend: see :mod:`..projection`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...attention.plan import AttentionPlan
from ...rope import RopeTable
from ..projection import Projected, ProjectionSizes
from .jit import address, floats, jit
from .linear import MAX_ROWS
from .norm_rope import inverse_rms, rotate_tail
from .product import product


@jit
def _norm_latents(y, norm, eps, latent):
    for i in range(y.shape[0]):
        scale = inverse_rms(y[i, : latent.shape[1]], eps)
        for j in range(latent.shape[1]):
            latent[i, j] = y[i, j] * scale * norm[j]


@jit
def _take_apart(y, wide, first, positions, key_norm, cos, sin, eps, q, keys, raw, index_q, index_weights):
    """Norm, rotate and put where they belong: ``y`` [T, ..] from column ``first`` on, and ``wide`` [T, ..]."""
    num_heads, d = q.shape[1:]
    for i in range(y.shape[0]):
        turn_cos, turn_sin, at = cos[positions[i]], sin[positions[i]], 0
        for h in range(num_heads):
            scale = inverse_rms(wide[i, at : at + d], eps)
            for j in range(d):
                q[i, h, j] = wide[i, at + j] * scale
            rotate_tail(q[i, h], turn_cos, turn_sin)
            at += d
        for h in range(index_q.shape[1]):
            for j in range(index_q.shape[2]):
                index_q[i, h, j] = wide[i, at + j]
            rotate_tail(index_q[i, h], turn_cos, turn_sin)
            at += index_q.shape[2]
        scale = inverse_rms(y[i, first : first + d], eps)
        for j in range(d):
            keys[i, j] = y[i, first + j] * scale * key_norm[j]
        rotate_tail(keys[i], turn_cos, turn_sin)
        at = first + d
        for j in range(raw.shape[1]):
            raw[i, j] = y[i, at + j]
        at += raw.shape[1]
        for j in range(index_weights.shape[1]):
            index_weights[i, j] = y[i, at + j]


@jit
def _project(
    x_at, positions, weight_in, weight_q, latent_norm, key_norm, cos, sin, eps, q, keys, raw, index_q, index_w
):
    num_rows = keys.shape[0]
    y = np.empty((num_rows, weight_in.shape[1]), np.float32)
    latent = np.empty((num_rows, weight_q.shape[0]), np.float32)
    wide = np.empty((num_rows, weight_q.shape[1]), np.float32)
    product(floats(x_at, (num_rows, weight_in.shape[0])), weight_in, y)
    _norm_latents(y, latent_norm, eps, latent)
    product(latent, weight_q, wide)
    _take_apart(
        y, wide, latent.shape[1], positions, key_norm, cos, sin, eps, q, keys, raw, index_q, index_w
    )  # fmt: skip


def bind_project(
    weight_in: torch.Tensor,
    weight_q: torch.Tensor,
    latent_norm: torch.Tensor,
    key_norm: torch.Tensor,
    sizes: ProjectionSizes,
    rope: RopeTable,
    eps: float,
    row_by_row: bool = False,
) -> Callable[[torch.Tensor, AttentionPlan], Projected]:
    """See :func:`..projection.project`."""
    norm, rest = latent_norm.numpy(), (key_norm.numpy(), rope.cos.numpy(), rope.sin.numpy(), np.float32(eps))
    small, weights = np.float32(eps), (weight_in.numpy(), weight_q.numpy())
    shapes = (
        (sizes.num_heads, sizes.head_dim),
        (sizes.head_dim,),
        (sizes.raw_width,),
        (sizes.index_num_heads, sizes.index_head_dim),
        (sizes.index_num_heads,),
    )

    def project(x: torch.Tensor, plan: AttentionPlan) -> Projected:
        num_rows, positions = x.shape[0], plan.host.queries[0]
        outs = [np.empty((num_rows, *shape), np.float32) for shape in shapes]
        if num_rows > MAX_ROWS and not row_by_row:
            y, latent = (x @ weight_in).numpy(), torch.empty((num_rows, sizes.latent))
            _norm_latents(y, norm, small, latent.numpy())
            _take_apart(y, (latent @ weight_q).numpy(), sizes.latent, positions, *rest, *outs)
        else:
            x = x.contiguous()
            _project(address(x), positions, *weights, norm, *rest, *outs)
        return Projected(*map(torch.from_numpy, outs))

    return project
