"""Which DP rank gets a request, where prefixes are kept: the lightest, of which a known prefix is worth its tokens.

Each DP rank keeps its own prefixes, but every rank knows every prompt and where it went. So all of them can remember
which rank has had which pages, without a word between them and alike. What a rank has dropped since is remembered for
as long as its share of ``num_pages``; a wrong guess costs a prefill and nothing else.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from .scheduler import lightest


class PrefixHomes:
    """Remembers the last ``num_pages`` pages of prompts for each of ``num_ranks`` DP ranks. Pages are known by a digest
    of all tokens up to their end."""

    def __init__(self, page_tokens: int, num_pages: int, num_ranks: int) -> None:
        self._page_tokens, self._num_pages = page_tokens, num_pages
        self._pages: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_ranks)]

    def place(self, prompt: Sequence[int], loads: Sequence[tuple[int, int]]) -> int:
        """The DP rank for ``prompt``, which is then known there. ``loads``: tokens and requests of each rank."""
        digests = list(self._digests(prompt))
        credited = [
            (num_tokens - self._num_known(pages, digests) * self._page_tokens, num_requests)
            for pages, (num_tokens, num_requests) in zip(self._pages, loads)
        ]
        home = lightest(credited)
        pages = self._pages[home]
        for digest in digests:
            pages[digest] = None
            pages.move_to_end(digest)
        while len(pages) > self._num_pages:
            pages.popitem(last=False)
        return home

    def _digests(self, prompt: Sequence[int]) -> Iterator[bytes]:
        """Of each full page before the last token, which is always computed."""
        size, digest = self._page_tokens, b""
        for end in range(size, len(prompt), size):
            page = np.asarray(prompt[end - size : end], dtype="<i8")
            digest = hashlib.blake2b(digest + page.tobytes(), digest_size=16).digest()
            yield digest

    @staticmethod
    def _num_known(pages: OrderedDict[bytes, None], digests: Sequence[bytes]) -> int:
        return next((i for i, digest in enumerate(digests) if digest not in pages), len(digests))
