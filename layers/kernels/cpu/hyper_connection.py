"""Hyper-connections. Legend: T rows, n streams, D hidden width."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import prange

from ..hyper_connection import HyperIn
from .exp import exp_below, sigmoid
from .jit import address, floats, jit
from .norm_rope import inverse_rms
from .packed import pack, packed_product
from .product import BYTES, LANES, spot
from .sinkhorn import SIDE, balance_lanes
from .threads import rows_to_share, share, shared, use_threads

NUM_MIXES = SIDE * (2 + SIDE)  # numbers that a row of SIDE streams is read, written and mixed with


@jit
def _sinkhorn(comb, n, num_iters, eps):
    """In place on one [n, n] matrix; see :func:`..hyper_connection.sinkhorn`."""
    one = np.float32(1)
    for a in range(n):
        top, total = comb[a, 0], np.float32(0)
        for b in range(1, n):
            top = max(top, comb[a, b])
        for b in range(n):
            comb[a, b] = exp_below(comb[a, b] - top)
            total += comb[a, b]
        for b in range(n):
            comb[a, b] = comb[a, b] / total + eps
    for step in range(num_iters):
        if step > 0:
            for a in range(n):
                total = eps
                for b in range(n):
                    total += comb[a, b]
                inverse = one / total
                for b in range(n):
                    comb[a, b] *= inverse
        for b in range(n):
            total = eps
            for a in range(n):
                total += comb[a, b]
            inverse = one / total
            for a in range(n):
                comb[a, b] *= inverse


@jit
def _gates(mixes, first, count, base, scale, hc_eps, num_iters, lanes, post, comb):
    """Of ``count`` rows from ``first`` on, ``SIDE`` streams each, a row to a lane: ``post`` and ``comb``, and in the
    first ``SIDE`` of ``lanes`` [NUM_MIXES + 2, LANES] what the streams are read with; the others are scratch."""
    for lane in range(count):
        for k in range(NUM_MIXES):
            lanes[k, lane] = mixes[first + lane, k]
    top, total = lanes[NUM_MIXES], lanes[NUM_MIXES + 1]
    for k in range(SIDE):
        for lane in range(LANES):
            lanes[k, lane] = sigmoid(lanes[k, lane] * scale[0] + base[k]) + hc_eps
        for lane in range(LANES):
            lanes[SIDE + k, lane] = np.float32(2) * sigmoid(lanes[SIDE + k, lane] * scale[1] + base[SIDE + k])
    for k in range(2 * SIDE, NUM_MIXES):
        for lane in range(LANES):
            lanes[k, lane] = lanes[k, lane] * scale[2] + base[k]
    for a in range(2 * SIDE, NUM_MIXES, SIDE):
        for lane in range(LANES):
            top[lane] = max(max(lanes[a, lane], lanes[a + 1, lane]), max(lanes[a + 2, lane], lanes[a + 3, lane]))
        for b in range(a, a + SIDE):
            for lane in range(LANES):
                lanes[b, lane] = exp_below(lanes[b, lane] - top[lane])
        for lane in range(LANES):
            total[lane] = (lanes[a, lane] + lanes[a + 1, lane]) + (lanes[a + 2, lane] + lanes[a + 3, lane])
        for b in range(a, a + SIDE):
            for lane in range(LANES):
                lanes[b, lane] = lanes[b, lane] / total[lane] + hc_eps
    balance_lanes(spot(lanes, 2 * SIDE, 0), num_iters, hc_eps)
    for lane in range(count):
        for k in range(SIDE):
            post[first + lane, k] = lanes[SIDE + k, lane]
        for a in range(SIDE):
            for b in range(SIDE):
                comb[first + lane, a, b] = lanes[(2 + a) * SIDE + b, lane]


@jit
def _collapse(streams, pre, out):
    """``out`` [D] = ``pre`` [n] weighted sum of one row's ``streams`` [n, D]."""
    for d in range(out.shape[0]):
        out[d] = pre[0] * streams[0, d]
    for j in range(1, streams.shape[0]):
        for d in range(out.shape[0]):
            out[d] += pre[j] * streams[j, d]


