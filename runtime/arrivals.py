"""When requests come: all at once, or spread over time as independent users would send them (Poisson traffic)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from ..comm.collectives import broadcast
from ..parallel.groups import Group


def poisson_times(num_requests: int, rate: float, seed: int) -> list[float]:
    """Seconds at which requests come, ``rate`` a second on average: exponential gaps, the same for the same ``seed``.

    Raises ``ValueError`` for a rate that is not above 0.
    """
    if not 0 < rate < float("inf"):
        raise ValueError(f"--arrival-rate is {rate:g}; give requests a second, more than 0")
    gaps = np.random.default_rng(seed).exponential(1 / rate, num_requests)
    return np.cumsum(gaps).tolist()


class Arrivals(Protocol):
    """Tells how many of the requests have come."""

    def count(self, is_idle: bool) -> int:
        """Requests that have come by now, in order, the same on every rank. Where nothing runs (``is_idle``) it may
        wait for one. Collective over the job."""
        ...


class AtOnce:
    """All requests are there from the start."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests

    def count(self, is_idle: bool) -> int:
        """See :class:`Arrivals`."""
        return self._num_requests


class Timed:
    """Requests come at ``times`` (ascending seconds after the first question) by the clock of the first rank, which
    tells ``on_come`` the index of each and the clock when it came."""

    def __init__(
        self,
        times: Sequence[float],
        world: Group,
        device: torch.device,
        on_come: Callable[[int, float], None] = lambda index, at: None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._times, self._world, self._device, self._on_come = np.asarray(times), world, device, on_come
        self._clock, self._sleep = clock, sleep
        self._start: float | None = None
        self._count = 0

    def count(self, is_idle: bool) -> int:
        """See :class:`Arrivals`."""
        before = self._count
        if self._world.rank == 0:
            self._count = self._look(is_idle)
            for index in range(before, self._count):
                self._on_come(index, self._came_at(index))
        told = torch.tensor([self._count], dtype=torch.int64, device=self._device)
        self._count = int(broadcast(told, self._world).item())
        return self._count

    def _came_at(self, index: int) -> float:
        return self._start + float(self._times[index])

    def _look(self, is_idle: bool) -> int:
        if self._start is None:
            self._start = self._clock()
        if is_idle and self._count < len(self._times):
            wait = self._came_at(self._count) - self._clock()
            if wait > 0:
                self._sleep(wait)
            return max(self._due(), self._count + 1)
        return self._due()

    def _due(self) -> int:
        return int(np.searchsorted(self._times, self._clock() - self._start, side="right"))
