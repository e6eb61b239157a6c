"""What attention must know about a step, and the buffers that one layer keeps between steps.

Legend: T query rows of the step, K key rows of the step (equal to T unless context parallelism gathers keys), S request
slots, R ring rows, d head width, m tokens per compressed entry.

Every row has an absolute position p. A key at position p of the row's request lies in the step's own key rows if
``p >= starts[row]`` and in the ring row ``p % R`` otherwise, so nothing depends on how the tokens were cut into steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ...comm.context import whole
from ...parallel.groups import Group
from .ring import RingPlan

MIN_PAGE_TOKENS = 256


class CacheRows(Protocol):
    """What one layer keeps of its tokens, in numbers.

    ``ratio``: tokens per entry of the main pool, 0 without pools, 1 for an entry a token; ``index_ratio``: the same of
    the second pool. ``entry_width`` and ``index_width``: numbers of an entry of either. ``window``: positions behind
    the query that the ring of ``ring_width`` numbers a row must reach. ``raw_span``: the same, itself included, of the
    ring of ``raw_width`` numbers a row that a compressor reads; 0 without a compressor. ``packed_row``: bytes of a row
    of the first ring, and of an entry of the main pool, in 8-bit floats; 0 for kinds that cannot keep them so.
    """

    ratio: int
    entry_width: int
    index_width: int
    index_ratio: int
    window: int
    ring_width: int
    raw_span: int
    raw_width: int
    packed_row: int


class Rows(NamedTuple):
    """Rows of a step, all int64 [T].

    ``positions``: absolute. ``slots``: request slot. ``starts`` and ``ends``: first position of the row's request in
    this step, and one past its last. ``rows``: index of the row among the step's key rows.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    rows: torch.Tensor


class Run(NamedTuple):
    """Consecutive query rows of one request in a step, for kinds that read keys request by request.

    ``first``: the first position of the request in this step; ``limit``: one past the last position that any of these
    rows sees. ``queries`` and ``keys``: where the run's query rows, and the request's own key rows up to ``limit``, lie
    in the step. ``is_prefix``: the rows are at 0, 1, .. ``limit`` - 1, so that a plain causal mask fits. ``branches``:
    for rows that do not follow one another, which of the ``limit`` - ``first`` rows kept from ``first`` on each of the
    t query rows sees, bool [t, limit - first]; all see what was there before.
    """

    slot: int
    first: int
    limit: int
    queries: slice
    keys: slice
    is_prefix: bool
    branches: torch.Tensor | None = None


class Branches(NamedTuple):
    """Rows of one request that do not follow one another: a tree, of which a step has all nodes, or the latest.

    ``row``: the first of its n key rows of the step. ``seen`` bool [n, m]: which of the m rows kept from the request's
    start on each of them sees; they are the last n of the m.
    """

    row: int
    seen: np.ndarray


class RingRows(NamedTuple):
    """Keys that are passed from rank to rank of ``group`` instead of being brought together, see :mod:`.ring`.

    ``token_rows``: where the tokens of each rank lie in the entry pool. ``past``: for each request of the step a run of
    its earlier tokens, or None if there are none.
    """

    group: Group
    plan: RingPlan
    token_rows: tuple[torch.Tensor, ...]
    past: tuple[Run | None, ...]


class HostPlan(NamedTuple):
    """The plan's arrays in numpy, sharing memory with its tensors: compiled CPU kernels read these.

    ``queries`` int64 [5, T] and ``keys`` int64 [5, K]: the fields of :class:`Rows` in order. ``page_table`` int32
    [S, max_pages]. ``closing``: ratio -> int64 [C].
    """

    queries: np.ndarray
    keys: np.ndarray
    page_table: np.ndarray
    closing: dict[int, np.ndarray]


