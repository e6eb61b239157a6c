"""Progress of long work: a bar on a terminal, a plain line every few seconds elsewhere, nothing on other ranks.

Whoever does the work takes a :data:`ProgressFactory` and knows nothing about terminals.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from tqdm import tqdm


class Progress(Protocol):
    """One piece of work under way."""

    def update(self, count: int) -> None:
        """``count`` more units are done."""
        ...

    def close(self) -> None:
        """The work ended, finished or not."""
        ...


ProgressFactory = Callable[[str, int, str], Progress]
"""``(description, total, unit) -> Progress``; the total is in units such as ``"B"``, ``"tok"``, ``"req"``."""


class Silent:
    """Shows nothing."""

    def update(self, count: int) -> None:
        """See :class:`Progress`."""

    def close(self) -> None:
        """See :class:`Progress`."""


class Lines:
    """A line now and then, for logs and files: what is done, the rate, the remaining time."""

    def __init__(
        self,
        description: str,
        total: int,
        unit: str,
        *,
        every: float = 5.0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._description, self._total, self._unit = description, total, unit
        self._every, self._stream, self._clock = every, stream or sys.stderr, clock
        self._start = self._last = clock()
        self._done = 0

    def update(self, count: int) -> None:
        """See :class:`Progress`."""
        self._done += count
        now = self._clock()
        if now - self._last >= self._every:
            self._last = now
            self._write(now)

    def close(self) -> None:
        """See :class:`Progress`; says how it ended if it took long enough to have said anything."""
        now = self._clock()
        if now - self._start >= self._every:
            self._write(now)

    def _write(self, now: float) -> None:
        rate = self._done / max(now - self._start, 1e-9)
        share = f" ({100 * self._done / self._total:.0f} %)" if self._total else ""
        left = f", {max(self._total - self._done, 0) / rate:.0f} s left" if rate and self._total else ""
        sizes = f"{_short(self._done)}/{_short(self._total)} {self._unit}"
        print(
            f"{self._description}: {sizes}{share}, {_short(rate)} {self._unit}/s{left}", file=self._stream, flush=True
        )


def _short(number: float) -> str:
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 10 * factor:
            return f"{number / factor:.1f}{letter}"
    return f"{number:.0f}" if number >= 10 or number == int(number) else f"{number:.2f}"


def silent(description: str, total: int, unit: str) -> Progress:
    """A :data:`ProgressFactory` for ranks that print nothing."""
    return Silent()


def shown(description: str, total: int, unit: str) -> Progress:
    """A :data:`ProgressFactory` for stderr: a bar on a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        return Lines(description, total, unit)
    return tqdm(desc=description, total=total, unit=unit, unit_scale=True, leave=False, dynamic_ncols=True)
