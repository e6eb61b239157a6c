"""Arithmetic of rows that all dispatchers share: who has how many, pieces, and rows with their routing as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...parallel.groups import Groups
from .base import BLOCK, MAX_PIECES, DispatchSizes, StepRows


def shares(count: int, num_ranks: int) -> list[int]:
    """``count`` rows cut into a run for each rank, the first ones longer by one where it does not divide."""
    return [count // num_ranks + (rank < count % num_ranks) for rank in range(num_ranks)]


def rows_by_rank(counts: Sequence[int], attn_tp: int) -> list[int]:
    """Rows of every rank of the tp group when each owner's rows are cut over its ``attn_tp`` ranks."""
    return [share for count in counts for share in shares(count, attn_tp)]


def most_rows(rows: StepRows, groups: Groups) -> int:
    """Rows that a rank sends in one exchange at most; ranks that share the width of experts send each other's too."""
    by_rank, width = rows_by_rank(rows.counts, groups.attn_tp.size), groups.moe_tp.size
    return max(sum(by_rank[first : first + width]) for first in range(0, len(by_rank), width))


def check_most_rows(rows: StepRows, groups: Groups, limit: int) -> int:
    """:func:`most_rows`; ``ValueError``, the same on every rank, if they are more than buffers are for."""
    most = most_rows(rows, groups)
    if most > limit:
        raise ValueError(
            f"a rank would send {most} rows at once, but buffers are for {limit} (--max-tokens-per-rank); "
            "send fewer rows in a step, or use the dispatcher auto or normal"
        )
    return most


def num_pieces(rows: StepRows, most_rows: int) -> int:
    """Into how many pieces a combine is cut when a rank sends ``most_rows`` rows at most."""
    return min(MAX_PIECES, max(1, -(-most_rows // BLOCK))) if rows.in_pieces else 1


def piece_sizes(count: int, num_pieces: int) -> list[int]:
    """Rows of each piece of a run of ``count``: whole blocks, apart from the last row's."""
    blocks = -(-count // BLOCK)
    ends = [min(count, blocks * (piece + 1) // num_pieces * BLOCK) for piece in range(num_pieces)]
    return [end - start for start, end in zip([0, *ends], ends)]


class Cut:
    """Which piece each row is in, where runs of ``sizes`` rows lie one behind the other.

    ``pieces``: int32 [sum of sizes], or None if all are one piece.
    """

    def __init__(self, pieces: torch.Tensor | None, run_sizes: Sequence[int]) -> None:
        self.pieces, self._run_sizes = pieces, list(run_sizes)

    @classmethod
    def blocks(cls, run_sizes: Sequence[int], num_pieces: int, device: torch.device, at_home: int | None) -> Cut:
        """Every run cut by :func:`piece_sizes`; but the run ``at_home``, if any, whose rows need no link, is the last
        piece, and the others share the pieces before it, so that the last to be computed has no way to go."""
        if num_pieces == 1:
            return cls(None, run_sizes)
        if at_home is None:
            table = torch.tensor([piece_sizes(size, num_pieces) for size in run_sizes])
        else:
            table = torch.tensor([[*piece_sizes(size, num_pieces - 1), 0] for size in run_sizes])
            table[at_home] = torch.tensor([0] * (num_pieces - 1) + [run_sizes[at_home]])
        pieces = torch.arange(num_pieces, dtype=torch.int32).repeat(len(run_sizes))
        return cls(pieces.repeat_interleave(table.flatten()).to(device), run_sizes)

    def rows(self, piece: int) -> torch.Tensor | slice:
        """An index of the rows in ``piece``, in order."""
        return slice(None) if self.pieces is None else (self.pieces == piece).nonzero()[:, 0]

    def sizes(self, piece: int) -> list[int]:
        """How many of each run are in ``piece``."""
        if self.pieces is None:
            return self._run_sizes
        return [int((run == piece).sum()) for run in self.pieces.split(self._run_sizes)]

    def select(self, at: torch.Tensor, run_sizes: Sequence[int]) -> Cut:
        """The rows ``at`` as runs of ``run_sizes``, each in the piece it is in here."""
        return Cut(None if self.pieces is None else self.pieces[at], run_sizes)


def local_ids(experts: torch.Tensor, first: int, num_local: int) -> torch.Tensor:
    """Global expert ids as places in the block from ``first``; -1 for those outside."""
    local = experts - first
    return torch.where((local >= 0) & (local < num_local), local, -1)


def aligned(counts: torch.Tensor, alignment: int) -> list[int] | None:
    """``counts`` rounded up to ``alignment``; None without one."""
    return (-(-counts // alignment) * alignment).tolist() if alignment else None


def count_ids(local: torch.Tensor, num_local: int, alignment: int) -> list[int] | None:
    """How often each local id occurs, rounded up to ``alignment``; None without one."""
    return aligned(torch.bincount(local.flatten() + 1, minlength=num_local + 1)[1:], alignment) if alignment else None


class RowFormat:
    """A row with its routing as bytes: x, then global expert ids plus one (so that zero bytes mean none), weights, and
    a number for the dispatcher's own use; int32 and float32."""

    def __init__(self, sizes: DispatchSizes) -> None:
        self._dtype, k = sizes.dtype, sizes.top_k
        wide = sizes.hidden_size * sizes.dtype.itemsize
        self._starts = (0, wide, wide + 4 * k, wide + 8 * k, wide + 8 * k + 4)

    @property
    def num_bytes(self) -> int:
        """Bytes of a row."""
        return self._starts[-1]

    def pack(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """uint8 [t, bytes]; the number is 0."""
        packed = torch.zeros((x.shape[0], self.num_bytes), dtype=torch.uint8, device=x.device)
        for column, value in enumerate((x, experts + 1, weights)):
            self._column(packed, column).copy_(value)
        return packed

    def _column(self, packed: torch.Tensor, column: int) -> torch.Tensor:
        dtype = (self._dtype, torch.int32, torch.float32, torch.int32)[column]
        return packed[:, self._starts[column] : self._starts[column + 1]].view(dtype)

    def rows(self, packed: torch.Tensor) -> torch.Tensor:
        """x, a view."""
        return self._column(packed, 0)

    def experts(self, packed: torch.Tensor) -> torch.Tensor:
        """Global ids, int64, -1 for none."""
        return self._column(packed, 1).long() - 1

    def weights(self, packed: torch.Tensor) -> torch.Tensor:
        """Weights."""
        return self._column(packed, 2).contiguous()

    def numbers(self, packed: torch.Tensor) -> torch.Tensor:
        """The dispatcher's numbers int32 [t], a view that may be written."""
        return self._column(packed, 3)[:, 0]
