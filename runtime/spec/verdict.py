"""The outcome of verification, in a form that one rank decides and all ranks receive.

Shapes: R requests, γ drafts a block. Names follow the paper: ℓ verified, n accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

RUNNING, STOP, LENGTH = 0, 1, 2
"""Values of :attr:`Verdict.finish`."""

NUM_FIELDS = 4
NO_TOKEN = -1


@dataclass(frozen=True)
class Verdict:
    """What one verify step emitted, per request; int64 host arrays."""

    verified: np.ndarray
    """[R] drafts the target judged (ℓ)."""
    accepted: np.ndarray
    """[R] drafts among the emitted tokens (n, less those behind a cut)."""
    emitted: np.ndarray
    """[R] tokens emitted: n + 1, or fewer where a stop or a limit cut the block. Just as many target rows (those of x_0
    and of all emitted tokens but the last) become part of the context; so many cache rows are committed."""
    finish: np.ndarray
    """[R] RUNNING, STOP or LENGTH."""
    tokens: np.ndarray
    """[R, γ + 1] the emitted tokens, ``NO_TOKEN`` behind them."""

    def to_tensor(self) -> torch.Tensor:
        """[R, 4 + γ + 1] int64 in the order of the fields; the shape is known to every rank before it arrives."""
        table = np.empty((len(self.tokens), NUM_FIELDS + self.tokens.shape[1]), dtype=np.int64)
        table[:, 0], table[:, 1], table[:, 2], table[:, 3] = self.verified, self.accepted, self.emitted, self.finish
        table[:, NUM_FIELDS:] = self.tokens
        return torch.from_numpy(table)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Verdict:
        """The inverse of :meth:`to_tensor`, from any device; one copy.

        Raises ``ValueError`` on another number of axes or another dtype.
        """
        if tensor.ndim != 2 or tensor.shape[1] <= NUM_FIELDS or tensor.dtype != torch.int64:
            raise ValueError(
                f"a verdict is int64 [requests, {NUM_FIELDS} + γ + 1], got {tensor.dtype} {tuple(tensor.shape)}"
            )
        table = tensor.cpu().numpy()
        return cls(*table[:, :NUM_FIELDS].T, table[:, NUM_FIELDS:])

    def token_lists(self) -> list[list[int]]:
        """The emitted tokens of each request; the last is the next anchor of a request that goes on."""
        return [row[:count] for row, count in zip(self.tokens.tolist(), self.emitted.tolist())]


def make_verdict(lens: np.ndarray, blocks: list[list[int]], gamma: int) -> Verdict:
    """The uncut verdict from each request's emitted tokens: the drafts that were kept, and one more."""
    padded = np.array([block + [NO_TOKEN] * (gamma + 1 - len(block)) for block in blocks], dtype=np.int64)
    emitted = np.array([len(block) for block in blocks], dtype=np.int64)
    return Verdict(lens, emitted - 1, emitted, np.zeros_like(emitted), padded.reshape(len(blocks), gamma + 1))


def cut(
    verdict: Verdict,
    remaining: Sequence[int],
    stop_ids: Sequence[Collection[int]],
    stop_at: Sequence[int | None] | None = None,
) -> Verdict:
    """End blocks at the first stop or at the length limit, for text, counts and cache alike.

    A stop inside the limit is STOP; one behind it counts for nothing and the request ends with LENGTH. The stopping
    token itself is emitted.

    Args:
        verdict: uncut.
        remaining: [R] tokens each request may still emit, at least 1.
        stop_ids: [R] the ids that end each request (those of the model left out under ``ignore_eos``).
        stop_at: [R] the place 0..γ of the emitted token that completes a stop string, ``None`` where none does.
    """
    accepted, finish, blocks = verdict.accepted.tolist(), [], []
    for r, block in enumerate(verdict.token_lists()):
        limit = min(len(block), remaining[r])
        stops = [k for k, token in enumerate(block[:limit]) if token in stop_ids[r]][:1]
        if stop_at is not None and stop_at[r] is not None and stop_at[r] < limit:
            stops.append(stop_at[r])
        kept = min(stops) + 1 if stops else limit
        finish.append(STOP if stops else LENGTH if kept == remaining[r] else RUNNING)
        accepted[r] = min(accepted[r], kept)
        blocks.append(block[:kept])
    made = make_verdict(verdict.verified, blocks, verdict.tokens.shape[1] - 1)
    return replace(made, accepted=np.array(accepted, dtype=np.int64), finish=np.array(finish, dtype=np.int64))
