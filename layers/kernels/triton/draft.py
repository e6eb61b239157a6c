"""The Markov step. Legend: B blocks, γ places, r Markov rank, V vocabulary.

A place is two kernels: one reads the readout matrix and the base logits in stretches of the vocabulary and keeps the
best of each, the other picks the best stretch's token, which the next place reads on the device. To draw, it is three:
the second turns the logits, which the first has kept, into masses, and the third draws by inverse CDF.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ..draft import MIN_TEMPERATURE, Drawn
from .jit import launch, power
from .rejection import STRETCH, find_stretch, find_token

BLOCK = 64
LEAST = tl.constexpr(MIN_TEMPERATURE)


@triton.jit
def _stretch_best(
    base, base_row, tokens, tokens_row, w1, w2, best, best_token, kept, vocab_size, rank, num_stretches,
    RANK: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, channel = stretch * BLOCK + tl.arange(0, BLOCK), tl.arange(0, RANK)
    prev, real = tl.load(tokens + row * tokens_row), token < vocab_size
    feature = tl.load(w1 + prev * rank + channel, mask=channel < rank, other=0.0).to(tl.float32)
    at = w2 + token.to(tl.int64)[:, None] * rank + channel[None, :]
    readout = tl.load(at, mask=real[:, None] & (channel < rank)[None, :], other=0.0).to(tl.float32)
    logits = tl.load(base + row * base_row + token, mask=real, other=0.0).to(tl.float32)
    logits = tl.where(real, logits + tl.sum(readout * feature[None, :], axis=1), float("-inf"))
    if KEEP:
        tl.store(kept + row * vocab_size + token, logits, mask=real)
    highest = tl.max(logits)
    tl.store(best + row * num_stretches + stretch, highest)
    first = tl.min(tl.where(real & (logits == highest), token, 2147483647))
    tl.store(best_token + row * num_stretches + stretch, first)


@triton.jit
def _pick(best, best_token, tokens, tokens_row, num_stretches, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    values = tl.load(best + row * num_stretches + at, mask=at < num_stretches, other=float("-inf"))
    ids = tl.load(best_token + row * num_stretches + at, mask=at < num_stretches, other=2147483647)
    token = tl.min(tl.where(values == tl.max(values), ids, 2147483647))
    tl.store(tokens + row * tokens_row, token.to(tl.int64))


@triton.jit
def _weigh(
    logits, best, best_token, temperatures, masses, masses_row, sums, vocab_size, num_stretches, num_sums,
    STRETCHES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The masses of one stretch, not normalised, and their sum."""
    row, part, at = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, STRETCHES)
    token = part * BLOCK + tl.arange(0, BLOCK)
    bests = tl.load(best + row * num_stretches + at, mask=at < num_stretches, other=float("-inf"))
    ids = tl.load(best_token + row * num_stretches + at, mask=at < num_stretches, other=2147483647)
    top, temperature = tl.max(bests), tl.load(temperatures + row)
    first = tl.min(tl.where(bests == top, ids, 2147483647))
    scale = (1.0 / tl.maximum(temperature, LEAST)).to(tl.float32)
    own = tl.load(logits + row * vocab_size + token, mask=token < vocab_size, other=float("-inf"))
    mass = tl.exp((own - top) * scale)
    mass = tl.where(temperature == 0.0, (token == first).to(tl.float32), mass).to(tl.float64)
    tl.store(masses + row * masses_row + token, mass, mask=token < vocab_size)
    tl.store(sums + row * num_sums + part, tl.sum(mass))


