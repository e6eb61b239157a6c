"""What the ranks tell each other in every step, so that all of them run the same collectives on the same shapes.

Legend: W row owners (dp x cp ranks), R requests that get tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..comm.collectives import all_gather_ints, all_gather_v
from ..parallel.context import interleave, zigzag
from ..parallel.groups import Groups
from .step import Split


class Shapes(NamedTuple):
    """``rows`` of every row owner and ``requests`` of every DP rank in this step; whether any rank prefills."""

    rows: tuple[int, ...]
    requests: tuple[int, ...]
    has_prefill: bool


class Agreement:
    """Exchanges one small integer row per rank. With one row owner nothing is sent."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self._groups, self.device = groups, device

    def numbers(self, value: int) -> tuple[int, ...]:
        """``value`` of every row owner, in order. Collective over the row owners."""
        return tuple(row[0] for row in self._exchange([value]))

    def shapes(self, num_rows: Sequence[int], num_requests: int, has_prefill: bool) -> list[Shapes | tuple[int, ...]]:
        """The shapes of the next forward, from every row owner's own, and then the rows of each part of it that
        ``num_rows`` has beside the whole. Collective over the row owners."""
        table = self._exchange([num_requests, int(has_prefill), *num_rows])
        whole, *parts = (tuple(row[2 + i] for row in table) for i in range(len(num_rows)))
        requests = tuple(row[0] for row in table[:: self._groups.attn_cp.size])
        return [Shapes(whole, requests, any(row[1] for row in table)), *parts]

    def _exchange(self, row: list[int]) -> list[list[int]]:
        return all_gather_ints(row, self._groups.attn_rows, self.device)

    def collect(self, table: torch.Tensor, requests: Sequence[int]) -> torch.Tensor:
        """The rows [sum R, ...] of all DP ranks' ``table`` [R, ...], on ranks of the deciding column.

        Collective over the attn_dp group of that column only: the first rank of every attention block.
        """
        return all_gather_v(table, self._groups.attn_dp, requests)


def split_rows(lengths: Sequence[int], kind: str, groups: Groups, replicate: bool) -> Split | None:
    """How a step of requests with ``lengths`` tokens is cut over the cp ranks; None for not at all.

    ``kind`` is "interleave" (token t of the step to rank t mod cp) or "zigzag" (each request in 2 cp blocks, a rank has
    an early and a late one). ``replicate``: every cp rank computes all rows.
    """
    cp = groups.attn_cp.size
    if cp == 1 or replicate:
        return None
    cut = interleave(sum(lengths), cp) if kind == "interleave" else zigzag(lengths, cp)
    return Split(groups.attn_cp, [np.asarray(places) for places in cut.owned])
