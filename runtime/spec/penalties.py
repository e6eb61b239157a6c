"""Penalties, logit bias and minimum length, per verified row, exactly as decoding one token at a time would.

Shapes: R requests, γ drafts a block, T packed rows, V vocabulary. Row (r, k) predicts the token behind x_k, so what it
sees as already written is the request's output up to and including the anchor x_0, and the drafts x_1..x_k before it:
if the row's law is used at all, those drafts were kept. In a tree they are the drafts on
the way to its node. Verified against these rows the output law is that of stepwise
decoding; one penalty vector for all rows of a block, as if the drafts were not written yet, would not be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .rows import PackedRows
from .verdict import NO_TOKEN


@dataclass(frozen=True)
class PenaltyParams:
    """The settings of R requests; all tensors on one device. The neutral value changes nothing."""

    repetition: torch.Tensor
    """[R] float > 0, neutral 1: logits of tokens seen in prompt or output are divided by it if positive, else
    multiplied."""
    presence: torch.Tensor
    """[R] float, neutral 0: subtracted from the logit of every token that is in the output."""
    frequency: torch.Tensor
    """[R] float, neutral 0: subtracted once for each time the token is in the output."""
    min_tokens: torch.Tensor
    """[R] int64, neutral 0: ids that end the request cannot come before so many output tokens."""
    stop_ids: torch.Tensor
    """[R, S] int64, padded with ``NO_TOKEN``."""
    bias_request: torch.Tensor
    """[N] int64, the request of each logit bias."""
    bias_token: torch.Tensor
    """[N] int64, its token."""
    bias_value: torch.Tensor
    """[N] float, added to the logit."""


@dataclass(frozen=True)
class Written:
    """What R requests have written before a step, the anchors included (prefill: nothing yet)."""

    in_prompt: torch.Tensor
    """[R, V] bool, tokens of the prompt."""
    output_counts: torch.Tensor
    """[R, V] int64, how often each token is in the output."""
    num_output: torch.Tensor
    """[R] int64, output tokens."""


def penalise(
    logits: torch.Tensor, rows: PackedRows, drafts: torch.Tensor, written: Written, params: PenaltyParams
) -> torch.Tensor:
    """New logits [T, V] in float32 or better: repetition, then frequency and presence, bias, minimum length.

    ``drafts`` [R, γ] int64 (all of a tree, node by node), any valid ids where not verified. Pure; each row depends on
    its own request only.
    """
    work = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    request, depth = torch.from_numpy(np.stack([rows.request, rows.depth])).to(logits.device)
    counts = written.output_counts[request]
    if drafts.shape[1]:
        written_here = torch.from_numpy(rows.written(drafts.shape[1])).to(logits.device)
        counts = counts.scatter_add(1, drafts[request], written_here.to(counts.dtype))
    seen = written.in_prompt[request] | (counts > 0)
    repetition = params.repetition.to(work.dtype)[request, None]
    work = torch.where(seen, torch.where(work > 0, work / repetition, work * repetition), work)
    work -= params.frequency.to(work.dtype)[request, None] * counts
    work -= params.presence.to(work.dtype)[request, None] * (counts > 0)
    bias = work.new_zeros(rows.num_requests, work.shape[1])
    bias.index_put_((params.bias_request, params.bias_token), params.bias_value.to(work.dtype), accumulate=True)
    work += bias[request]
    too_short = written.num_output[request] + depth < params.min_tokens[request]
    ending = _ending_ids(params.stop_ids, work.shape[1])[request]
    return work.masked_fill_(ending & too_short[:, None], -torch.inf)


def _ending_ids(stop_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[R, V] bool from padded ids [R, S]."""
    # Padding lands in a column of its own, which is dropped.
    ending = torch.zeros(stop_ids.shape[0], vocab_size + 1, dtype=torch.bool, device=stop_ids.device)
    ending.scatter_(1, torch.where(stop_ids == NO_TOKEN, vocab_size, stop_ids), True)
    return ending[:, :vocab_size]
