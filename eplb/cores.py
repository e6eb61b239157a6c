"""The two implementations of the search: ``plain`` (numpy) and ``compiled`` (numba, the extra ``cpu``)."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Protocol

import numpy as np

from .plain.split import LevelOut, Several
from .rows import Rows
from .schedule import Effort


class Core(Protocol):
    """What a core offers; all give the same results."""

    def spread_copies(self, load: np.ndarray, num_slots: int, most: int) -> np.ndarray:
        """See ``plain/copies.py``."""

    def deal(self, share: np.ndarray, count: np.ndarray, num_gpus: int) -> np.ndarray:
        """See ``plain/deal.py``."""

    def refine(self, rows: Rows, goal: np.ndarray, nearly: np.ndarray, effort: Effort) -> None:
        """See ``plain/search.py``."""

    def search_copies(
        self, weight: np.ndarray, count: np.ndarray, limit: np.ndarray, most: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """See ``plain/pairs.py``."""

    def level_out(self, several: Several) -> LevelOut:
        """See ``plain/split.py``."""

    def flat_greedy(self, load: np.ndarray, num_slots: int, num_gpus: int) -> np.ndarray:
        """See ``baseline.py``."""


CORES = {"plain": ".plain", "compiled": ".compiled"}


def load_core(name: str = "auto") -> Core:
    """The core of that name; ``auto`` is the compiled one where numba is installed. ``ValueError`` for other names."""
    if name == "auto":
        name = "compiled" if importlib.util.find_spec("numba") else "plain"
    if name not in CORES:
        raise ValueError(f"unknown core {name!r}; there are auto, {', '.join(CORES)}")
    if name == "compiled" and not importlib.util.find_spec("numba"):
        raise ValueError("the compiled core needs numba: pip install 'dspark[cpu]', or use core='plain'")
    return importlib.import_module(CORES[name], __package__)


def warm_up(name: str = "auto") -> None:
    """Compile what is to be compiled, so that no later call waits for it: once per installation, half a minute at most.

    Results are kept on disk where a folder for them can be written.
    """
    from .balance import plan
    from .dispatch import ReplicaSplit

    load = np.arange(1.0, 65.0)[None] ** 2
    for num_redundant in (64, 128):
        placement = plan(load, 64, num_redundant=num_redundant, core=name)
    ReplicaSplit(placement, 0, name).weighted(np.full(64, 1000))