@triton.jit
def _draw(
    masses, masses_row, sums, uniforms, uniforms_row, tokens, tokens_row, totals, totals_row, vocab_size, num_sums,
    SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of one place of one block."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, SUMS)
    parts = tl.load(sums + row * num_sums + at, mask=at < num_sums, other=0.0)
    stretch, before, point = find_stretch(parts, tl.load(uniforms + row * uniforms_row), at)
    token = stretch * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(masses + row * masses_row + token, mask=token < vocab_size, other=0.0)
    tl.store(tokens + row * tokens_row, find_token(own, before, point, token))
    tl.store(totals + row * totals_row, tl.sum(parts))


def bind_markov_greedy(w1: torch.Tensor, w2: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """See :func:`..draft.markov_greedy`."""
    vocab_size, rank = w1.shape
    num_stretches = triton.cdiv(vocab_size, BLOCK)

    def markov_greedy(base_logits: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        base_logits, (num_blocks, gamma, _) = base_logits.contiguous(), base_logits.shape
        tokens, best, best_token = _room(anchors, gamma, num_stretches)
        for k in range(gamma):
            launch(
                _stretch_best, (num_blocks, num_stretches), base_logits[:, k], base_logits.stride(0), tokens[:, k],
                tokens.stride(0), w1, w2, best, best_token, best, vocab_size, rank, num_stretches,
                RANK=power(rank), BLOCK=BLOCK, KEEP=False, num_warps=4,
            )  # fmt: skip
            launch(
                _pick, (num_blocks,), best, best_token, tokens[:, k + 1], tokens.stride(0), num_stretches,
                BLOCK=power(num_stretches), num_warps=4,
            )  # fmt: skip
        return tokens[:, 1:]

    return markov_greedy


def bind_markov_sample(w1: torch.Tensor, w2: torch.Tensor) -> Callable[..., Drawn]:
    """See :func:`..draft.markov_sample`."""
    vocab_size, rank = w1.shape
    num_stretches, num_sums = triton.cdiv(vocab_size, BLOCK), triton.cdiv(vocab_size, STRETCH)

    def markov_sample(
        base_logits: torch.Tensor, anchors: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
    ) -> Drawn:
        base_logits, (num_blocks, gamma, _), device = base_logits.contiguous(), base_logits.shape, base_logits.device
        tokens, best, best_token = _room(anchors, gamma, num_stretches)
        temperatures = temperatures.contiguous()
        kept = torch.empty((num_blocks, vocab_size), dtype=torch.float32, device=device)
        probs = torch.empty(base_logits.shape, dtype=torch.float64, device=device)
        sums = torch.empty((num_blocks, num_sums), dtype=torch.float64, device=device)
        totals = torch.empty((num_blocks, gamma), dtype=torch.float64, device=device)
        for k in range(gamma):
            launch(
                _stretch_best, (num_blocks, num_stretches), base_logits[:, k], base_logits.stride(0), tokens[:, k],
                tokens.stride(0), w1, w2, best, best_token, kept, vocab_size, rank, num_stretches,
                RANK=power(rank), BLOCK=BLOCK, KEEP=True, num_warps=4,
            )  # fmt: skip
            launch(
                _weigh, (num_blocks, num_sums), kept, best, best_token, temperatures, probs[:, k], probs.stride(0),
                sums, vocab_size, num_stretches, num_sums, STRETCHES=power(num_stretches), BLOCK=STRETCH, num_warps=4,
            )  # fmt: skip
            launch(
                _draw, (num_blocks,), probs[:, k], probs.stride(0), sums, uniforms[:, k], uniforms.stride(0),
                tokens[:, k + 1], tokens.stride(0), totals[:, k], totals.stride(0), vocab_size, num_sums,
                SUMS=power(num_sums), BLOCK=STRETCH, num_warps=4,
            )  # fmt: skip
        return Drawn(tokens[:, 1:], probs.div_(totals.unsqueeze(2)))

    return markov_sample


def _room(anchors: torch.Tensor, gamma: int, num_stretches: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [B, γ + 1], in whose columns each place finds the token before it, and the best of each stretch."""
    tokens = torch.empty((len(anchors), gamma + 1), dtype=torch.int64, device=anchors.device)
    tokens[:, 0] = anchors
    best = torch.empty((len(anchors), num_stretches), dtype=torch.float32, device=anchors.device)
    return tokens, best, torch.empty(best.shape, dtype=torch.int32, device=anchors.device)
