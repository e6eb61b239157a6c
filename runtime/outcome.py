"""What a step decided for one request, as a row of integers (and of numbers, for log-probabilities) that can travel.

Legend: R requests, γ drafts a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from .request import TokenLogprob
from .spec.verdict import NO_TOKEN, STOP, Verdict

NUM_FIELDS = 5
COMPLETED = -1
"""As the drafted count: the request completed its prefill, nothing was verified."""


class Outcome(NamedTuple):
    """``number``: the request's in its engine. ``drafted``: drafts proposed, or ``COMPLETED``; ``verified`` and
    ``accepted`` of them; ``finish``: see ``Verdict.finish``; ``tokens``: what it got, at least one."""

    number: int
    drafted: int
    verified: int
    accepted: int
    finish: int
    tokens: list[int]

    @classmethod
    def from_row(cls, row: list[int]) -> Outcome:
        """From a row of :func:`to_table`."""
        return cls(*row[:NUM_FIELDS], [token for token in row[NUM_FIELDS:] if token != NO_TOKEN])

    def ended_at(self, place: int) -> Outcome:
        """This outcome, stopped behind the token at ``place``; what came after was never emitted."""
        kept = self.tokens[: place + 1]
        return self._replace(accepted=min(self.accepted, len(kept)), finish=STOP, tokens=kept)


def table_width(gamma: int) -> int:
    """Columns of :func:`to_table`."""
    return NUM_FIELDS + gamma + 1


def to_table(numbers: Sequence[int], drafted: Sequence[int], verdict: Verdict) -> torch.Tensor:
    """int64 [R, 5 + γ + 1]: the fields of :class:`Outcome`, tokens padded with ``NO_TOKEN``."""
    fields = np.array([numbers, drafted, verdict.verified, verdict.accepted, verdict.finish], dtype=np.int64)
    return torch.from_numpy(np.concatenate((fields.T, verdict.tokens), axis=1))


def rows_to_table(rows: Sequence[Outcome], width: int) -> torch.Tensor:
    """The table of ``rows`` with ``width`` columns, as :func:`to_table` makes it."""
    flat = [[*row[:NUM_FIELDS], *row.tokens] for row in rows]
    return torch.tensor([values + [NO_TOKEN] * (width - len(values)) for values in flat], dtype=torch.int64)


def write_logprobs(found: Sequence[Sequence[TokenLogprob]], gamma: int, num_top: int) -> torch.Tensor:
    """float64 [R, γ + 1, 1 + 2 num_top]: the log-probability of each emitted token, then (id, log-probability) pairs of
    the likeliest; NaN where there is nothing."""
    table = torch.full((len(found), gamma + 1, 1 + 2 * num_top), float("nan"), dtype=torch.float64)
    for r, entries in enumerate(found):
        for k, entry in enumerate(entries):
            values = [entry.logprob, *(number for pair in entry.top for number in pair)]
            table[r, k, : len(values)] = torch.tensor(values, dtype=torch.float64)
    return table


def read_logprobs(values: torch.Tensor, tokens: Sequence[int], num_top: int | None) -> tuple[TokenLogprob, ...]:
    """One request's entry [γ + 1, 1 + 2 k] of :func:`write_logprobs`, for its ``tokens``; empty if it did not ask."""
    if num_top is None:
        return ()
    result = []
    for token, row in zip(tokens, values.tolist()):
        pairs = [(int(i), x) for i, x in zip(row[1::2], row[2::2]) if i == i]
        result.append(TokenLogprob(token, row[0], tuple(pairs[:num_top])))
    return tuple(result)
