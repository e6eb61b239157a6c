"""Hyper-connections. Legend: T rows, n streams, D hidden width."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..hyper_connection import HyperIn
from .jit import host, jit
from .linear import accumulate_row
from .norm_rope import inverse_rms


@jit
def _sigmoid(x):
    return np.float32(1) / (np.float32(1) + np.exp(-x))


@jit
def _sinkhorn(comb, num_iters, eps):
    """In place on one [n, n] matrix; see :func:`..hyper_connection.sinkhorn`."""
    n = comb.shape[0]
    for a in range(n):
        top = comb[a].max()
        total = np.float32(0)
        for b in range(n):
            comb[a, b] = np.exp(comb[a, b] - top)
            total += comb[a, b]
        for b in range(n):
            comb[a, b] = comb[a, b] / total + eps
    sums = np.empty(n, np.float32)
    for step in range(num_iters):
        if step > 0:
            for a in range(n):
                total = eps
                for b in range(n):
                    total += comb[a, b]
                inverse = np.float32(1) / total
                for b in range(n):
                    comb[a, b] *= inverse
        sums[:] = eps
        for a in range(n):
            for b in range(n):
                sums[b] += comb[a, b]
        for b in range(n):
            sums[b] = np.float32(1) / sums[b]
        for a in range(n):
            for b in range(n):
                comb[a, b] *= sums[b]


@jit
def _collapse(streams, pre, out):
    """``out`` [D] = ``pre`` [n] weighted sum of one row's ``streams`` [n, D]."""
    for d in range(out.shape[0]):
        out[d] = pre[0] * streams[0, d]
    for j in range(1, streams.shape[0]):
        for d in range(out.shape[0]):
            out[d] += pre[j] * streams[j, d]


@jit
def _hc_pre(streams, fn, base, scale, norm_weight, hc_eps, norm_eps, num_iters, constrained, x, post, comb):
    num_rows, n, width = streams.shape
    flat = streams.reshape(num_rows, n * width)
    mix = np.empty(fn.shape[1], np.float32)
    pre = np.empty(n, np.float32)
    for i in range(num_rows):
        mix[:] = 0
        accumulate_row(flat[i], fn, mix)
        norm = inverse_rms(flat[i], norm_eps)
        for j in range(mix.shape[0]):
            mix[j] *= norm
        for j in range(n):
            if constrained:
                pre[j] = _sigmoid(mix[j] * scale[0] + base[j]) + hc_eps
                post[i, j] = np.float32(2) * _sigmoid(mix[n + j] * scale[1] + base[n + j])
            else:
                pre[j] = np.tanh(mix[j]) * scale[0] + base[j]
                post[i, j] = np.tanh(mix[n + j]) * scale[1] + base[n + j]
        for a in range(n):
            for b in range(n):
                k = 2 * n + a * n + b
                if constrained:
                    comb[i, a, b] = mix[k] * scale[2] + base[k]
                else:
                    comb[i, a, b] = np.tanh(mix[k]) * scale[2] + base[k]
        if constrained:
            _sinkhorn(comb[i], num_iters, hc_eps)
        _collapse(streams[i], pre, x[i])
        norm = inverse_rms(x[i], norm_eps)
        for d in range(width):
            x[i, d] = x[i, d] * norm * norm_weight[d]


@jit
def _hc_post(streams, y, post, comb, out):
    num_rows, n, width = streams.shape
    for i in range(num_rows):
        for k in range(n):
            write = post[i, k]
            for d in range(width):
                out[i, k, d] = write * y[i, d]
            for j in range(n):
                keep = comb[i, j, k]
                for d in range(width):
                    out[i, k, d] += keep * streams[i, j, d]


@jit
def _hc_collapse(streams, fn, base, scale, hc_eps, norm_eps, out):
    num_rows, n, width = streams.shape
    flat = streams.reshape(num_rows, n * width)
    pre = np.empty(n, np.float32)
    for i in range(num_rows):
        pre[:] = 0
        accumulate_row(flat[i], fn, pre)
        norm = inverse_rms(flat[i], norm_eps)
        for j in range(n):
            pre[j] = _sigmoid(pre[j] * norm * scale[0] + base[j]) + hc_eps
        _collapse(streams[i], pre, out[i])


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
    weights = (fn.numpy(), base.numpy(), scale.numpy(), norm_weight.numpy(), np.float32(hc_eps), np.float32(norm_eps))

    def hc_pre(streams: torch.Tensor) -> HyperIn:
        num_rows, n, width = streams.shape
        x = np.empty((num_rows, width), np.float32)
        post = np.empty((num_rows, n), np.float32)
        comb = np.empty((num_rows, n, n), np.float32)
        _hc_pre(host(streams), *weights, num_iters, constrained, x, post, comb)
        return HyperIn(torch.from_numpy(x), torch.from_numpy(post), torch.from_numpy(comb))

    return hc_pre


def bind_hc_post() -> Callable[..., torch.Tensor]:
    """See :func:`..hyper_connection.hc_post`."""

    def hc_post(streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        out = np.empty(streams.shape, np.float32)
        _hc_post(host(streams), host(y), host(post), host(comb), out)
        return torch.from_numpy(out)

    return hc_post


def bind_hc_collapse(
    fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, hc_eps: float, norm_eps: float
) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..hyper_connection.hc_collapse`."""
    weights = (fn.numpy(), base.numpy(), scale.numpy(), np.float32(hc_eps), np.float32(norm_eps))

    def hc_collapse(streams: torch.Tensor) -> torch.Tensor:
        out = np.empty((streams.shape[0], streams.shape[2]), np.float32)
        _hc_collapse(host(streams), *weights, out)
        return torch.from_numpy(out)

    return hc_collapse
