"""One job at a time beside the engine's loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """``work()`` on a thread of its own, started at once. The thread does not keep the process alive."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._result: T | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:  # whatever it is, the loop goes on and says so
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    @property
    def error(self) -> Exception | None:
        """What it raised, once it is done."""
        return self._error

    def result(self) -> T:
        """What it returned; waits for it. Raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result