@jit
def _mix(flat, panels, num_mixes, norm_eps):
    """:func:`..hyper_connection.stream_mix` of ``flat`` [T, n D], [T, num_mixes]."""
    mix = np.empty((flat.shape[0], num_mixes), np.float32)
    packed_product(flat, panels, mix)
    for i in range(flat.shape[0]):
        norm = inverse_rms(flat[i], norm_eps)
        for j in range(mix.shape[1]):
            mix[i, j] *= norm
    return mix


@jit
def _row_gates(mix, n, base, scale, hc_eps, num_iters, constrained, pre, post, comb):
    """What :func:`_gates` makes, of one row with any number of streams ``n``, or unconstrained: ``pre`` [n], ``post``
    [n], ``comb`` [n, n]."""
    for j in range(n):
        if constrained:
            pre[j] = sigmoid(mix[j] * scale[0] + base[j]) + hc_eps
            post[j] = np.float32(2) * sigmoid(mix[n + j] * scale[1] + base[n + j])
        else:
            pre[j] = np.tanh(mix[j]) * scale[0] + base[j]
            post[j] = np.tanh(mix[n + j]) * scale[1] + base[n + j]
    for a in range(n):
        for b in range(n):
            k = 2 * n + a * n + b
            if constrained:
                comb[a, b] = mix[k] * scale[2] + base[k]
            else:
                comb[a, b] = np.tanh(mix[k]) * scale[2] + base[k]
    if constrained:
        _sinkhorn(comb, n, num_iters, hc_eps)


@jit
def read_streams(streams_at, panels, base, scale, norm_weight, hc_eps, norm_eps, num_iters, constrained, x, post, comb):
    num_rows, n, width = comb.shape[0], comb.shape[1], x.shape[1]
    streams = floats(streams_at, (num_rows, n, width))
    mixes = _mix(floats(streams_at, (num_rows, n * width)), panels, base.shape[0], norm_eps)
    in_lanes = constrained and n == SIDE
    lanes, pre = np.zeros((NUM_MIXES + 2, LANES), np.float32), np.empty(n, np.float32)
    for i in range(num_rows):
        if in_lanes:
            if i % LANES == 0:
                count = min(LANES, num_rows - i)
                _gates(mixes, i, count, base, scale, hc_eps, num_iters, lanes, post, comb)
            for j in range(n):
                pre[j] = lanes[j, i % LANES]
        else:
            _row_gates(mixes[i], n, base, scale, hc_eps, num_iters, constrained, pre, post[i], comb[i])
        _collapse(streams[i], pre, x[i])
        norm = inverse_rms(x[i], norm_eps)
        for d in range(width):
            x[i, d] = x[i, d] * norm * norm_weight[d]


@shared
def _read_streams_shared(
    num_parts, streams_at, panels, base, scale, norm_weight, hc_eps, norm_eps, num_iters, constrained, x, post, comb
):
    num_groups = (x.shape[0] + LANES - 1) // LANES
    for part in prange(num_parts):
        first, last = share(num_groups, part, num_parts)
        a, b = LANES * first, min(LANES * last, x.shape[0])
        at = streams_at + BYTES * comb.shape[1] * x.shape[1] * a
        read_streams(
            at, panels, base, scale, norm_weight, hc_eps, norm_eps, num_iters, constrained, x[a:b], post[a:b], comb[a:b]
        )


@jit
def write_streams(streams_at, y_at, post_at, comb_at, out):
    num_rows, n, width = out.shape
    streams, y = floats(streams_at, out.shape), floats(y_at, (num_rows, width))
    post, comb = floats(post_at, (num_rows, n)), floats(comb_at, (num_rows, n, n))
    for i in range(num_rows):
        for k in range(n):
            write = post[i, k]
            for d in range(width):
                out[i, k, d] = write * y[i, d]
            for j in range(n):
                keep = comb[i, j, k]
                for d in range(width):
                    out[i, k, d] += keep * streams[i, j, d]


