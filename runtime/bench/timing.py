"""Taking times: a number of threads, alternating rounds, and a stopwatch that adds up what named functions take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


@contextlib.contextmanager
def on_threads(num_threads: int) -> Iterator[None]:
    """Inside, torch's operations and kernels that are bound use so many threads; outside, as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def waiter(device: torch.device) -> Callable[[], None]:
    """What to call before reading the clock, so that work given to ``device`` is finished."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def alternate(runs: Sequence[Callable[[], T]], num_rounds: int, tick: Callable[[int], None]) -> list[list[T]]:
    """Call every one of ``runs`` once a round, in turning order; their results, ``[run][round]``.

    ``tick(1)`` is called after each.
    """
    results: list[list[T]] = [[] for _ in runs]
    for number in range(num_rounds):
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        for i in order:
            results[i].append(runs[i]())
            tick(1)
    return results


class Stopwatch:
    """Adds up, by name, how often wrapped functions are called and how long that takes."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def wrap(self, name: str, function: Callable[..., T]) -> Callable[..., T]:
        """``function``, timed under ``name``; several functions may share a name."""
        self.seconds.setdefault(name, 0.0)
        self.calls.setdefault(name, 0)
        seconds, calls, wait, clock = self.seconds, self.calls, self._wait, time.perf_counter

        def timed(*args: object, **kwargs: object) -> T:
            start = clock()
            result = function(*args, **kwargs)
            wait()
            seconds[name] += clock() - start
            calls[name] += 1
            return result

        return timed

    def take(self) -> dict[str, tuple[int, float]]:
        """Calls and seconds by name since the last time; starts again from zero."""
        taken = {name: (self.calls[name], self.seconds[name]) for name in self.seconds}
        for name in taken:
            self.calls[name], self.seconds[name] = 0, 0.0
        return taken
