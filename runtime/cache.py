"""The rewindable cache: entries are addressed by (request slot, absolute position), so dropping tokens sets a length.

Legend: S request slots, R ring rows, P pages, m tokens per compressed entry.

A ring of R rows keeps, for every position p, row ``p % R``. A step of up to ``max_verify`` rows may be rolled back
completely; the rows it overwrote are then older than anything that is read again, because R is the reach of a reader
plus ``max_verify``. Compressed entries need no undo: how many a query sees follows from its position, and an entry is
computed anew when its window closes again. Entries live in pages of ``page_tokens`` tokens; the same page number is
used in every layer's pool, so one table serves all layers. Nodes of a draft tree lie behind a request's tokens; those
that the target keeps are the only rows that ever move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..layers.attention.plan import CacheRows, HostLayerCache, LayerCache, entry_rows, page_tokens


@dataclass(frozen=True)
class CacheLayout:
    """Sizes of the cache of a stack of attention layers.

    ``max_verify``: rows of the widest step that may be rolled back (1 without a draft). ``spare_rows`` is added to
    every ring; it exists so that a test can make rings too small. ``model_ratios``: the compression ratios of the whole
    model, where these are the layers of one pipeline stage: all stages must count pages alike. ``packed``: keys
    are kept in 8-bit floats, rows of ``CacheRows.packed_row`` bytes; other rows have numbers of ``itemsize`` bytes.
    ``num_branches``: nodes of a draft tree, which are kept behind a request's tokens until the target has judged them.
    """

    layers: tuple[CacheRows, ...]
    max_verify: int
    itemsize: int
    spare_rows: int = 0
    model_ratios: tuple[int, ...] | None = None
    packed: bool = False
    num_branches: int = 0

    @property
    def ratios(self) -> tuple[int, ...]:
        """The compression ratios in use, each once."""
        second = {sizes.index_ratio for sizes in self.layers if sizes.index_width}
        return tuple(sorted({sizes.ratio for sizes in self.layers if sizes.ratio} | second))

    @property
    def page_ratios(self) -> tuple[int, ...]:
        """The compression ratios that pages are made for."""
        return self.ratios if self.model_ratios is None else self.model_ratios

    @property
    def page_tokens(self) -> int:
        """Tokens of a page: a multiple of every ratio of the model, so that no window straddles pages."""
        return page_tokens(self.page_ratios)

    def window_rows(self, sizes: CacheRows) -> int:
        """Ring rows of the sliding keys; 0 for kinds without a window."""
        return sizes.window + self.max_verify + self.spare_rows if sizes.window else 0

    def raw_rows(self, sizes: CacheRows) -> int:
        """Ring rows of the compressor inputs; 0 for kinds without a compressor."""
        return sizes.raw_span + self.max_verify + self.spare_rows if sizes.raw_span else 0

    def resume_rows(self, sizes: CacheRows) -> tuple[int, int]:
        """Ring rows of the sliding keys and of the compressor inputs that a request going on at a page boundary reads.

        No window is open there; an entry that overlaps the window before it reads that one's rows.
        """
        return sizes.window, max(sizes.raw_span - sizes.ratio, 0)

    def ring_bytes(self, sizes: CacheRows) -> int:
        """Bytes of a row of the sliding ring."""
        return sizes.packed_row if self.packed and sizes.ring_width else sizes.ring_width * self.itemsize

    def entry_bytes(self, sizes: CacheRows) -> int:
        """Bytes of an entry of the main pool."""
        return sizes.packed_row if self.packed and sizes.entry_width else sizes.entry_width * self.itemsize

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of all rings of one request, whatever its length."""
        return sum(
            self.window_rows(sizes) * self.ring_bytes(sizes) + self.raw_rows(sizes) * sizes.raw_width * self.itemsize
            for sizes in self.layers
        )

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the pools' entries per token of context."""
        pooled = [s for s in self.layers if s.ratio]
        return sum(self.entry_bytes(s) / s.ratio + s.index_width * self.itemsize / s.index_ratio for s in pooled)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers."""
        return round(self.bytes_per_token * self.page_tokens)

    @property
    def bytes_per_snapshot(self) -> int:
        """Bytes of the ring rows that are saved at a page boundary."""
        total = 0
        for sizes in self.layers:
            window, raw = self.resume_rows(sizes)
            total += window * self.ring_bytes(sizes) + raw * sizes.raw_width * self.itemsize
        return total

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens of one request and a tree; none if nothing is compressed."""
        return -(-(num_tokens + self.num_branches) // self.page_tokens) if self.page_ratios else 0


class Cache:
    """Buffers of all layers, the page table, and which slots and pages are free.

    A request holds one slot from :meth:`acquire` to :meth:`release`, and pages from :meth:`reserve` and :meth:`share`.
    A page is free when nobody holds it. Memory of pools is touched page by page, so on the CPU it grows with use.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_slots: int,
        num_pages: int,
        max_context: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.layout = layout
        self.layers = [self._layer(sizes, num_slots, num_pages, device, dtype) for sizes in layout.layers]
        pages_per_slot = max(layout.pages_for(max_context), 1)
        self.page_table = torch.zeros((num_slots, pages_per_slot), dtype=torch.int32, device=device)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self.num_pages = num_pages
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._pages: dict[int, list[int]] = {}

    def _layer(
        self, sizes: CacheRows, num_slots: int, num_pages: int, device: torch.device, dtype: torch.dtype
    ) -> LayerCache:
        layout = self.layout
        per_page = layout.page_tokens // sizes.ratio if sizes.ratio else 0
        index_per_page = layout.page_tokens // sizes.index_ratio if sizes.index_ratio else 0
        key_dtype, unit = (torch.uint8, 1) if layout.packed else (dtype, layout.itemsize)
        shapes = (
            ((num_slots, layout.window_rows(sizes), layout.ring_bytes(sizes) // unit), key_dtype),
            ((num_slots, layout.raw_rows(sizes), sizes.raw_width), dtype),
            ((num_pages if sizes.entry_width else 0, per_page, layout.entry_bytes(sizes) // unit), key_dtype),
            ((num_pages if sizes.index_width else 0, index_per_page, sizes.index_width), dtype),
        )
        buffers = [torch.empty(shape, dtype=kind, device=device) for shape, kind in shapes]
        # Masked reads multiply stale rows by zero, so those must be finite.
        buffers[0].zero_()
        buffers[1].zero_()
        viewable = device.type == "cpu" and dtype != torch.bfloat16
        return LayerCache(*buffers, HostLayerCache(*(buffer.numpy() for buffer in buffers)) if viewable else None)

    @property
    def num_free_slots(self) -> int:
        """Slots that :meth:`acquire` can still give."""
        return len(self._free_slots)

    @property
    def num_free_pages(self) -> int:
        """Pages that :meth:`reserve` can still give."""
        return len(self._free_pages)

    @property
    def bytes_in_use(self) -> int:
        """Bytes of the slots and pages that are held."""
        num_pages = self.num_pages - len(self._free_pages)
        return len(self._pages) * self.layout.bytes_per_slot + num_pages * self.layout.bytes_per_page

    def acquire(self) -> int:
        """A slot for a new request, with no pages yet. The caller has checked that one is free."""
        slot = self._free_slots.pop()
        self._pages[slot] = []
        return slot

    def num_missing(self, slot: int, num_tokens: int) -> int:
        """Pages that ``slot`` lacks for its first ``num_tokens`` tokens."""
        return max(self.layout.pages_for(num_tokens) - len(self._pages[slot]), 0)

    def reserve(self, slot: int, num_tokens: int) -> bool:
        """Give ``slot`` pages for its first ``num_tokens`` tokens; False, changing nothing, if there are too few."""
        missing = self.num_missing(slot, num_tokens)
        if missing > len(self._free_pages):
            return False
        if missing:
            self.share(slot, [self._free_pages.pop() for _ in range(missing)])
        return True

    def share(self, slot: int, pages: list[int]) -> None:
        """Append ``pages``, which others may hold too, to those of ``slot``. Shared pages must be full."""
        held = self._pages[slot]
        assert len(held) + len(pages) <= self.page_table.shape[1], (slot, len(held), len(pages), self.page_table.shape)
        self.page_table[slot, len(held) : len(held) + len(pages)] = torch.tensor(
            pages, dtype=torch.int32, device=self.page_table.device
        )
        held += pages
        for page in pages:
            self.hold(page)

    def keep_path(self, slots: Sequence[int], places: Sequence[int], positions: Sequence[int]) -> None:
        """Put rows that were kept at ``places`` [M] of ``slots`` [M], behind their tokens as nodes of a tree, at their
        ``positions`` [M]; for layers with an entry a token."""
        table = torch.tensor([slots, places, positions], dtype=torch.int64, device=self.page_table.device)
        size = self.layout.page_tokens
        source, target = (entry_rows(self.page_table, table[0], table[i], size) for i in (1, 2))
        for layer in self.layers:
            for pool in (layer.entries.flatten(0, 1), layer.index_entries.flatten(0, 1)):
                if pool.numel():
                    pool[target] = pool[source]

    def page(self, slot: int, index: int) -> int:
        """The page of ``slot`` that holds its tokens from ``index * page_tokens`` on."""
        return self._pages[slot][index]

    def hold(self, page: int) -> None:
        """Keep ``page`` from becoming free until :meth:`drop`."""
        self._holders[page] += 1

    def drop(self, page: int) -> None:
        """Undo one :meth:`hold`; contents need no clearing."""
        self._holders[page] -= 1
        assert self._holders[page] >= 0, f"page {page} was dropped more often than held"
        if not self._holders[page]:
            self._free_pages.append(page)

    def release(self, slot: int) -> None:
        """Take back a slot and its pages."""
        for page in reversed(self._pages.pop(slot)):
            self.drop(page)
        self._free_slots.append(slot)


def pages_within(layouts: Sequence[CacheLayout], num_slots: int, num_snapshots: int, num_bytes: int) -> int:
    """Pages of a cache of ``num_bytes`` on every stage of a pipeline, beside the rings of ``num_slots`` requests and
    ``num_snapshots`` saved ones.

    All stages have as many, so the one with the largest decides. Raises ``ValueError`` if there is not even one.
    """
    rings = [num_slots * layout.bytes_per_slot + num_snapshots * layout.bytes_per_snapshot for layout in layouts]
    sizes = [(taken, layout.bytes_per_page) for taken, layout in zip(rings, layouts) if layout.bytes_per_page]
    num_pages = min(((num_bytes - taken) // page for taken, page in sizes), default=0)
    if sizes and num_pages < 1:
        least = max(taken + page for taken, page in sizes)
        raise ValueError(
            f"--cache-bytes is {num_bytes}, but one page and the rings of {num_slots} requests (and {num_snapshots} "
            f"saved ones) take {least} bytes a rank; give at least that, or lower --max-running"
        )
    return num_pages
