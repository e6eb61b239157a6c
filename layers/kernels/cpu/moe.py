"""Routing and expert products. Legend: T rows, D hidden width, E local experts, k experts per token, I expert width."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import prange

from ..moe import Routing
from .exp import exp, sigmoid
from .jit import address, floats, jit, largest
from .packed import pack, packed_product
from .product import BYTES
from .threads import rows_to_share, share, shared, use_threads

SCORINGS = {"sqrtsoftplus": 0, "sigmoid": 1, "softmax": 2}


@jit
def _score_row(logits, scoring, scores):
    num_experts = logits.shape[0]
    if scoring == 2:
        top = largest(logits)
        total = np.float32(0)
        for e in range(num_experts):
            scores[e] = exp(logits[e] - top)
            total += scores[e]
        for e in range(num_experts):
            scores[e] /= total
    elif scoring == 1:
        for e in range(num_experts):
            scores[e] = sigmoid(logits[e])
    else:
        for e in range(num_experts):
            x = logits[e]
            scores[e] = np.sqrt(x if x > 20 else np.log1p(exp(x)))


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
def route_rows(logits_at, bias, scoring, renormalise, scale, experts, weights):
    logits = floats(logits_at, (experts.shape[0], bias.shape[0]))
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
def _route_hashed(logits_at, num_experts, experts, scoring, renormalise, scale, weights):
    logits = floats(logits_at, (experts.shape[0], num_experts))
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
        out[j] = gate * sigmoid(gate) * up


@jit
def swiglu_rows(gate_up_at, limit, out):
    gate_up = floats(gate_up_at, (out.shape[0], 2 * out.shape[1]))
    for i in range(out.shape[0]):
        _swiglu_row(gate_up[i], limit, out[i])


@jit
def _by_expert(experts, num_experts):
    """The picks (row times k, plus place) of each expert in turn, in order of rows: ``order``, and where each expert's
    ``begins`` in it [E + 1]. A counting sort; -1 is in neither."""
    begins = np.zeros(num_experts + 1, np.int64)
    top_k = experts.shape[1]
    for i in range(experts.shape[0]):
        for k in range(top_k):
            begins[experts[i, k] + 1] += experts[i, k] >= 0
    for e in range(num_experts):
        begins[e + 1] += begins[e]
    order, ends = np.empty(begins[num_experts], np.int64), begins.copy()
    for i in range(experts.shape[0]):
        for k in range(top_k):
            e = experts[i, k]
            if e >= 0:
                order[ends[e]] = i * top_k + k
                ends[e] += 1
    return order, begins


@jit
def _most(begins):
    """The picks of the busiest expert."""
    most = 0
    for e in range(begins.shape[0] - 1):
        most = max(most, begins[e + 1] - begins[e])
    return most


@jit
def _inner(x_at, width, experts, gate_up, limit, inner):
    """``inner`` [T k, I] is zero where there is no expert; ``gate_up`` is packed."""
    num_rows, top_k = experts.shape
    x = floats(x_at, (num_rows, width))
    order, begins = _by_expert(experts, gate_up.shape[0])
    most = _most(begins)
    rows, hidden = np.empty((most, width), np.float32), np.empty((most, 2 * inner.shape[1]), np.float32)
    for e in range(gate_up.shape[0]):
        picks = order[begins[e] : begins[e + 1]]
        count = picks.shape[0]
        if count == 0:
            continue
        for n in range(count):
            for j in range(width):
                rows[n, j] = x[picks[n] // top_k, j]
        packed_product(rows[:count], gate_up[e], hidden[:count])
        for n in range(count):
            _swiglu_row(hidden[n], limit, inner[picks[n]])


@jit
def _outer(inner, experts, weights_at, down, out):
    """``out`` is zero before; ``down`` is packed."""
    num_rows, top_k = experts.shape
    width, weights = out.shape[1], floats(weights_at, (num_rows, top_k))
    order, begins = _by_expert(experts, down.shape[0])
    most = _most(begins)
    rows, sums = np.empty((most, inner.shape[1]), np.float32), np.empty((most, width), np.float32)
    for e in range(down.shape[0]):
        picks = order[begins[e] : begins[e + 1]]
        count = picks.shape[0]
        if count == 0:
            continue
        for n in range(count):
            for j in range(inner.shape[1]):
                rows[n, j] = inner[picks[n], j]
        packed_product(rows[:count], down[e], sums[:count])
        for n in range(count):
            i, k = picks[n] // top_k, picks[n] % top_k
            for j in range(width):
                out[i, j] += weights[i, k] * sums[n, j]


@jit
def add_experts(x_at, experts, weights_at, gate_up, down, limit, out):
    inner = np.zeros((experts.size, down.shape[2]), np.float32)
    _inner(x_at, out.shape[1], experts, gate_up, limit, inner)
    _outer(inner, experts, weights_at, down, out)


@shared
def _add_experts_shared(num_parts, x_at, experts, weights_at, gate_up, down, limit, out):
    for part in prange(num_parts):
        a, b = share(out.shape[0], part, num_parts)
        x, weights = x_at + BYTES * out.shape[1] * a, weights_at + BYTES * experts.shape[1] * a
        add_experts(x, experts[a:b], weights, gate_up, down, limit, out[a:b])


def bind_route_scored(
    bias: torch.Tensor, top_k: int, scoring: str, renormalise: bool, scale: float
) -> Callable[[torch.Tensor], Routing]:
    """See :func:`..moe.route_scored`."""
    packed, kind, factor = bias.numpy(), SCORINGS[scoring], np.float32(scale)

    def route_scored(logits: torch.Tensor) -> Routing:
        logits = logits.contiguous()
        experts = np.empty((logits.shape[0], top_k), np.int64)
        weights = np.empty((logits.shape[0], top_k), np.float32)
        route_rows(address(logits), packed, kind, renormalise, factor, experts, weights)
        return Routing(torch.from_numpy(experts), torch.from_numpy(weights))

    route_scored.weights = ((packed, kind, renormalise, factor), top_k)
    return route_scored


def bind_route_hashed(scoring: str, renormalise: bool, scale: float) -> Callable[[torch.Tensor, torch.Tensor], Routing]:
    """See :func:`..moe.route_hashed`."""
    kind, factor = SCORINGS[scoring], np.float32(scale)

    def route_hashed(logits: torch.Tensor, experts: torch.Tensor) -> Routing:
        logits = logits.contiguous()
        weights = np.empty(experts.shape, np.float32)
        chosen = experts.contiguous().numpy()
        _route_hashed(address(logits), logits.shape[1], chosen, kind, renormalise, factor, weights)
        return Routing(experts, torch.from_numpy(weights))

    return route_hashed


def bind_swiglu(limit: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..moe.swiglu`."""
    bound = np.float32(limit)

    def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
        gate_up = gate_up.contiguous()
        out = np.empty((gate_up.shape[0], gate_up.shape[1] // 2), np.float32)
        swiglu_rows(address(gate_up), bound, out)
        return torch.from_numpy(out)

    swiglu.weights = (bound,)
    return swiglu


def bind_experts_forward(
    gate_up: torch.Tensor, down: torch.Tensor, limit: float
) -> Callable[[torch.Tensor, Routing], torch.Tensor]:
    """See :func:`..moe.experts_forward`."""
    packed, threads = (pack(gate_up), pack(down), np.float32(limit)), use_threads()
    operations = gate_up[:1].numel() + down[:1].numel()

    def experts_forward(x: torch.Tensor, routing: Routing) -> torch.Tensor:
        x, weights = x.contiguous(), routing.weights.contiguous()
        out = np.zeros(x.shape, np.float32)
        experts = routing.experts.contiguous().numpy()
        if x.shape[0] < rows_to_share(operations * experts.shape[1], threads):
            add_experts(address(x), experts, address(weights), *packed, out)
        else:
            _add_experts_shared(threads, address(x), experts, address(weights), *packed, out)
        return torch.from_numpy(out)

    experts_forward.weights = packed
    return experts_forward


def bind_experts_inner(gate_up: torch.Tensor, limit: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """See :func:`..moe.experts_inner`."""
    panels, bound, width = pack(gate_up), np.float32(limit), gate_up.shape[2] // 2

    def experts_inner(x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        x, chosen = x.contiguous(), experts.contiguous().numpy()
        inner = np.zeros((chosen.size, width), np.float32)
        _inner(address(x), x.shape[1], chosen, panels, bound, inner)
        return torch.from_numpy(inner).view(*chosen.shape, width)

    return experts_inner


def bind_experts_outer(down: torch.Tensor) -> Callable[[torch.Tensor, Routing], torch.Tensor]:
    """See :func:`..moe.experts_outer`."""
    panels, width = pack(down), down.shape[2]

    def experts_outer(inner: torch.Tensor, routing: Routing) -> torch.Tensor:
        picks, weights = inner.contiguous().flatten(0, 1), routing.weights.contiguous()
        out = np.zeros((inner.shape[0], width), np.float32)
        _outer(picks.numpy(), routing.experts.contiguous().numpy(), address(weights), panels, out)
        return torch.from_numpy(out)

    return experts_outer