class AttentionPlan(NamedTuple):
    """The attention side of a step.

    ``queries`` and ``keys`` are the same rows unless context parallelism splits the queries. ``page_table`` int32
    [S, max_pages] maps a slot's token pages to pages of the entry pools. ``closing``: for each ratio m in use, the
    indices (int64) of key rows whose position closes a window of m tokens. ``max_position``: the largest position in
    the step, which bounds the work of reading compressed entries. ``host`` is None when the step is not on the CPU.

    ``bidirectional``: the rows of a request are one block (of a draft) that begins at position P. Each sees the window
    before the block, positions P - window .. P - 1, and the whole block. ``gather`` turns rows computed for the
    queries into rows for the keys; it is collective where context parallelism splits the queries. ``ring``: how
    kinds that need not bring keys together pass them on instead.
    """

    queries: Rows
    keys: Rows
    page_table: torch.Tensor
    closing: dict[int, torch.Tensor]
    max_position: int
    host: HostPlan | None
    bidirectional: bool = False
    gather: Callable[[torch.Tensor], torch.Tensor] = whole
    runs: tuple[Run, ...] = ()
    token_rows: torch.Tensor | None = None
    ring: RingRows | None = None

    def narrowed(self, rows: torch.Tensor) -> AttentionPlan:
        """The plan with the key rows ``rows`` int64 only, of which ``gather`` then makes rows; its queries stay."""
        keys = Rows(*(field[rows] for field in self.keys))
        host = self.host and self.host._replace(keys=self.host.keys[:, rows.cpu().numpy()])
        at = None if self.token_rows is None else self.token_rows[rows]
        return self._replace(keys=keys, host=host, gather=lambda x: self.gather(x)[rows], token_rows=at)

    def of_keys(self) -> AttentionPlan:
        """The plan whose queries are all its key rows, which every rank has; it has no runs."""
        host = self.host and self.host._replace(queries=self.host.keys)
        return self._replace(queries=self.keys, host=host, gather=whole, runs=(), ring=None)


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """int64 and float64 ``arrays`` as tensors on ``device``: in one asynchronous copy from pinned memory to a GPU, and
    without a copy on the CPU."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    return split_words(join_words(arrays).pin_memory().to(device, non_blocking=True), arrays)


def join_words(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    """The numbers of int64 and float64 ``arrays`` one behind the other, as int64."""
    return torch.from_numpy(
        np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.int64) for array in arrays])
    )


def split_words(words: torch.Tensor, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """What :func:`join_words` joined, as tensors of the types and shapes of ``arrays``."""
    dtypes = {np.dtype(np.int64): torch.int64, np.dtype(np.float64): torch.float64}
    parts = words.split([array.size for array in arrays])
    return [part.view(dtypes[array.dtype]).view(array.shape) for part, array in zip(parts, arrays)]


def build_plan(
    rows: np.ndarray,
    page_table: torch.Tensor,
    ratios: tuple[int, ...],
    bidirectional: bool = False,
    owned: np.ndarray | None = None,
    gather: Callable[[torch.Tensor], torch.Tensor] = whole,
    branches: Mapping[int, Branches] = MappingProxyType({}),
) -> AttentionPlan:
    """The plan of the key rows ``rows`` int64 [5, K] (the fields of :class:`Rows` in order).

    The queries are the same rows, or those at the places ``owned`` [T] when context parallelism splits them; ``gather``
    then brings rows together. ``branches``: by slot, the requests whose rows are nodes of a tree; those are kept one
    behind the other from the request's start on, whatever their positions.
    """
    closing = {ratio: np.flatnonzero((rows[0] + 1) % ratio == 0) for ratio in ratios}
    queries = rows if owned is None else np.ascontiguousarray(rows[:, owned])
    max_position = int(queries[0].max()) if queries.shape[1] else -1
    device = page_table.device
    host = HostPlan(queries, rows, page_table.numpy(), closing) if device.type == "cpu" else None
    key_rows, *closed = to_device([rows, *closing.values(), *(() if owned is None else (queries,))], device)
    keys = own = Rows(*key_rows.unbind(0))
    if owned is not None:
        own = Rows(*closed.pop().unbind(0))
    tensors = dict(zip(closing, closed))
    plan = AttentionPlan(own, keys, page_table, tensors, max_position, host, bidirectional, gather)
    if 1 not in ratios:
        return plan
    places = keys.positions
    if branches:
        (places,) = to_device([kept_at(rows, branches)], device)
    return plan._replace(
        runs=find_runs(queries, bidirectional, branches, device),
        token_rows=entry_rows(page_table, keys.slots, places, page_tokens(ratios)),
    )


def kept_at(rows: np.ndarray, branches: Mapping[int, Branches]) -> np.ndarray:
    """The place [K] of each key row among those of its request: its position, except in a tree."""
    places = rows[0].copy()
    for row, seen in branches.values():
        num_rows, num_kept = seen.shape
        places[row : row + num_rows] = rows[2, row] + np.arange(num_kept - num_rows, num_kept)
    return places


def page_tokens(ratios: Sequence[int]) -> int:
    """Tokens of a page: a multiple of every ratio of the model, so that no window straddles pages."""
    unit = math.lcm(*ratios) if ratios else MIN_PAGE_TOKENS
    return unit * -(-MIN_PAGE_TOKENS // unit)


def find_runs(
    queries: np.ndarray, bidirectional: bool, branches: Mapping[int, Branches], device: torch.device
) -> tuple[Run, ...]:
    """The runs of query rows int64 [5, T] (the fields of :class:`Rows` in order); rows of a request rise, or are nodes
    of ``branches``."""
    positions, slots, starts, ends, rows = queries
    borders = np.flatnonzero((np.diff(slots) != 0) | (np.diff(starts) != 0)) + 1
    borders = [0, *borders.tolist(), len(slots)]
    runs = []
    for begin, end in zip(borders, borders[1:]):
        if begin == end:
            continue
        slot, first, last = int(slots[begin]), int(starts[begin]), int(positions[begin:end].max())
        if slot in branches:
            tree = branches[slot]
            seen = torch.from_numpy(tree.seen[rows[begin:end] - tree.row]).to(device)
            runs.append(Run(slot, first, first + seen.shape[1], slice(begin, end), slice(0, 0), False, seen))
            continue
        limit = int(ends[begin]) if bidirectional else last + 1
        key = int(rows[begin] - positions[begin]) + first
        is_prefix = not bidirectional and int(positions[begin]) == 0 and end - begin == limit
        runs.append(Run(slot, first, limit, slice(begin, end), slice(key, key + limit - first), is_prefix))
    return tuple(runs)


class HostLayerCache(NamedTuple):
    """The buffers of a :class:`LayerCache` in numpy, sharing memory."""

    window: np.ndarray
    raw: np.ndarray
    entries: np.ndarray
    index_entries: np.ndarray


class LayerCache(NamedTuple):
    """State of one attention layer; every row is addressed by (slot, position), see the module text.

    ``window`` [S, R_w, d]: rotated keys. ``raw`` [S, R_c, width]: compressor inputs (values and gates, the indexer's
    behind the main ones). ``entries`` [pages, tokens per page / m, d] and ``index_entries`` [.., d_index]: pooled
    entries. Kinds without a compressor hold empty tensors. ``window`` and ``entries`` may be packed, see
    :mod:`..kernels.packed_keys`. ``host`` is None for buffers that numpy cannot view.
    """

    window: torch.Tensor
    raw: torch.Tensor
    entries: torch.Tensor
    index_entries: torch.Tensor
    host: HostLayerCache | None


def entry_rows(page_table: torch.Tensor, slots: torch.Tensor, entries: torch.Tensor, per_page: int) -> torch.Tensor:
    """Flat row in an entry pool of entry ``entries`` [...] of request slot ``slots`` [...], int64 [...]."""
    return page_table[slots, entries // per_page].long() * per_page + entries % per_page
