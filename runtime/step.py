"""One forward's worth of tokens, flattened, and how it is built from what the scheduler asks for.

Legend: T token rows, N rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..layers.attention.plan import AttentionPlan, build_plan


class Span(NamedTuple):
    """Consecutive tokens of one request in a step: a prefill chunk, one decoded token, or a block to verify.

    ``slot``: the request's cache slot. ``start``: absolute position of the first token. ``num_logits``: of how many of
    the last tokens logits are wanted.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    num_logits: int


class Step(NamedTuple):
    """``tokens`` int64 [T], in the order of the spans; ``logit_rows`` int64 [N], or None for all rows; ``plan``: where
    each row sits."""

    tokens: torch.Tensor
    logit_rows: torch.Tensor | None
    plan: AttentionPlan


def build_step(spans: Sequence[Span], page_table: torch.Tensor, ratios: tuple[int, ...], vocab_size: int) -> Step:
    """The step of ``spans``, on the page table's device.

    Raises ``ValueError`` for a token id outside ``[0, vocab_size)``; requests are checked before they come here.
    """
    lengths = [len(span.tokens) for span in spans]
    num_rows = sum(lengths)
    rows = np.empty((5, num_rows), np.int64)
    tokens = np.empty(num_rows, np.int64)
    wanted: list[np.ndarray] = []
    at = 0
    for span, length in zip(spans, lengths):
        stop = at + length
        rows[0, at:stop] = np.arange(span.start, span.start + length)
        rows[1, at:stop] = span.slot
        rows[2, at:stop] = span.start
        rows[3, at:stop] = span.start + length
        tokens[at:stop] = span.tokens
        if span.num_logits:
            wanted.append(np.arange(stop - span.num_logits, stop))
        at = stop
    rows[4] = np.arange(num_rows)
    if num_rows and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise ValueError(f"token id {bad} is outside the vocabulary of {vocab_size}")
    device = page_table.device
    plan = build_plan(rows, page_table, ratios)
    logit_rows = None
    if sum(len(part) for part in wanted) != num_rows:
        logit_rows = torch.from_numpy(np.concatenate(wanted) if wanted else np.empty(0, np.int64)).to(device)
    return Step(torch.from_numpy(tokens).to(device), logit_rows, plan)