@shared
def _write_streams_shared(num_parts, streams_at, y_at, post_at, comb_at, out):
    num_rows, n, width = out.shape
    for part in prange(num_parts):
        a, b = share(num_rows, part, num_parts)
        streams, y = streams_at + BYTES * n * width * a, y_at + BYTES * width * a
        write_streams(streams, y, post_at + BYTES * n * a, comb_at + BYTES * n * n * a, out[a:b])


@jit
def collapse_streams(streams_at, panels, base, scale, hc_eps, norm_eps, out):
    num_rows, width = out.shape
    n = base.shape[0]
    streams = floats(streams_at, (num_rows, n, width))
    mixes = _mix(floats(streams_at, (num_rows, n * width)), panels, n, norm_eps)
    for i in range(num_rows):
        pre = mixes[i]
        for j in range(n):
            pre[j] = sigmoid(pre[j] * scale[0] + base[j]) + hc_eps
        _collapse(streams[i], pre, out[i])


@jit
def _hc_mean(streams_at, n, out):
    num_rows, width = out.shape
    streams, part = floats(streams_at, (num_rows, n, width)), np.float32(1.0 / n)
    for i in range(num_rows):
        for j in range(width):
            out[i, j] = streams[i, 0, j]
        for k in range(1, n):
            for j in range(width):
                out[i, j] += streams[i, k, j]
        for j in range(width):
            out[i, j] *= part


def bind_hc_pre(
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_weight: torch.Tensor,
    hc_eps: float,
    norm_eps: float,
    num_iters: int,
    constrained: bool,
) -> Callable[[torch.Tensor], HyperIn]:
    """See :func:`..hyper_connection.hc_pre`."""
    weights = (pack(fn), base.numpy(), scale.numpy(), norm_weight.numpy(), np.float32(hc_eps), np.float32(norm_eps))
    rest, threads = (max(num_iters, 1), constrained), use_threads()
    many = rows_to_share(fn.numel(), threads)

    def hc_pre(streams: torch.Tensor) -> HyperIn:
        streams = streams.contiguous()
        num_rows, n, width = streams.shape
        x = np.empty((num_rows, width), np.float32)
        post = np.empty((num_rows, n), np.float32)
        comb = np.empty((num_rows, n, n), np.float32)
        if num_rows < max(many, 2 * LANES):
            read_streams(address(streams), *weights, *rest, x, post, comb)
        else:
            _read_streams_shared(threads, address(streams), *weights, *rest, x, post, comb)
        return HyperIn(torch.from_numpy(x), torch.from_numpy(post), torch.from_numpy(comb))

    hc_pre.weights = (*weights, *rest)
    return hc_pre


def bind_hc_post() -> Callable[..., torch.Tensor]:
    """See :func:`..hyper_connection.hc_post`."""
    threads = use_threads()

    def hc_post(streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        streams, y, post, comb = streams.contiguous(), y.contiguous(), post.contiguous(), comb.contiguous()
        out = np.empty(streams.shape, np.float32)
        num_rows, n, width = streams.shape
        if num_rows < rows_to_share(n * (n + 1) * width, threads):
            write_streams(address(streams), address(y), address(post), address(comb), out)
        else:
            _write_streams_shared(threads, address(streams), address(y), address(post), address(comb), out)
        return torch.from_numpy(out)

    return hc_post


def bind_hc_collapse(
    fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, hc_eps: float, norm_eps: float
) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..hyper_connection.hc_collapse`."""
    weights = (pack(fn), base.numpy(), scale.numpy(), np.float32(hc_eps), np.float32(norm_eps))

    def hc_collapse(streams: torch.Tensor) -> torch.Tensor:
        streams = streams.contiguous()
        out = np.empty((streams.shape[0], streams.shape[2]), np.float32)
        collapse_streams(address(streams), *weights, out)
        return torch.from_numpy(out)

    hc_collapse.weights = weights
    return hc_collapse


def bind_hc_mean() -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..hyper_connection.hc_mean`."""

    def hc_mean(streams: torch.Tensor) -> torch.Tensor:
        streams = streams.contiguous()
        out = np.empty((streams.shape[0], streams.shape[2]), np.float32)
        _hc_mean(address(streams), streams.shape[1], out)
        return torch.from_numpy(out)

    return hc_mean
