"""Dense attention over one block of keys, with what is needed to merge it with other blocks, in plain torch.

Legend: T query rows, K key rows, H query heads, G key heads (H a multiple of G), d key width, e value width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

TILE_ROWS = 64  # query rows at a time; those of a causal tile look no further than its last row does


class Attended(NamedTuple):
    """``out`` float32 [T, H, e]: the softmax-weighted mean of the values that a row sees, 0 where it sees none.
    ``lse`` float32 [T, H]: the log of the sum of exponentials of its scores, -inf where it sees none."""

    out: torch.Tensor
    lse: torch.Tensor


def attend_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, scale: float
) -> Attended:
    """Attention of ``q`` [T, H, d] over ``k`` [K, G, d] and ``v`` [K, G, e], computed in float32.

    Row t sees the first ``visible[t]`` (int64 [T]) keys, or all of them if ``visible`` is None. Query head h reads key
    head ``h // (H / G)``. A score is ``q . k scale``.
    """
    out, lse = (
        q.new_empty((*q.shape[:2], v.shape[2]), dtype=torch.float32),
        q.new_empty(q.shape[:2], dtype=torch.float32),
    )
    keys, values = k.float().permute(1, 2, 0), v.float().transpose(0, 1)
    for start in range(0, q.shape[0], TILE_ROWS):
        part = slice(start, start + TILE_ROWS)
        num_keys = k.shape[0] if visible is None else int(visible[part].max())
        tile = _grouped(q[part].float(), k.shape[1])
        scores = (tile.flatten(1, 2) @ keys[..., :num_keys]).view(*tile.shape[:3], num_keys) * scale
        if visible is not None:
            hidden = torch.arange(num_keys, device=q.device) >= visible[part].unsqueeze(1)
            scores.masked_fill_(hidden.unsqueeze(1), float("-inf"))
        total = scores.logsumexp(-1)
        probs = scores.sub_(total.masked_fill(total == float("-inf"), 0.0).unsqueeze(-1)).exp_()
        mixed = (probs.flatten(1, 2) @ values[:, :num_keys]).view(*tile.shape[:3], v.shape[2])
        out[part], lse[part] = mixed.transpose(0, 1).flatten(1, 2), total.transpose(0, 1).flatten(1, 2)
    return Attended(out, lse)


def _grouped(q: torch.Tensor, num_groups: int) -> torch.Tensor:
    """[T, H, d] -> [G, T, H / G, d]."""
    return q.unflatten(1, (num_groups, -1)).transpose(0, 1)


def merge(a: Attended, b: Attended) -> Attended:
    """Attention over the keys of both blocks, from that over each; rows that see nothing in either stay 0 and -inf."""
    lse = torch.logaddexp(a.lse, b.lse)
    base = lse.masked_fill(lse == float("-inf"), 0.0)
    out = a.out * (a.lse - base).exp().unsqueeze(-1) + b.out * (b.lse - base).exp().unsqueeze(-1)
    return Attended(out, lse)
