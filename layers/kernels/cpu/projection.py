"""Everything that one layer's attention reads from its rows. Legend: see :mod:`..projection`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import prange

from ...attention.plan import AttentionPlan
from ...rope import RopeTable
from ..projection import Projected, ProjectionSizes
from .jit import address, floats, jit
from .norm_rope import inverse_rms, rotate_tail
from .packed import pack, packed_product
from .product import BYTES
from .threads import rows_to_share, share, shared, use_threads


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
def project_rows(x_at, positions, panels_in, panels_q, latent_norm, num_in, num_q, key_norm, cos, sin, eps, q, keys,
                 raw, index_q, index_w):  # fmt: skip
    num_rows, num_latents = keys.shape[0], latent_norm.shape[0]
    y, wide = np.empty((num_rows, num_in), np.float32), np.empty((num_rows, num_q), np.float32)
    latent = np.empty((num_rows, num_latents), np.float32)
    packed_product(floats(x_at, (num_rows, panels_in.shape[1])), panels_in, y)
    _norm_latents(y, latent_norm, eps, latent)
    packed_product(latent, panels_q, wide)
    _take_apart(y, wide, num_latents, positions, key_norm, cos, sin, eps, q, keys, raw, index_q, index_w)


@shared
def _project_shared(num_parts, x_at, positions, panels_in, panels_q, latent_norm, num_in, num_q, key_norm, cos, sin,
                    eps, q, keys, raw, index_q, index_w):  # fmt: skip
    for part in prange(num_parts):
        a, b = share(keys.shape[0], part, num_parts)
        at = x_at + BYTES * panels_in.shape[1] * a
        project_rows(at, positions[a:b], panels_in, panels_q, latent_norm, num_in, num_q, key_norm, cos, sin, eps,
                 q[a:b], keys[a:b], raw[a:b], index_q[a:b], index_w[a:b])  # fmt: skip


def bind_project(
    weight_in: torch.Tensor,
    weight_q: torch.Tensor,
    latent_norm: torch.Tensor,
    key_norm: torch.Tensor,
    sizes: ProjectionSizes,
    rope: RopeTable,
    eps: float,
) -> Callable[[torch.Tensor, AttentionPlan], Projected]:
    """See :func:`..projection.project`."""
    weights = (pack(weight_in), pack(weight_q), latent_norm.numpy(), weight_in.shape[1], weight_q.shape[1])
    rest = (key_norm.numpy(), rope.cos.numpy(), rope.sin.numpy(), np.float32(eps))
    shapes = (
        (sizes.num_heads, sizes.head_dim),
        (sizes.head_dim,),
        (sizes.raw_width,),
        (sizes.index_num_heads, sizes.index_head_dim),
        (sizes.index_num_heads,),
    )
    threads = use_threads()
    many = rows_to_share(weight_in.numel() + weight_q.numel(), threads)

    def project(x: torch.Tensor, plan: AttentionPlan) -> Projected:
        x = x.contiguous()
        outs = [np.empty((x.shape[0], *shape), np.float32) for shape in shapes]
        if x.shape[0] < many:
            project_rows(address(x), plan.host.queries[0], *weights, *rest, *outs)
        else:
            _project_shared(threads, address(x), plan.host.queries[0], *weights, *rest, *outs)
        return Projected(*map(torch.from_numpy, outs))

    project.weights = (*weights, *rest)
    return project
