"""Routing and expert products in plain torch.

Legend: T rows, D hidden width, E local experts, k experts per token, I expert width (local share).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Routing(NamedTuple):
    """``experts`` int64 [T, k]: expert ids; ``weights`` float32 [T, k]."""

    experts: torch.Tensor
    weights: torch.Tensor


def _scores(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    if scoring == "sqrtsoftplus":
        return torch.nn.functional.softplus(logits).sqrt()
    if scoring == "sigmoid":
        return logits.sigmoid()
    return logits.softmax(dim=-1)


def route_scored(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, scoring: str, renormalise: bool, scale: float
) -> Routing:
    """The ``top_k`` experts by score plus ``bias`` [E]; the weights are the scores without it.

    ``logits`` float32 [T, E]. ``scoring``: "sqrtsoftplus", "sigmoid" or "softmax". Of equal scores the lower id wins.
    """
    scores = _scores(logits, scoring)
    order = (scores + bias).sort(dim=-1, descending=True, stable=True).indices
    experts = order[:, :top_k]
    return Routing(experts, _weights(scores, experts, renormalise, scale))


def route_grouped(
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    scoring: str,
    renormalise: bool,
    scale: float,
    num_groups: int,
    topk_groups: int,
) -> Routing:
    """As :func:`route_scored`, among the experts of the ``topk_groups`` groups whose two best add up to most."""
    scores = _scores(logits, scoring)
    ranked = (scores + bias).unflatten(1, (num_groups, -1))
    best = ranked.topk(min(2, ranked.shape[2]), dim=-1).values.sum(-1)
    kept = best.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
    ranked = ranked.masked_fill(~allowed.unsqueeze(2), -torch.inf).flatten(1)
    experts = ranked.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    return Routing(experts, _weights(scores, experts, renormalise, scale))


def route_hashed(logits: torch.Tensor, experts: torch.Tensor, scoring: str, renormalise: bool, scale: float) -> Routing:
    """Routing whose ``experts`` [T, k] were chosen by token id; the weights still come from the gate's ``logits``."""
    return Routing(experts, _weights(_scores(logits, scoring), experts, renormalise, scale))


def _weights(scores: torch.Tensor, experts: torch.Tensor, renormalise: bool, scale: float) -> torch.Tensor:
    weights = scores.gather(1, experts)
    if renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale


def swiglu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """``silu(min(gate, limit)) * clip(up, -limit, limit)`` of ``gate_up`` [T, 2 I]; [T, I]. No clamp at infinity."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


def experts_forward(
    x: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor, limit: float
) -> torch.Tensor:
    """Weighted sum over the chosen experts of ``down_e(swiglu(gate_up_e(x)))``, [T, D].

    ``gate_up`` [E, D, 2 I] and ``down`` [E, I, D] hold the local experts, input axis first. ``routing.experts`` are
    local ids; -1 marks an expert that lives elsewhere and adds nothing. Rows are grouped by expert: one product per
    expert that has rows. Sums run in the order of expert ids.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    top_k = routing.experts.shape[1]
    flat = routing.experts.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat + 1, minlength=gate_up.shape[0] + 1).tolist()
    begin = counts[0]
    for expert, count in enumerate(counts[1:]):
        if count:
            picks = order[begin : begin + count]
            rows = picks // top_k
            y = swiglu(x[rows] @ gate_up[expert], limit) @ down[expert]
            out.index_add_(0, rows, y.float() * routing.weights.flatten()[picks].unsqueeze(1))
            begin += count
    return out.to(x.dtype)


def experts_inner(x: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """The first half of :func:`experts_forward`: ``swiglu(gate_up_e(x))`` of every chosen expert, [T, k, I]; zeros
    where ``experts`` [T, k] has -1."""
    inner = torch.zeros((*experts.shape, gate_up.shape[2] // 2), dtype=x.dtype, device=x.device)
    for expert in range(gate_up.shape[0]):
        rows, places = (experts == expert).nonzero(as_tuple=True)
        inner[rows, places] = swiglu(x[rows] @ gate_up[expert], limit)
    return inner


def experts_outer(inner: torch.Tensor, routing: Routing, down: torch.Tensor) -> torch.Tensor:
    """The second half: the weighted sum of ``down_e(inner)`` [T, C], for ``inner`` [T, k, I] and ``down`` [E, I, C]."""
    out = torch.zeros((inner.shape[0], down.shape[2]), dtype=torch.float32, device=inner.device)
    for expert in range(down.shape[0]):
        rows, places = (routing.experts == expert).nonzero(as_tuple=True)
        y = (inner[rows, places] @ down[expert]).float()
        out.index_add_(0, rows, y * routing.weights[rows, places].unsqueeze(1))
    return out.to(inner.dtype)
