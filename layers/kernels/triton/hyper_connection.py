"""Hyper-connections. Legend: T rows, n streams, D hidden width, S slices of the flattened streams, M mix columns.

Reading is two kernels. The first multiplies slices of the flattened streams with ``fn`` and sums their squares, so that
few rows still fill the device. The second adds the slices, makes pre, post and comb (Sinkhorn runs in registers), and
reads the row's streams a second time, from the L2 cache, for their weighted sum and its norm.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ..hyper_connection import HyperIn
from .jit import NUM_SMS, dot, launch, narrow, power, warps_for

BLOCK_K = 128


@triton.jit
def _mix_slices(
    streams, fn, mixes, num_rows, num_in, num_columns, slice_len,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``mixes`` [S, T, M + 1]: a slice of ``streams`` [T, n D] times ``fn`` [n D, M], and the sum of its squares."""
    part = tl.program_id(1)
    rows = (tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    columns = tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    last = tl.minimum(num_in, (part + 1) * slice_len)
    for begin in range(part * slice_len, last, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        x = tl.load(streams + rows * num_in + k[None, :], mask=(rows < num_rows) & (k[None, :] < last), other=0.0)
        x = x.to(tl.float32)
        weight = tl.load(
            fn + k[:, None] * num_columns + columns, mask=(k[:, None] < last) & (columns < num_columns), other=0.0
        )
        acc = dot(x, weight, acc)
        squares += x * x
    to = mixes + (part * num_rows + rows) * (num_columns + 1)
    tl.store(to + columns, acc, mask=(rows < num_rows) & (columns < num_columns))
    tl.store(to + num_columns, tl.sum(squares, axis=1)[:, None], mask=rows < num_rows)


@triton.jit
def _inverse_rms(mixes, row, num_rows, num_columns, num_slices, num_in, eps):
    total = 0.0
    for part in range(num_slices):
        total += tl.load(mixes + (part * num_rows + row) * (num_columns + 1) + num_columns)
    return tl.rsqrt(total / num_in + eps)


@triton.jit
def _mixed(mixes, row, num_rows, num_columns, num_slices, at, mask):
    """The columns ``at`` of a row's mix, not normed."""
    total = tl.zeros(at.shape, dtype=tl.float32)
    for part in range(num_slices):
        total += tl.load(mixes + (part * num_rows + row) * (num_columns + 1) + at, mask=mask, other=0.0)
    return total


@triton.jit
def _sinkhorn(logits, inside, num_iters, eps):
    """See :func:`..hyper_connection.sinkhorn`; ``logits`` [n, n] padded to powers of two, ``inside`` what is real."""
    logits = tl.where(inside, logits, -3.0e38)
    comb = tl.where(inside, tl.exp(logits - tl.max(logits, axis=1)[:, None]), 0.0)
    # A real row sums to at least one, its largest.
    comb = tl.where(inside, comb / tl.maximum(tl.sum(comb, axis=1), 1.0)[:, None] + eps, 0.0)
    comb /= tl.sum(comb, axis=0)[None, :] + eps
    for _ in range(num_iters - 1):
        comb /= tl.sum(comb, axis=1)[:, None] + eps
        comb /= tl.sum(comb, axis=0)[None, :] + eps
    return comb


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _weighted_stream_sum(
    streams, mixes, base, row, norm, num_rows, num_columns, num_slices, width, scale, hc_eps, channel,
    NUM_STREAMS: tl.constexpr, CONSTRAINED: tl.constexpr,
):  # fmt: skip
    """``sum_j pre_j streams_j`` of one row, float32 at ``channel``."""
    total = tl.zeros(channel.shape, dtype=tl.float32)
    for j in tl.static_range(NUM_STREAMS):
        mix = 0.0
        for part in range(num_slices):
            mix += tl.load(mixes + (part * num_rows + row) * (num_columns + 1) + j)
        if CONSTRAINED:
            pre = tl.sigmoid(mix * norm * scale + tl.load(base + j)) + hc_eps
        else:
            pre = _tanh(mix * norm) * scale + tl.load(base + j)
        at = streams + (row * NUM_STREAMS + j) * width + channel
        total += pre * tl.load(at, mask=channel < width, other=0.0).to(tl.float32)
    return total


@triton.jit
def _read(
    streams, mixes, base, scale, norm_weight, x, post, comb,
    num_rows, num_slices, width, num_iters, hc_eps, norm_eps,
    NUM_STREAMS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, CONSTRAINED: tl.constexpr,
):  # fmt: skip
    """Everything else of one row, see :func:`..hyper_connection.hc_pre`."""
    row = tl.program_id(0).to(tl.int64)
    n: tl.constexpr = NUM_STREAMS
    columns: tl.constexpr = (2 + NUM_STREAMS) * NUM_STREAMS
    norm = _inverse_rms(mixes, row, num_rows, columns, num_slices, n * width, norm_eps)
    channel = tl.arange(0, BLOCK)
    total = _weighted_stream_sum(
        streams, mixes, base, row, norm, num_rows, columns, num_slices, width, tl.load(scale), hc_eps, channel,
        NUM_STREAMS, CONSTRAINED,
    )  # fmt: skip
    total = narrow(total, x.dtype.element_ty).to(tl.float32)
    total *= tl.rsqrt(tl.sum(total * total) / width + norm_eps)
    total *= tl.load(norm_weight + channel, mask=channel < width, other=0.0)
    tl.store(x + row * width + channel, narrow(total, x.dtype.element_ty), mask=channel < width)

    one, two = tl.arange(0, PADDED), tl.arange(0, PADDED)[:, None] * n + tl.arange(0, PADDED)[None, :]
    inside = (tl.arange(0, PADDED)[:, None] < n) & (tl.arange(0, PADDED)[None, :] < n)
    mix = norm * _mixed(mixes, row, num_rows, columns, num_slices, n + one, one < n)
    mixed_comb = norm * _mixed(mixes, row, num_rows, columns, num_slices, 2 * n + two, inside)
    b_post = tl.load(base + n + one, mask=one < n, other=0.0)
    b_comb = tl.load(base + 2 * n + two, mask=inside, other=0.0)
    if CONSTRAINED:
        written = 2 * tl.sigmoid(mix * tl.load(scale + 1) + b_post)
        kept = _sinkhorn(mixed_comb * tl.load(scale + 2) + b_comb, inside, num_iters, hc_eps)
    else:
        written = _tanh(mix) * tl.load(scale + 1) + b_post
        kept = _tanh(mixed_comb) * tl.load(scale + 2) + b_comb
    tl.store(post + row * n + one, written, mask=one < n)
    tl.store(comb + row * n * n + two, kept, mask=inside)


@triton.jit
def _collapse(
    streams, mixes, base, scale, x, num_rows, num_slices, width, hc_eps, norm_eps,
    NUM_STREAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    norm = _inverse_rms(mixes, row, num_rows, NUM_STREAMS, num_slices, NUM_STREAMS * width, norm_eps)
    total = _weighted_stream_sum(
        streams, mixes, base, row, norm, num_rows, NUM_STREAMS, num_slices, width, tl.load(scale), hc_eps, channel,
        NUM_STREAMS, True,
    )  # fmt: skip
    tl.store(x + row * width + channel, narrow(total, x.dtype.element_ty), mask=channel < width)


@triton.jit
def _write(streams, y, post, comb, out, width, NUM_STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    """A stretch of one row's new streams."""
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    added = tl.load(y + row * width + channel, mask=inside, other=0.0).to(tl.float32)
    old = streams + row * NUM_STREAMS * width + channel
    for k in tl.static_range(NUM_STREAMS):
        new = tl.load(post + row * NUM_STREAMS + k) * added
        for j in tl.static_range(NUM_STREAMS):
            weight = tl.load(comb + (row * NUM_STREAMS + j) * NUM_STREAMS + k)
            new += weight * tl.load(old + j * width, mask=inside, other=0.0).to(tl.float32)
        to = out + (row * NUM_STREAMS + k) * width + channel
        tl.store(to, narrow(new, out.dtype.element_ty), mask=inside)


def _stream_mix(streams: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    """[S, T, M + 1] float32, see :func:`_mix_slices`."""
    (num_in, num_columns), num_rows = fn.shape, streams.shape[0]
    num_tiles = triton.cdiv(num_rows, 16)
    # A fixed number of slices: a row's sums must not depend on how many rows there are.
    num_slices = max(min(NUM_SMS // 2, triton.cdiv(num_in, 2 * BLOCK_K)), 1)
    slice_len = triton.cdiv(triton.cdiv(num_in, num_slices), BLOCK_K) * BLOCK_K
    num_slices = triton.cdiv(num_in, slice_len)
    mixes = torch.empty((num_slices, num_rows, num_columns + 1), dtype=torch.float32, device=streams.device)
    launch(
        _mix_slices, (num_tiles, num_slices), streams, fn, mixes, num_rows, num_in, num_columns, slice_len,
        BLOCK_M=16, BLOCK_N=power(num_columns, 16), BLOCK_K=BLOCK_K, num_warps=4, num_stages=3,
    )  # fmt: skip
    return mixes


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

    def hc_pre(streams: torch.Tensor) -> HyperIn:
        streams = streams.contiguous()
        (num_rows, n, width), block = streams.shape, power(streams.shape[2])
        mixes = _stream_mix(streams, fn)
        x = torch.empty((num_rows, width), dtype=streams.dtype, device=streams.device)
        post = torch.empty((num_rows, n), dtype=torch.float32, device=streams.device)
        comb = torch.empty((num_rows, n, n), dtype=torch.float32, device=streams.device)
        launch(
            _read, (num_rows,), streams, mixes, base, scale, norm_weight, x, post, comb,
            num_rows, mixes.shape[0], width, num_iters, hc_eps, norm_eps,
            NUM_STREAMS=n, PADDED=power(n), BLOCK=block, CONSTRAINED=constrained, num_warps=warps_for(block),
        )  # fmt: skip
        return HyperIn(x, post, comb)

    return hc_pre


def bind_hc_post() -> Callable[..., torch.Tensor]:
    """See :func:`..hyper_connection.hc_post`."""

    def hc_post(streams: torch.Tensor, y: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        streams, y, post, comb = streams.contiguous(), y.contiguous(), post.contiguous(), comb.contiguous()
        (num_rows, n, width), out = streams.shape, torch.empty_like(streams)
        block = min(power(width), 1024)
        grid = (num_rows, triton.cdiv(width, block))
        launch(_write, grid, streams, y, post, comb, out, width, NUM_STREAMS=n, BLOCK=block, num_warps=4)
        return out

    return hc_post


def bind_hc_collapse(
    fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, hc_eps: float, norm_eps: float
) -> Callable[[torch.Tensor], torch.Tensor]:
    """See :func:`..hyper_connection.hc_collapse`."""

    def hc_collapse(streams: torch.Tensor) -> torch.Tensor:
        streams = streams.contiguous()
        (num_rows, n, width), block = streams.shape, power(streams.shape[2])
        mixes = _stream_mix(streams, fn)
        x = torch.empty((num_rows, width), dtype=streams.dtype, device=streams.device)
        launch(
            _collapse, (num_rows,), streams, mixes, base, scale, x,
            num_rows, mixes.shape[0], width, hc_eps, norm_eps,
            NUM_STREAMS=n, BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
        return x

    return hc_collapse
