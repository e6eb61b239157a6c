"""From logits to tokens: the law of a request's parameters, draws from it, and log-probabilities.

Shapes: N rows (tokens to choose), V vocabulary. Laws are computed in float64, so that a test can compare them with
exact arithmetic and a draw cannot fall off the end of a rounded sum.

The law of a row, in this order: temperature; the ``top_k`` highest logits, the lowest ids on a tie; on those
renormalised, highest first, tokens while the mass before them is below ``top_p``; tokens with at least ``min_p`` times
the highest probability. Greedy rows (temperature 0) put all mass on the highest logit, the lowest id on a tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..layers.attention.plan import to_device
from .request import SamplingParams, TokenLogprob

NUM_CANDIDATES = 256  # tokens of a row that are sorted first; nearly always enough, and far fewer than V


class SamplingRows(NamedTuple):
    """The parameters of N rows as tensors on one device, and what the fast paths ask about them."""

    temperature: Tensor
    """[N] float64; 0 is greedy."""
    top_k: Tensor
    """[N] int64; V or more keeps all."""
    top_p: Tensor
    """[N] float64."""
    min_p: Tensor
    """[N] float64."""
    any_greedy: bool
    filtered: Tensor | None
    """Indices of the rows with a filter, int64, or ``None`` where no row has one."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> SamplingRows:
        """The parameters of one row each, in order."""
        filtered = [i for i, p in enumerate(params) if not p.greedy and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)]

        columns = [np.array([p.temperature for p in params], np.float64)]
        columns.append(np.array([p.top_k or np.iinfo(np.int64).max for p in params], np.int64))
        columns += [np.array([getattr(p, name) for p in params], np.float64) for name in ("top_p", "min_p")]
        *law, indices = to_device([*columns, np.array(filtered, np.int64)], torch.device(device))
        greedy = [p.greedy for p in params]
        return cls(*law, any(greedy), indices if filtered else None)


def target_probs(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The law each row is drawn from: ``logits`` [N, V] of any float dtype -> [N, V] float64, rows summing to 1."""
    scaled = logits.double()
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    if rows.any_greedy:
        greedy = rows.temperature == 0
        scaled = scaled / torch.where(greedy, 1.0, rows.temperature)[:, None]
    else:
        greedy = None
        scaled = scaled / rows.temperature[:, None]
    probs = scaled.softmax(dim=-1)
    if rows.filtered is not None:
        keep = rows.filtered
        probs[keep] = _filter(
            scaled[keep], probs[keep], rows.top_k[keep], rows.top_p[keep], rows.min_p[keep], NUM_CANDIDATES
        )
    if greedy is not None:
        one_hot = torch.zeros_like(probs).scatter_(1, logits.argmax(dim=-1, keepdim=True), 1.0)
        probs = torch.where(greedy[:, None], one_hot, probs)
    return probs


def _filter(scaled: Tensor, probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, width: int) -> Tensor:
    """Rows of ``probs`` [M, V] with the tokens outside the filters set to 0, renormalised.

    Only the ``width`` highest tokens of a row are sorted; rows whose cut is not certain from those are sorted whole.
    """
    vocab_size = scaled.shape[1]
    whole = width >= vocab_size
    # Ordered by logit, not by probability: far below the top, different logits give the same rounded probability.
    if whole:
        values, order = scaled.sort(dim=-1, descending=True, stable=True)
    else:
        # topk leaves ties in any order: sort by id, then stably by value.
        order = scaled.topk(width, sorted=False).indices.sort(dim=-1).values
        values, by_value = scaled.gather(1, order).sort(dim=-1, descending=True, stable=True)
        order = order.gather(1, by_value)
    ordered = probs.gather(1, order)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    ordered = torch.where(rank < top_k[:, None], ordered, 0.0)
    # Without top-k the mass is the whole row's, which sums to 1; the sum of the candidates would miss the rest.
    total = torch.where(top_k >= vocab_size, probs.sum(dim=-1), ordered.sum(dim=-1))[:, None]
    mass_before = (ordered.cumsum(dim=-1) - ordered) / total
    kept = (mass_before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    kept &= (ordered >= min_p[:, None] * ordered[:, :1]) & (rank < top_k[:, None])
    ordered = torch.where(kept, ordered, 0.0)
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    result = torch.zeros_like(probs).scatter_(1, order, ordered)
    if not whole:
        # The cut must lie above the lowest candidate, whose equals may have been left out.
        lowest_kept = values.gather(1, kept.sum(dim=-1, keepdim=True) - 1)[:, 0]
        unsure = (lowest_kept <= values[:, -1]) | ((top_k > width) & (top_k < vocab_size))
        rows = unsure.nonzero()[:, 0]
        if rows.numel():
            result[rows] = _filter(scaled[rows], probs[rows], top_k[rows], top_p[rows], min_p[rows], vocab_size)
    return result


def greedy_ids(logits: Tensor) -> Tensor:
    """The highest logit of each row, the lowest id on a tie: ``logits`` [N, V] -> [N] int64.

    Raises ``FloatingPointError`` if a row holds NaN or its highest logit is infinite: there is no law to draw from.
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32:  # numpy compares many numbers at a time
        rows = logits.numpy()
        ids = torch.from_numpy(rows.argmax(axis=1))
        highest = [rows.item(row, token) for row, token in enumerate(ids.tolist())]
    else:
        values, ids = logits.max(dim=-1)
        highest = [] if math.isfinite(values.sum().item()) else values.tolist()
    for row, value in enumerate(highest):
        if not math.isfinite(value):
            raise FloatingPointError(f"the highest logit of row {row} of {logits.shape[0]} is {value}")
    return ids


def log_probs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int | None]) -> list[TokenLogprob | None]:
    """Log-probabilities of the model's own law, before temperature and filters.

    Args:
        logits: [N, V].
        token_ids: [N] int64, the chosen tokens.
        num_top: per row ``None`` (not asked for) or how many of the likeliest tokens to report.

    Returns one entry a row; natural logarithms, computed in float64.
    """
    asked = [i for i, count in enumerate(num_top) if count is not None]
    result: list[TokenLogprob | None] = [None] * len(num_top)
    if not asked:
        return result
    law = logits[asked].double().log_softmax(dim=-1)
    chosen_ids = token_ids[asked]
    chosen = law.gather(1, chosen_ids[:, None])[:, 0].tolist()
    width = min(max(num_top[i] for i in asked), law.shape[1])
    values, indices = law.sort(dim=-1, descending=True, stable=True) if width else (law, law)
    values, indices = values[:, :width].tolist(), indices[:, :width].tolist()
    for row, (i, token) in enumerate(zip(asked, chosen_ids.tolist(), strict=True)):
        count = num_top[i]
        # Padded or masked columns have no probability and are no alternatives.
        top = [(index, value) for index, value in zip(indices[row][:count], values[row][:count]) if value > -math.inf]
        result[i] = TokenLogprob(token, chosen[row], tuple(top))
    return result
