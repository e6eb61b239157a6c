"""What a rank is doing and which collectives it called last, for whoever has to say why a job stopped."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

LENGTH = 16


class Entry(NamedTuple):
    """A collective that was called: its place among all of this rank and among those of its group, and its payload."""

    number: int
    group: str
    number_in_group: int
    op: str
    num_bytes: int

    def __str__(self) -> str:
        return f"#{self.number} {self.op} over {self.group} (its {self.number_in_group}.), {self.num_bytes} bytes"


class Journal:
    """The last :data:`LENGTH` collectives of one rank and what they were called for.

    One thread writes, others may read at any time. ``count`` grows with every entry and every change of ``doing``,
    at the time ``changed`` of the monotonic clock; ``in_step`` says that this should go on.
    """

    __slots__ = ("count", "changed", "doing", "in_step", "_number", "_in_group", "_ring", "_num_steps", "_warms_up")

    def __init__(self) -> None:
        self.count, self.doing, self.in_step = 0, "starting", False
        self.changed = time.monotonic()
        self._number, self._num_steps, self._warms_up = 0, 0, False
        self._in_group: dict[str, int] = {}
        self._ring: list[Entry | None] = [None] * LENGTH

    def note(self, group: str, op: str, num_bytes: int) -> None:
        """A collective ``op`` over ``group`` is about to be called."""
        number = self._in_group[group] = self._in_group.get(group, 0) + 1
        self._number += 1
        self._ring[self._number % LENGTH] = Entry(self._number, group, number, op, num_bytes)
        self.count += 1
        self.changed = time.monotonic()

    def begin(self, doing: str) -> None:
        """Something else begins that may take any time."""
        self.doing = doing
        self.count += 1
        self.changed = time.monotonic()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step of the model, in which something has to happen all the time."""
        self._num_steps += 1
        self.begin(f"step {self._num_steps}")
        self.in_step = not self._warms_up
        try:
            yield
        finally:
            self.in_step = False
            self.begin(f"after step {self._num_steps}")

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        """Steps inside compile kernels, which takes minutes on a busy machine: nothing has to happen in them."""
        self._warms_up = True
        try:
            yield
        finally:
            self._warms_up = False

    def entries(self) -> list[Entry]:
        """The last collectives, oldest first."""
        return sorted(entry for entry in list(self._ring) if entry is not None)

    def last(self) -> str:
        """What this rank does and its last collective, on one line."""
        entry = self._ring[self._number % LENGTH]
        return self.doing if entry is None else f"{self.doing}, {entry}"
