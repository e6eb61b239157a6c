"""Routing and expert products. Legend: T rows, D hidden width, E local experts, k experts per token, I expert width."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .. import moe as twin
from ..moe import Routing
from .jit import host, jit
from .linear import accumulate_row

SCORINGS = {"sqrtsoftplus": 0, "sigmoid": 1, "softmax": 2}
# With more picks than this per expert, one library product per expert is faster than row by row; its sums then
# depend on how many rows there are, so ``row_by_row`` forbids it.
MAX_PICKS_PER_EXPERT = 8


@jit
def _score_row(logits, scoring, scores):
    if scoring == 2:
        top = logits.max()
        total = np.float32(0)
        for e in range(logits.shape[0]):
            scores[e] = np.exp(logits[e] - top)
            total += scores[e]
        for e in range(logits.shape[0]):
            scores[e] /= total
    else:
        for e in range(logits.shape[0]):
            x = logits[e]
            if scoring == 1:
                scores[e] = np.float32(1) / (np.float32(1) + np.exp(-x))
            else:
                scores[e] = np.sqrt(x if x > 20 else np.log1p(np.exp(x)))


@jit
def _weigh(scores, experts, renormalise, scale, weights):
    total = np.float32(1e-20)
    for k in range(experts.shape[0]):
        weights[k] = scores[experts[k]]
        total += weights[k]
    factor = scale / total if renormalise else scale
    for k in range(experts.shape[0]):
        weights[k] *= factor


@jit
def _route_scored(logits, bias, scoring, renormalise, scale, experts, weights):
    scores = np.empty(logits.shape[1], np.float32)
    biased = np.empty(logits.shape[1], np.float32)
    for i in range(logits.shape[0]):
        _score_row(logits[i], scoring, scores)
        for e in range(scores.shape[0]):
            biased[e] = scores[e] + bias[e]
        for k in range(experts.shape[1]):
            best = 0
            for e in range(1, biased.shape[0]):
                if biased[e] > biased[best]:
                    best = e
            experts[i, k] = best
            biased[best] = -np.inf
        _weigh(scores, experts[i], renormalise, scale, weights[i])


@jit
def _route_hashed(logits, experts, scoring, renormalise, scale, weights):
    scores = np.empty(logits.shape[1], np.float32)
    for i in range(logits.shape[0]):
        _score_row(logits[i], scoring, scores)
        _weigh(scores, experts[i], renormalise, scale, weights[i])


@jit
def _swiglu_row(gate_up, limit, out):
    width = out.shape[0]
    for j in range(width):
        gate = min(gate_up[j], limit)
        up = max(min(gate_up[width + j], limit), -limit)
        out[j] = gate / (np.float32(1) + np.exp(-gate)) * up


@jit
def _swiglu(gate_up, limit, out):
    for i in range(gate_up.shape[0]):
        _swiglu_row(gate_up[i], limit, out[i])


@jit
def _experts(x, experts, weights, gate_up, down, limit, out):
    hidden = np.empty(gate_up.shape[2], np.float32)
    inner = np.empty(down.shape[1], np.float32)
    y = np.empty(x.shape[1], np.float32)
    out[:] = 0
    for i in range(x.shape[0]):
        for k in np.argsort(experts[i]):
            e = experts[i, k]
            if e >= 0:
                hidden[:] = 0
                accumulate_row(x[i], gate_up[e], hidden)
                _swiglu_row(hidden, limit, inner)
                y[:] = 0
                accumulate_row(inner, down[e], y)
                for j in range(y.shape[0]):
                    out[i, j] += weights[i, k] * y[j]


def bind_route_scored(
    bias: torch.Tensor, top_k: int, scoring: str, renormalise: bool, scale: float
) -> Callable[[torch.Tensor], Routing]:
    """See :func:`..moe.route_scored`."""
    packed, kind, factor = bias.numpy(), SCORINGS[scoring], np.float32(scale)

    def route_scored(logits: torch.Tensor) -> Routing:
        experts = np.empty((logits.shape[0], top_k), np.int64)
        weights = np.empty((logits.shape[0], top_k), np.float32)
        _route_scored(host(logits), packed, kind, renormalise, factor, experts, weights)
        return Routing(torch.from_numpy(experts), torch.from_numpy(weights))

    return route_scored


def bind_route_hashed(scoring: str, renormalise: bool, scale: float) -> Callable[[torch.Tensor, torch.Tensor], Routing]:
    """See :func:`..moe.route_hashed`."""
    kind, factor = SCORINGS[scoring], np.float32(scale)

    def route_hashed(logits: torch.Tensor, experts: torch.Tensor) -> Routing:
        weights = np.empty(experts.shape, np.float32)
        _route_hashed(host(logits), host(experts), kind, renormalise, factor, weights)
        return Routing(experts, torch.from_numpy(weights))

    return route_hashed


def bind_swiglu(limit: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..moe.swiglu`."""
    bound = np.float32(limit)

    def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
        out = np.empty((gate_up.shape[0], gate_up.shape[1] // 2), np.float32)
        _swiglu(host(gate_up), bound, out)
        return torch.from_numpy(out)

    return swiglu


def bind_experts_forward(
    gate_up: torch.Tensor, down: torch.Tensor, limit: float, row_by_row: bool = False
) -> Callable[[torch.Tensor, Routing], torch.Tensor]:
    """See :func:`..moe.experts_forward`."""
    packed = (gate_up.numpy(), down.numpy(), np.float32(limit))
    most = MAX_PICKS_PER_EXPERT * gate_up.shape[0]

    def experts_forward(x: torch.Tensor, routing: Routing) -> torch.Tensor:
        if routing.experts.numel() > most and not row_by_row:
            return twin.experts_forward(x, routing, gate_up, down, limit)
        out = np.empty(x.shape, np.float32)
        _experts(host(x), host(routing.experts), host(routing.weights), *packed, out)
        return torch.from_numpy(out)

    return experts_forward
