"""Routing. Legend: T rows, E experts, k experts per token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ..moe import Routing
from .jit import launch, power

SQRTSOFTPLUS, SIGMOID, SOFTMAX = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SCORINGS = {"sqrtsoftplus": 0, "sigmoid": 1, "softmax": 2}


@triton.jit
def _log1p(x):
    """``log(1 + x)`` of ``x`` >= 0, exact to rounding for small ``x`` too."""
    shifted = 1.0 + x
    return tl.where(shifted == 1.0, x, tl.log(shifted) * (x / tl.maximum(shifted - 1.0, 1.0e-38)))


@triton.jit
def _in_best_groups(biased, expert, group_size, num_groups, topk_groups, GROUPS: tl.constexpr):
    """Which experts are in the ``topk_groups`` groups of ``group_size`` neighbours whose two best add up to most."""
    group, lowest = tl.arange(0, GROUPS), float("-inf")
    sums = tl.full((GROUPS,), lowest, dtype=tl.float32)
    for g in range(num_groups):
        own = tl.where(expert // group_size == g, biased, lowest)
        best = tl.max(own)
        first = tl.min(tl.where((own == best) & (expert // group_size == g), expert, 2147483647))
        if group_size > 1:
            best += tl.max(tl.where(expert == first, lowest, own))
        sums = tl.where(group == g, best, sums)
    kept, open_ = expert < 0, group < num_groups
    for _ in range(topk_groups):
        best = tl.max(tl.where(open_, sums, lowest))
        first = tl.min(tl.where(open_ & (sums == best), group, GROUPS))
        kept = kept | (expert // group_size == first)
        open_ = open_ & (group != first)
    return kept


@triton.jit
def _route(
    logits, bias, chosen, weights, num_experts, top_k, scale, num_groups, topk_groups,
    SCORING: tl.constexpr, SCORED: tl.constexpr, RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr, PICKS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """One row: scores, the best ``top_k`` by score plus bias (or those in ``chosen`` unless ``SCORED``), weights."""
    row, expert, pick = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, PICKS)
    real = expert < num_experts
    x = tl.load(logits + row * num_experts + expert, mask=real, other=float("-inf"))
    if SCORING == SOFTMAX:
        scores = tl.exp(x - tl.max(x))
        scores /= tl.sum(scores)
    elif SCORING == SIGMOID:
        scores = tl.sigmoid(x)
    else:
        scores = tl.sqrt(tl.maximum(x, 0.0) + _log1p(tl.exp(-tl.abs(x))))
    if SCORED:
        biased = tl.where(real, scores + tl.load(bias + expert, mask=real, other=0.0), float("-inf"))
        if GROUPS > 1:
            kept = _in_best_groups(biased, expert, num_experts // num_groups, num_groups, topk_groups, GROUPS)
            biased = tl.where(kept, biased, float("-inf"))
        open_ = real
        picks = tl.zeros((PICKS,), dtype=tl.int32)
        for k in range(top_k):
            best = tl.max(tl.where(open_, biased, float("-inf")))
            first = tl.min(tl.where(open_ & (biased == best), expert, BLOCK))
            picks = tl.where(pick == k, first, picks)
            open_ = open_ & (expert != first)
        tl.store(chosen + row * top_k + pick, picks.to(tl.int64), mask=pick < top_k)
    else:
        picks = tl.load(chosen + row * top_k + pick, mask=pick < top_k, other=0).to(tl.int32)
    hit = picks[:, None] == expert[None, :]
    own = tl.sum(tl.where(hit, scores[None, :], 0.0), axis=1)
    if RENORMALISE:
        own /= tl.sum(tl.where(pick < top_k, own, 0.0)) + 1e-20
    tl.store(weights + row * top_k + pick, own * scale, mask=pick < top_k)


def _launch(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    chosen: torch.Tensor,
    scoring: str,
    renormalise: bool,
    scale: float,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> Routing:
    logits = logits.contiguous()
    (num_rows, num_experts), top_k = logits.shape, chosen.shape[1]
    weights = torch.empty((num_rows, top_k), dtype=torch.float32, device=logits.device)
    launch(
        _route, (num_rows,), logits, logits if bias is None else bias, chosen, weights, num_experts, top_k, scale,
        num_groups, topk_groups,
        SCORING=SCORINGS[scoring], SCORED=bias is not None, RENORMALISE=renormalise,
        BLOCK=power(num_experts), PICKS=power(top_k), GROUPS=power(num_groups),
        num_warps=1 if num_experts <= 256 else 2,
    )  # fmt: skip
    return Routing(chosen, weights)


def bind_route_scored(
    bias: torch.Tensor, top_k: int, scoring: str, renormalise: bool, scale: float
) -> Callable[[torch.Tensor], Routing]:
    """See :func:`..moe.route_scored`."""

    def route_scored(logits: torch.Tensor) -> Routing:
        chosen = torch.empty((logits.shape[0], top_k), dtype=torch.int64, device=logits.device)
        return _launch(logits, bias, chosen, scoring, renormalise, scale)

    return route_scored


def bind_route_grouped(
    bias: torch.Tensor,
    top_k: int,
    scoring: str,
    renormalise: bool,
    scale: float,
    num_groups: int,
    topk_groups: int,
) -> Callable[[torch.Tensor], Routing]:
    """See :func:`..moe.route_grouped`."""

    def route_grouped(logits: torch.Tensor) -> Routing:
        chosen = torch.empty((logits.shape[0], top_k), dtype=torch.int64, device=logits.device)
        return _launch(logits, bias, chosen, scoring, renormalise, scale, num_groups, topk_groups)

    return route_grouped


def bind_route_hashed(scoring: str, renormalise: bool, scale: float) -> Callable[[torch.Tensor, torch.Tensor], Routing]:
    """See :func:`..moe.route_hashed`."""

    def route_hashed(logits: torch.Tensor, experts: torch.Tensor) -> Routing:
        return _launch(logits, None, experts.contiguous(), scoring, renormalise, scale)

    return route_hashed
