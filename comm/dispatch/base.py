"""The dispatch seam: rows go to the ranks of their experts (dispatch), and what those make of them back (combine).

Legend: t rows here, D hidden width, k experts per row, E experts, W ranks of the expert group, N rows received.

One exchange is ``begin_dispatch``, ``finish_dispatch``, ``begin_combine`` (once for each piece), ``finish_combine``, on
every rank of the group in the same order; between a begin and its finish the rows travel and other work may be done.
Experts are placed in contiguous blocks: rank r of ``moe_ep`` has experts [r E / W, (r + 1) E / W).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch

from ...parallel.groups import Groups

BLOCK = 64
"""Rows of a block that may be sent while others are computed."""

MAX_PIECES = 4
"""Into how many pieces a combine is cut at most."""

ORDER = {
    "open": ("open", "finish_combine"),
    "begin_dispatch": ("open", "finish_combine"),
    "finish_dispatch": ("begin_dispatch",),
    "begin_combine": ("finish_dispatch", "begin_combine"),
    "finish_combine": ("begin_combine",),
}
"""Each call of a dispatcher, and the calls it may follow."""


class StepRows(NamedTuple):
    """What all ranks know of the rows of a step.

    ``counts``: attention rows of every row owner (dp x cp) of the tp group, in order. ``has_prefill``: on any rank.
    ``in_pieces``: whether results are sent back while the rest is computed. ``is_split``: whether the context-parallel
    ranks have rows of their own; else all of them have the same.
    """

    counts: tuple[int, ...]
    has_prefill: bool
    in_pieces: bool = False
    is_split: bool = False


class DispatchSizes(NamedTuple):
    """What a dispatcher must know of a model and its engine, the same on every rank.

    ``max_tokens_per_rank``: rows that a rank sends in one exchange at most, where buffers are fixed. ``alignment``: the
    multiple that counts of received rows are rounded up to, 0 if nobody needs them. ``fp8``: rows travel as 8-bit
    floats where a dispatcher can; otherwise as ``dtype``.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    max_tokens_per_rank: int
    dtype: torch.dtype
    device: torch.device
    alignment: int = 0
    fp8: bool = False


class Received(NamedTuple):
    """Rows for the experts of this rank.

    ``x`` [N, D]; ``experts`` int64 [N, j], local ids, -1 for none; ``weights`` float32 [N, j], by which the experts'
    outputs are to be added up. ``counts``: picks of each local expert, rounded up to the alignment; None without one.
    ``pieces``: an index of the rows whose sums are to be handed to each ``begin_combine``; as many on every rank.
    """

    x: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    counts: list[int] | None
    pieces: Sequence[torch.Tensor | slice] = (slice(None),)


class Dispatcher(Protocol):
    """One exchange at a time, see the module text. Calls out of order raise ``RuntimeError``."""

    all_to_all: ClassVar[bool]
    """Whether rows travel to experts: the rows outside then are slices of the attention rows, one a rank, and whoever
    adds a shared expert computes it there whole. Otherwise the received rows are all rows of the group, in order, on
    each of its ranks, whose sums are completed by the combine."""

    limits: ClassVar[tuple[bool, bool]]
    """Whether ``max_tokens_per_rank`` bounds steps with prefill, and those without."""

    sends_fp8: ClassVar[bool]
    """Whether ``fp8`` changes anything."""

    def __init__(self, groups: Groups, sizes: DispatchSizes) -> None:
        """Raises ``ValueError`` for groups or sizes that it cannot serve, the same on every rank."""
        ...

    def twin(self) -> Dispatcher:
        """Another one for a second exchange at the same time, on the same buffers."""
        ...

    def open(self, rows: StepRows) -> None:
        """Make ready for a step; it may have any number of exchanges.

        Raises ``ValueError``, on every rank and before anything is sent, for more rows than a rank may send.
        """
        ...

    def begin_dispatch(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> None:
        """Send rows ``x`` [t, D] to ``experts`` [t, k] (global ids, -1 for none), of ``weights`` float32 [t, k]."""
        ...

    def finish_dispatch(self) -> Received:
        """Wait for the rows of this rank's experts."""
        ...

    def begin_combine(self, y: torch.Tensor) -> None:
        """Send back the weighted sums ``y`` of this rank's experts for the rows of the next piece, in its order."""
        ...

    def finish_combine(self) -> torch.Tensor:
        """The sums over all chosen experts [t, D] of the rows that were sent."""
        ...


class Order:
    """Holds the calls of a dispatcher to :data:`ORDER`."""

    __slots__ = ("_last", "_pieces")

    def __init__(self) -> None:
        self._last, self._pieces = "finish_combine", 0

    def enter(self, call: str, num_pieces: int = 0) -> None:
        """Note that ``call`` begins; ``num_pieces``, at ``finish_dispatch``, how many combines must follow.

        Raises ``RuntimeError`` naming both calls if it may not follow the one before it.
        """
        allowed = self._last in ORDER[call]
        if call == "begin_combine":
            allowed &= self._pieces > 0
        elif call == "finish_combine":
            allowed &= self._pieces == 0
        if not allowed:
            raise RuntimeError(
                f"{call} after {self._last}: an exchange is begin_dispatch, finish_dispatch, begin_combine for each "
                "piece, finish_combine"
            )
        self._pieces += {"finish_dispatch": num_pieces, "begin_combine": -1}.get(call, 0)
        self._last = call
