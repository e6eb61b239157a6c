"""Everything that one layer's attention reads from its rows, in plain torch.

Legend: T rows, D hidden width, L latent width, H heads, d head width, H_i index heads, d_i their width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..attention.plan import AttentionPlan
from ..rope import RopeTable
from .norm_rope import head_norm_rope, head_rope, key_norm_rope, rms_norm


class Projected(NamedTuple):
    """``q`` [T, H, d] and ``keys`` [T, d]: normed and rotated. ``raw`` [T, width]: inputs of the compressors.
    ``index_q`` [T, H_i, d_i], rotated, and ``index_weights`` [T, H_i]: the indexer's queries and their weights."""

    q: torch.Tensor
    keys: torch.Tensor
    raw: torch.Tensor
    index_q: torch.Tensor
    index_weights: torch.Tensor


class ProjectionSizes(NamedTuple):
    """Columns of the two products: of the first latent, key, raw and index weights, of the second H d and H_i d_i."""

    latent: int
    head_dim: int
    raw_width: int
    num_heads: int
    index_num_heads: int
    index_head_dim: int


def project(
    x: torch.Tensor,
    plan: AttentionPlan,
    weight_in: torch.Tensor,
    weight_q: torch.Tensor,
    latent_norm: torch.Tensor,
    key_norm: torch.Tensor,
    sizes: ProjectionSizes,
    rope: RopeTable,
    eps: float,
) -> Projected:
    """The projections of ``x`` [T, D]: one product with ``weight_in`` [D, L + d + width + H_i], and one of the normed
    latent with ``weight_q`` [L, H d + H_i d_i]. Queries and keys are at the positions of ``plan.queries``."""
    columns = (sizes.latent, sizes.head_dim, sizes.raw_width, sizes.index_num_heads)
    latent, keys, raw, index_weights = (x @ weight_in).split(columns, dim=-1)
    heads = (sizes.num_heads, sizes.head_dim), (sizes.index_num_heads, sizes.index_head_dim)
    wide = rms_norm(latent, latent_norm, eps) @ weight_q
    q, index_q = (part.unflatten(-1, shape) for part, shape in zip(wide.split([n * d for n, d in heads], -1), heads))
    return Projected(
        head_norm_rope(q, plan, rope, eps),
        key_norm_rope(keys, plan, key_norm, rope, eps),
        raw,
        head_rope(index_q, plan, rope),
        index_weights,
    )
