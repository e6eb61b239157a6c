"""Everything that one layer's attention reads from its rows. Legend: see :mod:`..projection`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...attention.plan import AttentionPlan
from ...rope import RopeTable
from ..projection import Projected, ProjectionSizes
from .linear import bind_linear
from .norm_rope import norm_rows, rotated


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
    """See :func:`..projection.project`. ``raw`` and ``index_weights`` are views of the first product."""
    columns = (sizes.latent, sizes.head_dim, sizes.raw_width, sizes.index_num_heads)
    q_columns = (sizes.num_heads * sizes.head_dim, sizes.index_num_heads * sizes.index_head_dim)
    into, queries = bind_linear(weight_in, row_by_row), bind_linear(weight_q, row_by_row)

    def project(x: torch.Tensor, plan: AttentionPlan) -> Projected:
        latent, keys, raw, index_weights = into(x).split(columns, dim=-1)
        q, index_q = queries(norm_rows(latent, latent_norm, eps)).split(q_columns, dim=-1)
        positions = plan.queries.positions
        return Projected(
            rotated(q, sizes.num_heads, positions, rope, eps),
            rotated(keys, 1, positions, rope, eps, key_norm).squeeze(1),
            raw,
            rotated(index_q, sizes.index_num_heads, positions, rope),
            index_weights,
        )

    return project
