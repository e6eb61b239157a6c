"""The greedy Markov step. Legend: B blocks, γ places, r Markov rank, V vocabulary.

A place is two kernels: one reads the readout matrix and the base logits in stretches of the vocabulary and keeps the
best of each, the other picks the best stretch's token, which the next place reads on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .jit import launch, power

BLOCK = 64


@triton.jit
def _stretch_best(
    base, base_row, tokens, tokens_row, w1, w2, best, best_token, vocab_size, rank, num_stretches,
    RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token, channel = stretch * BLOCK + tl.arange(0, BLOCK), tl.arange(0, RANK)
    prev, real = tl.load(tokens + row * tokens_row), token < vocab_size
    feature = tl.load(w1 + prev * rank + channel, mask=channel < rank, other=0.0).to(tl.float32)
    at = w2 + token.to(tl.int64)[:, None] * rank + channel[None, :]
    readout = tl.load(at, mask=real[:, None] & (channel < rank)[None, :], other=0.0).to(tl.float32)
    logits = tl.load(base + row * base_row + token, mask=real, other=0.0).to(tl.float32)
    logits = tl.where(real, logits + tl.sum(readout * feature[None, :], axis=1), float("-inf"))
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


def bind_markov_greedy(w1: torch.Tensor, w2: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """See :func:`..draft.markov_greedy`."""
    vocab_size, rank = w1.shape
    num_stretches = triton.cdiv(vocab_size, BLOCK)

    def markov_greedy(base_logits: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        base_logits, (num_blocks, gamma, _) = base_logits.contiguous(), base_logits.shape
        # The column before a place's own holds the token before it.
        tokens = torch.empty((num_blocks, gamma + 1), dtype=torch.int64, device=base_logits.device)
        tokens[:, 0] = anchors
        best = torch.empty((num_blocks, num_stretches), dtype=torch.float32, device=base_logits.device)
        best_token = torch.empty((num_blocks, num_stretches), dtype=torch.int32, device=base_logits.device)
        for k in range(gamma):
            launch(
                _stretch_best, (num_blocks, num_stretches), base_logits[:, k], base_logits.stride(0), tokens[:, k],
                tokens.stride(0), w1, w2, best, best_token, vocab_size, rank, num_stretches,
                RANK=power(rank), BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
            launch(
                _pick, (num_blocks,), best, best_token, tokens[:, k + 1], tokens.stride(0), num_stretches,
                BLOCK=power(num_stretches), num_warps=4,
            )  # fmt: skip
        return tokens[:, 1:]

    return markov_greedy
