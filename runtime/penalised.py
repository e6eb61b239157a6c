"""Penalties as requests ask for them, applied to the rows of a step.

Shapes: R requests of which P ask for a change, γ drafts a block, T packed rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .sequence import RequestState
from .spec.penalties import PenaltyParams, Written, penalise
from .spec.rows import PackedRows
from .spec.verdict import NO_TOKEN


def penalised(
    logits: torch.Tensor, states: Sequence[RequestState], rows: PackedRows, drafts: np.ndarray
) -> torch.Tensor:
    """What tokens are chosen from: ``logits`` [T, V] with the penalties of each request applied to its rows.

    ``logits`` itself where no request asks for any; never written to. ``drafts`` [R, γ] int64. Float32 or better where
    anything was applied. Every row is what decoding one token at a time would see there, see :mod:`.spec.penalties`.
    """
    asking = [r for r, state in enumerate(states) if state.request.params.penalises]
    if not asking:
        return logits
    states, device = [states[r] for r in asking], logits.device
    own = rows.of(asking)
    at = torch.from_numpy(rows.first[asking][own.request] + own.offset).to(device)
    written, params = written_by(states, logits.shape[1], device), penalty_params(states, device)
    changed = penalise(logits[at], own, torch.from_numpy(drafts[asking]).to(device), written, params)
    return logits.to(changed.dtype, copy=True).index_copy_(0, at, changed)


def penalty_params(states: Sequence[RequestState], device: torch.device | str) -> PenaltyParams:
    """The settings of P requests as tensors."""
    params = [state.request.params for state in states]
    width = max(len(state.stops) for state in states)
    stops = [[*state.stops, *[NO_TOKEN] * (width - len(state.stops))] for state in states]
    biases = [(r, token, value) for r, p in enumerate(params) for token, value in p.logit_bias]

    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def setting(name: str) -> torch.Tensor:
        return column([getattr(p, name) for p in params], torch.float64)

    return PenaltyParams(
        repetition=setting("repetition_penalty"),
        presence=setting("presence_penalty"),
        frequency=setting("frequency_penalty"),
        min_tokens=column([p.min_tokens for p in params], torch.int64),
        stop_ids=column(stops, torch.int64).reshape(len(params), width),
        bias_request=column([r for r, _, _ in biases], torch.int64),
        bias_token=column([token for _, token, _ in biases], torch.int64),
        bias_value=column([value for _, _, value in biases], torch.float64),
    )


def written_by(states: Sequence[RequestState], vocab_size: int, device: torch.device | str) -> Written:
    """What P requests have written so far, counted on ``device``: only ids travel there."""
    prompts = [state.tokens[: state.num_prompt] for state in states]
    outputs = [state.tokens[state.num_prompt :] for state in states]
    num_output = torch.tensor([len(output) for output in outputs], dtype=torch.int64, device=device)
    return Written(_counts(prompts, vocab_size, device) > 0, _counts(outputs, vocab_size, device), num_output)


def _counts(texts: Sequence[Sequence[int]], vocab_size: int, device: torch.device | str) -> torch.Tensor:
    """[P, V] int64: how often each token is in each text."""
    places = np.concatenate([np.array(text, dtype=np.int64) + r * vocab_size for r, text in enumerate(texts)])
    at = torch.from_numpy(places).to(device)
    flat = torch.zeros(len(texts) * vocab_size, dtype=torch.int64, device=device)
    return flat.scatter_add_(0, at, torch.ones_like(at)).view(len(texts), vocab_size)
