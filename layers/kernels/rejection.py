"""Draws from laws, and rejection sampling of drafts, in plain torch: all requests at once, nothing waits for the host.

Legend: N rows, R requests, γ drafts a block, T packed rows of a verify step, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


def draw(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draws: the first id whose cumulative mass exceeds the row's uniform.

    Args:
        probs: [N, V] float64, non-negative, not all 0; need not be normalised.
        uniforms: [N] float64 in [0, 1).

    Returns [N] int64. A token of probability 0 is never drawn.
    """
    cumulative = probs.cumsum(dim=-1)
    # Scaling by the rounded total keeps the point strictly below it: u * total < total for every double u < 1.
    point = uniforms[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True)[:, 0]


class Judged(NamedTuple):
    """``accepted`` int64 [R]: drafts kept; ``tokens`` int64 [R]: what is drawn behind them."""

    accepted: torch.Tensor
    tokens: torch.Tensor


def reject_drafts(
    target_probs: torch.Tensor,
    first: torch.Tensor,
    lens: torch.Tensor,
    drafts: torch.Tensor,
    accept_uniforms: torch.Tensor,
    final_uniforms: torch.Tensor,
    draft_probs: torch.Tensor | None,
) -> Judged:
    """Judge the first ``lens`` [R] of ``drafts`` [R, γ] one by one, and draw the token behind those that are kept.

    ``target_probs`` p float64 [T, V]; draft x_{k+1} of request r is judged by row ``first[r]`` + k, and kept iff
    ``accept_uniforms`` [R, γ] times q(x) is below p(x) and all before it are kept. Behind a rejection the token comes
    from max(p - q, 0) (from p, if rounding has left that without mass), behind all drafts from p, by
    ``final_uniforms`` [R]. ``draft_probs`` q float64 [R, γ, V]; None: q has its one point at the draft. All drafts
    must be valid ids, and uniforms are float64.
    """
    gamma, width = drafts.shape[1], target_probs.shape[0]
    if gamma == 0:
        return Judged(torch.zeros_like(lens), draw(target_probs[first], final_uniforms))
    steps = torch.arange(gamma, device=drafts.device)
    p_x = target_probs[(first[:, None] + steps).clamp(max=max(width - 1, 0)), drafts]
    q_x = 1.0 if draft_probs is None else draft_probs.gather(2, drafts[:, :, None])[:, :, 0]
    accepted = ((accept_uniforms * q_x < p_x) & (steps < lens[:, None])).cumprod(1).sum(1)
    law = next_law(target_probs[first + accepted], lens, drafts, accepted, draft_probs)
    return Judged(accepted, draw(law, final_uniforms))


def next_law(
    p: torch.Tensor,
    lens: torch.Tensor,
    drafts: torch.Tensor,
    accepted: torch.Tensor,
    draft_probs: torch.Tensor | None,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """[R, V] float64, not normalised: the residual max(w p - q, 0) at the place behind ``accepted`` [R] drafts, for
    the law ``p`` [R, V] there and ``weight`` w [R] (None: 1); p itself behind all ``lens`` [R] of them."""
    place = accepted.clamp_max(drafts.shape[1] - 1)[:, None]
    scaled = p if weight is None else p * weight[:, None]
    if draft_probs is None:
        rest = scaled.scatter(1, drafts.gather(1, place), 0.0)
    else:
        rest = (scaled - draft_probs.take_along_dim(place[:, :, None], 1)[:, 0]).clamp_min(0.0)
    use_rest = (accepted < lens) & (rest.sum(1) > 0)
    return torch.where(use_rest[:, None], rest, p)
