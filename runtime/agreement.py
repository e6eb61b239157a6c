"""What the ranks tell each other in every step, so that all of them run the same collectives on the same shapes.

Legend: W row owners (dp x cp ranks), R requests that get tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..comm.collectives import all_gather, all_gather_v
from ..comm.dp_attention import Padding, choose_padding
from ..parallel.context import interleave, zigzag
from ..parallel.groups import Groups
from .step import Split


class Shapes(NamedTuple):
    """``rows`` of every row owner and ``requests`` of every DP rank in this step; ``padding`` of the gathered rows."""

    rows: tuple[int, ...]
    requests: tuple[int, ...]
    padding: Padding


class Agreement:
    """Exchanges one small integer row per rank. With one row owner nothing is sent."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self._groups, self._device = groups, device

    def numbers(self, value: int) -> tuple[int, ...]:
        """``value`` of every row owner, in order. Collective over the row owners."""
        return tuple(self._exchange([value])[:, 0].tolist())

    def shapes(self, num_rows: int, num_requests: int, has_prefill: bool) -> Shapes:
        """The shapes of the next forward, from every row owner's own. Collective over the row owners."""
        table = self._exchange([num_rows, num_requests, int(has_prefill)])
        rows, per_dp = tuple(table[:, 0].tolist()), table[:: self._groups.attn_cp.size, 1]
        return Shapes(rows, tuple(per_dp.tolist()), choose_padding(rows, bool(table[:, 2].any())))

    def _exchange(self, row: list[int]) -> torch.Tensor:
        sent = torch.tensor([row], dtype=torch.int64, device=self._device)
        return all_gather(sent, self._groups.attn_rows).cpu()

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
