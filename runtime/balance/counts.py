"""How many picks the experts of some layers got, step by step, added over the ranks into windows, and their file.

Every row of a forward is counted once, by the rank that routes it: rows to verify like all others, padding and rows of
warm-up never. Counts stay on the device until a window closes or a layer's map changes.

Legend: L layers here, E experts, P slots of all ranks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from ...comm.collectives import all_gather_v, all_reduce
from ...eplb.loads import LoadRecorder, Window, write_windows
from ...eplb.placement import Placement
from ...eplb.shape import Shape
from ...layers.expert_slots import ExpertSlots
from ...parallel.groups import Group
from .background import Background

log = logging.getLogger(__name__)

NUM_WINDOWS = 16
"""Windows that are kept, the latest."""


class PickCounter:
    """The counts of one pipeline stage; windows exist on the first rank of its tensor group ``tp``."""

    def __init__(self, maps: Sequence[ExpertSlots], placement: Placement, tp: Group) -> None:
        self._maps, self._tp = maps, tp
        self._recorder = LoadRecorder(placement, num_windows=1) if tp.rank == 0 else None
        for one in maps:
            one.count_picks()

    def flush(self) -> None:
        """Add up what was counted since the last time. Collective over the tensor group."""
        picks = all_reduce(torch.stack([one.take_picks() for one in self._maps]), self._tp)
        if self._recorder is not None:
            for layer, tokens in enumerate(picks.cpu().numpy()):
                self._recorder.count(layer, tokens)

    def discard(self) -> None:
        """Forget what was counted since the last time."""
        for one in self._maps:
            one.take_picks()

    def end_step(self) -> None:
        """A step of the model ended."""
        if self._recorder is not None:
            self._recorder.end_step()

    def change_map(self, layer: int, slots: np.ndarray) -> None:
        """From now on ``layer`` counts under ``slots`` [P]; what was counted before must be flushed."""
        if self._recorder is not None:
            self._recorder.change_map(layer, slots)

    def close(self) -> Window | None:
        """The window that ends here, on the first rank. Collective over the tensor group."""
        self.flush()
        return self._recorder.close() if self._recorder is not None else None


class WindowFile:
    """The latest windows of all layers in one file, written by the first rank of the job, beside its steps.

    ``num_layers``: layers of each pipeline stage, of the shape ``shape``. Each write replaces the file whole.
    """

    def __init__(self, path: str, pp: Group, num_layers: Sequence[int], shape: Shape) -> None:
        self._path, self._pp, self._num_layers = path, pp, list(num_layers)
        self._widths = [shape.num_experts, shape.num_slots, shape.num_slots, 1, 1, 1]
        self._windows: deque[Window] = deque(maxlen=NUM_WINDOWS)
        self._writing: Background[None] | None = None

    def add(self, window: Window | None) -> None:
        """Add the stages' windows of the same steps; None where a stage has no such layers.

        Collective over the pipeline, on the first ranks of its stages.
        """
        table = np.zeros((0, sum(self._widths)), np.int64)
        if window is not None:
            steps = np.full(len(window.load), window.num_steps)
            ends = (window.first_version, window.map_version, steps)
            table = np.hstack([window.load, window.physical, window.slots, *(column[:, None] for column in ends)])
        whole = all_gather_v(torch.from_numpy(table), self._pp, self._num_layers).numpy()
        if self._pp.rank == 0:
            load, physical, slots, first, last, steps = np.split(whole, np.cumsum(self._widths)[:-1], axis=1)
            self._windows.append(Window(load, physical, slots, first[:, 0], last[:, 0], int(steps[0, 0])))
            self._write()

    def _write(self) -> None:
        self.wait()
        windows = tuple(self._windows)
        self._writing = Background(lambda: write_windows(self._path, windows), "expert loads")

    def wait(self) -> None:
        """Return once the file is written; a failure is logged."""
        if self._writing is not None:
            try:
                self._writing.result()
            except OSError as error:
                log.warning("expert loads were not written: %s", error)
            self._writing = None
