"""Progress of a load: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

from tqdm import tqdm


class LoadProgress:
    """Counts bytes; pass :meth:`update` as the ``progress`` of a reader. Use as a context manager.

    ``total`` is the expected number of bytes (``None``: unknown). On a terminal ``stream`` shows a bar with rate and
    remaining time; elsewhere a line at most every ``interval`` seconds and one at the end. ``enabled=False`` is silent,
    for the ranks that do not report.
    """

    def __init__(
        self, total: int | None, *, enabled: bool = True, stream: TextIO | None = None, interval: float = 5.0
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total, self._enabled, self._interval = total, enabled, interval
        self._done, self._begin = 0, time.monotonic()
        self._last = self._begin
        self._bar: tqdm | None = None
        if enabled and self._stream.isatty():
            self._bar = tqdm(
                total=total, desc="loading weights", unit="B", unit_scale=True, unit_divisor=1024, file=self._stream
            )

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._enabled and kind is None:
            self._line("loaded weights")

    def update(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more."""
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif self._enabled and time.monotonic() - self._last >= self._interval:
            self._line("loading weights")

    def _line(self, what: str) -> None:
        self._last = time.monotonic()
        seconds = max(self._last - self._begin, 1e-9)
        share = "" if not self._total else f" of {self._total / 2**20:,.1f}"
        rate = self._done / 2**20 / seconds
        print(f"{what}: {self._done / 2**20:,.1f}{share} MiB in {seconds:.1f} s, {rate:,.1f} MiB/s", file=self._stream)
