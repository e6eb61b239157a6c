"""The rules of ``verify.py`` and ``block_verify.py`` as tensor programs: all requests at once, nothing waits for the
host.

Same arguments, as tensors on one device, and the same choices; the result is the tensor form of a
:class:`~.verdict.Verdict`, uncut. Shapes: R requests, γ drafts a block, T packed rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...layers.kernels.rejection import Judged, draw, next_law, reject_drafts
from .rows import DeviceRows
from .verdict import NO_TOKEN


def verify_greedy(rows: DeviceRows, target_ids: Tensor, drafts: Tensor) -> Tensor:
    """See :func:`~.verify.verify_greedy`."""
    same = (target_ids[rows.block] == drafts) & rows.verified
    accepted = same.cumprod(1).sum(1)
    return _verdict(rows, drafts, accepted, target_ids[rows.first + accepted])


def verify_tokens(
    rows: DeviceRows,
    target_probs: Tensor,
    drafts: Tensor,
    accept_uniforms: Tensor,
    final_uniforms: Tensor,
    draft_probs: Tensor | None = None,
    reject: Callable[..., Judged] = reject_drafts,
) -> Tensor:
    """See :func:`~.verify.verify_tokens`; drafts that are not verified must be valid ids. ``reject``: the bound kernel
    ``reject_drafts``."""
    uniforms = (accept_uniforms, final_uniforms)
    accepted, tokens = reject(target_probs, rows.first, rows.lens, drafts, *uniforms, draft_probs)
    return _verdict(rows, drafts, accepted, tokens)


def verify_blocks(
    rows: DeviceRows,
    target_probs: Tensor,
    drafts: Tensor,
    accept_uniforms: Tensor,
    final_uniforms: Tensor,
    draft_probs: Tensor | None = None,
) -> Tensor:
    """See :func:`~.block_verify.verify_blocks`; drafts that are not verified must be valid ids."""
    if rows.gamma == 0:
        return _verdict(rows, drafts, rows.lens, draw(target_probs[rows.first].double(), final_uniforms))
    weights = _joint_weights(rows, target_probs, drafts, draft_probs)
    kept = (accept_uniforms < _keep_chances(rows, target_probs, drafts, weights, draft_probs)) & rows.verified
    accepted = (kept * rows.steps[1:]).amax(1)
    last = weights.gather(1, accepted[:, None])[:, 0]
    law = next_law(target_probs[rows.first + accepted].double(), rows.lens, drafts, accepted, draft_probs, last)
    return _verdict(rows, drafts, accepted, draw(law, final_uniforms))


def _joint_weights(rows: DeviceRows, target_probs: Tensor, drafts: Tensor, draft_probs: Tensor | None) -> Tensor:
    """[R, γ + 1] the weights w_0..w_γ; those behind the verified drafts mean nothing."""
    ratio = target_probs[rows.block, drafts]
    if draft_probs is not None:
        q_x = draft_probs.gather(2, drafts[:, :, None])[:, :, 0]
        ratio = ratio / q_x.clamp_min(torch.finfo(q_x.dtype).tiny)
    weights = [torch.ones_like(ratio[:, 0])]
    for k in range(rows.gamma):
        weights.append((weights[-1] * ratio[:, k]).clamp_max(1.0))
    return torch.stack(weights, dim=1)


def _keep_chances(
    rows: DeviceRows, target_probs: Tensor, drafts: Tensor, weights: Tensor, draft_probs: Tensor | None
) -> Tensor:
    """[R, γ] the probability that the coin of place k = 1..ℓ succeeds."""
    w = weights[:, 1:]
    inner = w[:, :-1]
    scaled = inner[:, :, None] * target_probs[rows.block[:, 1:]]
    if draft_probs is None:
        mass = scaled.scatter(2, drafts[:, 1:, None], 0.0).sum(2)
    else:
        mass = (scaled - draft_probs[:, 1:]).clamp_min(0.0).sum(2)
    room = 1.0 - inner + mass
    chance = torch.where(room > 0, mass / room.clamp_min(torch.finfo(room.dtype).tiny), 1.0)
    return torch.where(rows.steps[1:] == rows.lens[:, None], w, torch.cat([chance, w[:, -1:]], dim=1))


def _verdict(rows: DeviceRows, drafts: Tensor, accepted: Tensor, extra: Tensor) -> Tensor:
    """[R, 4 + γ + 1] int64, in the layout of :meth:`Verdict.to_tensor`."""
    n, last = accepted[:, None], extra[:, None]
    tokens = torch.cat([drafts, last], dim=1)
    tokens = torch.where(rows.steps < n, tokens, torch.where(rows.steps == n, last, NO_TOKEN))
    fields = torch.stack([rows.lens, accepted, accepted + 1, torch.zeros_like(accepted)], dim=1)
    return torch.cat([fields, tokens], dim=1)
