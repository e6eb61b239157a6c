"""Draws, and rejection sampling. Legend: R requests, γ drafts a block, T packed rows, V vocabulary, S stretches.

A draw by inverse CDF from a row of masses reads the row in stretches: their sums, float64, are made by programs of
their own; then one program a row finds the stretch in which the sum passes the point, and the token inside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ..rejection import Judged
from .jit import launch, power

STRETCH = 1024


@triton.jit
def find_stretch(sums, uniform, at):
    """Where the running sum of ``sums`` [S] (at places ``at``) first exceeds ``uniform`` times all: that place, the sum
    before it, and the point."""
    cumulative = tl.cumsum(sums, 0)
    point = uniform * tl.max(cumulative)
    found = tl.sum((cumulative <= point).to(tl.int32))
    return found, tl.max(tl.where(at < found, cumulative, 0.0)), point


@triton.jit
def find_token(masses, before, point, token):
    """The first of ``token`` [n] at which the running sum of ``masses``, from ``before`` on, exceeds ``point``; the
    last with mass, should sums in another order not reach it."""
    reached = (before + tl.cumsum(masses, 0) > point) & (masses > 0.0)
    first = tl.min(tl.where(reached, token, 2147483647))
    return tl.minimum(first, tl.max(tl.where(masses > 0.0, token, 0))).to(tl.int64)


@triton.jit
def _accept(
    p, first, lens, drafts, uniforms, q, accepted, vocab_size, gamma, LAWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """How many drafts of one request are kept."""
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    length, begin = tl.load(lens + row), tl.load(first + row)
    judged = k < length
    draft = tl.load(drafts + row * gamma + k, mask=judged, other=0)
    p_x = tl.load(p + (begin + k) * vocab_size + draft, mask=judged, other=0.0)
    bar = tl.load(uniforms + row * gamma + k, mask=judged, other=0.0)
    if LAWS:
        bar *= tl.load(q + (row * gamma + k) * vocab_size + draft, mask=judged, other=0.0)
    tl.store(accepted + row, tl.min(tl.where(judged & (bar >= p_x), k.to(tl.int64), length)))


@triton.jit
def _rest(p, q, place, draft, token, vocab_size, gamma, row, LAWS: tl.constexpr):
    """The law ``p`` [n] of tokens ``token`` behind a rejection at ``place``: max(p - q, 0)."""
    if LAWS:
        at = q + (row * gamma + place) * vocab_size + token
        return tl.maximum(p - tl.load(at, mask=token < vocab_size, other=0.0), 0.0)
    return tl.where(token == draft, 0.0, p)


@triton.jit
def _sum_laws(
    p, first, lens, drafts, q, accepted, sums, vocab_size, gamma, num_stretches,
    LAWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The masses of one stretch behind the kept drafts of one request: of p, and of the residual."""
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, place, length = stretch * BLOCK + tl.arange(0, BLOCK), tl.load(accepted + row), tl.load(lens + row)
    at = p + (tl.load(first + row) + place) * vocab_size + token
    own = tl.load(at, mask=token < vocab_size, other=0.0)
    to = sums + row * 2 * num_stretches + stretch
    tl.store(to, tl.sum(own))
    rest = 0.0 * tl.sum(own)
    if place < length:
        draft = tl.load(drafts + row * gamma + place)
        rest = tl.sum(_rest(own, q, place, draft, token, vocab_size, gamma, row, LAWS))
    tl.store(to + num_stretches, rest)


@triton.jit
def _draw_behind(
    p, first, lens, drafts, q, accepted, uniforms, sums, tokens, vocab_size, gamma, num_stretches,
    LAWS: tl.constexpr, STRETCHES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token behind the kept drafts of one request."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, STRETCHES)
    place, real = tl.load(accepted + row), at < num_stretches
    of_p = tl.load(sums + row * 2 * num_stretches + at, mask=real, other=0.0)
    of_rest = tl.load(sums + (row * 2 + 1) * num_stretches + at, mask=real, other=0.0)
    rejected = tl.sum(of_rest) > 0.0
    stretch, before, point = find_stretch(tl.where(rejected, of_rest, of_p), tl.load(uniforms + row), at)
    token = stretch * BLOCK + tl.arange(0, BLOCK)
    here = p + (tl.load(first + row) + place) * vocab_size + token
    masses = tl.load(here, mask=token < vocab_size, other=0.0)
    if rejected:
        draft = tl.load(drafts + row * gamma + place)
        masses = _rest(masses, q, place, draft, token, vocab_size, gamma, row, LAWS)
    tl.store(tokens + row, find_token(masses, before, point, token))


def bind_reject_drafts() -> Callable[..., Judged]:
    """See :func:`..rejection.reject_drafts`."""

    def reject_drafts(
        target_probs: torch.Tensor,
        first: torch.Tensor,
        lens: torch.Tensor,
        drafts: torch.Tensor,
        accept_uniforms: torch.Tensor,
        final_uniforms: torch.Tensor,
        draft_probs: torch.Tensor | None,
    ) -> Judged:
        (num_requests, gamma), vocab_size = drafts.shape, target_probs.shape[1]
        num_stretches = triton.cdiv(vocab_size, STRETCH)
        p, drafts = target_probs.contiguous(), drafts.contiguous()
        coins, last = accept_uniforms.contiguous(), final_uniforms.contiguous()
        q, has_laws = (p, False) if draft_probs is None else (draft_probs.contiguous(), True)
        accepted, tokens = torch.empty_like(lens), torch.empty_like(lens)
        sums = torch.empty((num_requests, 2, num_stretches), dtype=torch.float64, device=p.device)
        launch(
            _accept, (num_requests,), p, first, lens, drafts, coins, q, accepted, vocab_size, gamma,
            LAWS=has_laws, BLOCK=power(gamma), num_warps=1,
        )  # fmt: skip
        law = (p, first, lens, drafts, q, accepted)
        launch(
            _sum_laws, (num_requests, num_stretches), *law, sums, vocab_size, gamma, num_stretches,
            LAWS=has_laws, BLOCK=STRETCH, num_warps=4,
        )  # fmt: skip
        launch(
            _draw_behind, (num_requests,), *law, last, sums, tokens, vocab_size, gamma, num_stretches,
            LAWS=has_laws, STRETCHES=power(num_stretches), BLOCK=STRETCH, num_warps=4,
        )  # fmt: skip
        return Judged(accepted, tokens)

    return reject_drafts
