"""The rewindable cache: entries are addressed by (request slot, absolute position), so dropping tokens sets a length.

Legend: S request slots, R ring rows, P pages, m tokens per compressed entry.

A ring of R rows keeps, for every position p, row ``p % R``. A step of up to ``max_verify`` rows may be rolled back
completely; the rows it overwrote are then older than anything that is read again, because R is the reach of a reader
plus ``max_verify``. Compressed entries need no undo: how many a query sees follows from its position, and an entry is
computed anew when its window closes again. Entries live in pages of ``page_tokens`` tokens; the same page number is
used in every layer's pool, so one table serves all layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..layers.attention.plan import HostLayerCache, LayerCache
from ..layers.attention.v4 import V4AttentionSizes

MIN_PAGE_TOKENS = 256


@dataclass(frozen=True)
class CacheLayout:
    """Sizes of the cache of a stack of attention layers.

    ``max_verify``: rows of the widest step that may be rolled back (1 without a draft). ``spare_rows`` is added to
    every ring; it exists so that a test can make rings too small.
    """

    layers: tuple[V4AttentionSizes, ...]
    max_verify: int
    itemsize: int
    spare_rows: int = 0

    @property
    def ratios(self) -> tuple[int, ...]:
        """The compression ratios in use, each once."""
        return tuple(sorted({sizes.ratio for sizes in self.layers if sizes.ratio}))

    @property
    def page_tokens(self) -> int:
        """Tokens of a page: a multiple of every ratio, so that no window straddles pages."""
        unit = math.lcm(*self.ratios) if self.ratios else MIN_PAGE_TOKENS
        return unit * -(-MIN_PAGE_TOKENS // unit)

    def window_rows(self, sizes: V4AttentionSizes) -> int:
        """Ring rows of the sliding keys."""
        return sizes.window + self.max_verify + self.spare_rows

    def raw_rows(self, sizes: V4AttentionSizes) -> int:
        """Ring rows of the compressor inputs; 0 for kinds without a compressor."""
        return sizes.raw_span + self.max_verify + self.spare_rows if sizes.raw_span else 0

    def entry_width(self, sizes: V4AttentionSizes) -> int:
        """Numbers stored per compressed entry."""
        return {"sliding": 0, "hca": sizes.head_dim, "csa": sizes.head_dim + sizes.index_head_dim}[sizes.kind]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of all rings of one request, whatever its length."""
        numbers = sum(
            self.window_rows(sizes) * sizes.head_dim + self.raw_rows(sizes) * sizes.raw_width for sizes in self.layers
        )
        return numbers * self.itemsize

    @property
    def bytes_per_token(self) -> float:
        """Bytes of compressed entries per token of context."""
        return self.itemsize * sum(self.entry_width(sizes) / sizes.ratio for sizes in self.layers if sizes.ratio)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers."""
        return round(self.bytes_per_token * self.page_tokens)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens of one request; none if nothing is compressed."""
        return -(-num_tokens // self.page_tokens) if self.ratios else 0


class Cache:
    """Buffers of all layers, the page table, and which slots and pages are free.

    A request holds one slot from :meth:`acquire` to :meth:`release`, and pages from :meth:`reserve`. Memory of pools is
    touched page by page, so on the CPU it grows with use.
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
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._pages: dict[int, list[int]] = {}

    def _layer(
        self, sizes: V4AttentionSizes, num_slots: int, num_pages: int, device: torch.device, dtype: torch.dtype
    ) -> LayerCache:
        layout = self.layout
        per_page = layout.page_tokens // sizes.ratio if sizes.ratio else 0
        index_width = sizes.index_head_dim if sizes.kind == "csa" else 0
        shapes = (
            (num_slots, layout.window_rows(sizes), sizes.head_dim),
            (num_slots, layout.raw_rows(sizes), sizes.raw_width),
            (num_pages if per_page else 0, per_page, sizes.head_dim),
            (num_pages if index_width else 0, per_page, index_width),
        )
        buffers = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
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
        """Bytes of the slots and pages that requests hold."""
        num_pages = sum(len(pages) for pages in self._pages.values())
        return len(self._pages) * self.layout.bytes_per_slot + num_pages * self.layout.bytes_per_page

    def acquire(self) -> int:
        """A slot for a new request, with no pages yet. The caller has checked that one is free."""
        slot = self._free_slots.pop()
        self._pages[slot] = []
        return slot

    def reserve(self, slot: int, num_tokens: int) -> bool:
        """Give ``slot`` pages for its first ``num_tokens`` tokens; False, changing nothing, if there are too few."""
        held = self._pages[slot]
        missing = self.layout.pages_for(num_tokens) - len(held)
        if missing <= 0:
            return True
        if missing > len(self._free_pages):
            return False
        fresh = [self._free_pages.pop() for _ in range(missing)]
        self.page_table[slot, len(held) : len(held) + missing] = torch.tensor(
            fresh, dtype=torch.int32, device=self.page_table.device
        )
        held += fresh
        return True

    def release(self, slot: int) -> None:
        """Take back a slot and its pages; their contents need no clearing."""
        self._free_pages += reversed(self._pages.pop(slot))
        self._free_slots.append(slot)
