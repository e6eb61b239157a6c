"""Recording expert loads while a model runs: a ring of windows, each with the map that it was counted under.

Counts arrive per layer and step, for physical slots. They are added to the experts at once, by the map that the layer
has at that moment, so a map that changes in the middle of a window cannot misattribute anything.

Shapes: S windows, L layers, E experts, P slots.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .files.safe import read_npz, replacing
from .placement import Placement


@dataclass(frozen=True)
class Window:
    """What was counted in some steps.

    ``load`` [L, E] counts tokens of experts, ``physical`` [L, P] those of slots under the map that was in force last,
    ``slots`` [L, P]; both int64. ``map_version`` [L] numbers that map and ``first_version`` [L] the first one of the
    window: where they differ, ``physical`` holds only the part counted under the last.
    """

    load: np.ndarray
    physical: np.ndarray
    slots: np.ndarray
    first_version: np.ndarray
    map_version: np.ndarray
    num_steps: int


class LoadRecorder:
    """Counts tokens per layer into windows; keeps the last ``num_windows`` that were closed.

    The caller counts each token row once and leaves out warm-up and idle rows, or wraps those in :meth:`paused`.
    """

    def __init__(self, placement: Placement, num_windows: int = 16) -> None:
        if num_windows < 1:
            raise ValueError(f"num_windows is {num_windows}; it must be at least 1")
        self._slots = placement.slots.astype(np.int64)
        self._num_experts = placement.shape.num_experts
        self._version = np.zeros(placement.num_layers, np.int64)
        self._closed: deque[Window] = deque(maxlen=num_windows)
        self._paused = False
        self._open()

    def _open(self) -> None:
        self._load = np.zeros((len(self._slots), self._num_experts), np.int64)
        self._physical = np.zeros_like(self._slots)
        self._first = self._version.copy()
        self._num_steps = 0

    @property
    def num_steps(self) -> int:
        """Steps in the open window."""
        return self._num_steps

    @property
    def windows(self) -> tuple[Window, ...]:
        """The closed windows, oldest first."""
        return tuple(self._closed)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is counted inside: warm-up, graph capture, idle steps."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def count(self, layer: int, tokens: np.ndarray) -> None:
        """Add the ``tokens`` [P] that the slots of ``layer`` got in this step."""
        if self._paused:
            return
        tokens = np.asarray(tokens)
        if tokens.shape != self._slots[layer].shape:
            raise ValueError(f"layer {layer} has {self._slots.shape[1]} slots, but {list(tokens.shape)} counts came")
        if not np.issubdtype(tokens.dtype, np.integer) or (tokens < 0).any():
            raise ValueError(f"counts of layer {layer} must be whole and not negative: least {tokens.min()}")
        self._physical[layer] += tokens
        self._load[layer] += np.bincount(self._slots[layer], tokens, self._num_experts).astype(np.int64)

    def end_step(self) -> None:
        """A step of the model ended."""
        self._num_steps += not self._paused

    def change_map(self, layer: int, slots: np.ndarray) -> int:
        """From now on ``layer`` counts under ``slots`` [P]; returns the new version of its map."""
        slots = np.asarray(slots)
        if slots.shape != self._slots[layer].shape or set(slots.tolist()) != set(range(self._num_experts)):
            raise ValueError(
                f"a map of layer {layer} must give every one of {self._num_experts} experts a slot of "
                f"{self._slots.shape[1]}"
            )
        self._slots[layer] = slots
        self._physical[layer] = 0
        self._version[layer] += 1
        return int(self._version[layer])

    def close(self) -> Window:
        """Close the window, keep it in the ring and open the next one."""
        window = Window(
            self._load, self._physical, self._slots.copy(), self._first, self._version.copy(), self._num_steps
        )
        self._closed.append(window)
        self._open()
        return window

    def total(self, decay: float = 1.0) -> np.ndarray:
        """Loads of the closed windows together, [L, E] float64; each older window counts ``decay`` times the next."""
        total = np.zeros((len(self._slots), self._num_experts))
        for window in self._closed:
            total = total * decay + window.load
        return total

    def dump(self, path: str | pathlib.Path) -> None:
        """Write the closed windows as npz; ``read_loads`` reads its ``load`` [S, L, E]. Whole or not at all."""
        if not self._closed:
            raise ValueError("there is no closed window to dump yet")
        write_windows(path, self.windows)


FIELDS = ("load", "physical", "slots", "first_version", "map_version", "num_steps")


def write_windows(path: str | pathlib.Path, windows: Sequence[Window]) -> None:
    """Write at least one window as npz; ``read_loads`` reads its ``load`` [S, L, E]. Whole or not at all."""
    path = pathlib.Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"loads are dumped as .npz, not as {path.name!r}")
    arrays = {name: np.stack([np.asarray(getattr(window, name)) for window in windows]) for name in FIELDS}
    with replacing(path) as part:
        np.savez_compressed(part, **arrays)


def read_windows(path: str | pathlib.Path) -> tuple[Window, ...]:
    """The windows of a dump."""
    path = pathlib.Path(path)
    content = read_npz(path)
    missing = [name for name in FIELDS if name not in content]
    if missing:
        raise ValueError(f"{path} is no dump of recorded windows: it lacks {', '.join(missing)}")
    return tuple(
        Window(*(content[name][n] if name != "num_steps" else int(content[name][n]) for name in FIELDS))
        for n in range(len(content["load"]))
    )
