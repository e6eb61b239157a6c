"""The experts of a job, step by step: the target's and the draft's are counted, recorded and balanced alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...layers.moe import MoE
from ...parallel.groups import Group, Groups
from ..engine_config import EngineConfig
from .balancer import BalanceOptions, Balancer
from .counts import PickCounter, WindowFile
from .placement import ExpertLinks, ExpertPlacements, PlacedExperts

DEFAULT_WINDOW = 100
"""Steps of a window where nothing else is said."""


@dataclass(frozen=True)
class ExpertSet:
    """The experts of one model. ``counter``: None on a pipeline stage without its layers; ``balancer``: None there and
    where nothing moves; ``file``: None unless its loads are recorded."""

    counter: PickCounter | None
    balancer: Balancer | None
    file: WindowFile | None


class ExpertKeeper:
    """Closes windows of ``interval`` steps (None: ``DEFAULT_WINDOW``), after each of which experts may move.

    All calls are made on every rank of the job, at the same steps. ``tp``: this rank's tensor group.
    """

    def __init__(self, sets: Sequence[ExpertSet], tp: Group, interval: int | None) -> None:
        self.sets, self._tp, self._window = sets, tp, interval or DEFAULT_WINDOW
        self._steps, self._paused = 0, False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Steps inside do not count and nothing is moved: warm-up."""
        self._paused = True
        yield
        self._paused = False
        for one in self.sets:
            if one.counter is not None:
                one.counter.discard()

    def after_step(self, has_work: bool) -> None:
        """A step ended; ``has_work``: whether more will follow. Collective over the job."""
        if self._paused:
            return
        self._steps += 1
        is_full = self._steps == self._window
        for one in self.sets:
            if one.counter is not None:
                one.counter.end_step()
            if one.balancer is not None:
                one.balancer.after_step()
            if is_full or not has_work:
                self._close_window(one, is_full)
            if one.file is not None and not has_work:
                one.file.wait()
        if is_full or not has_work:
            self._steps = 0

    def _close_window(self, one: ExpertSet, is_full: bool) -> None:
        window = one.counter.close() if one.counter is not None else None
        if one.file is not None and self._tp.rank == 0:
            one.file.add(window)
        if one.balancer is not None and is_full:
            one.balancer.consider(None if window is None else window.load)


def make_keeper(
    config: EngineConfig,
    groups: Groups,
    links: ExpertLinks,
    placements: ExpertPlacements,
    layers: tuple[Sequence[MoE], Sequence[MoE]],
) -> ExpertKeeper | None:
    """What ``config`` wants done with the expert ``layers`` of this rank, the target's and the draft's; or None.

    Without ``links`` nothing moves.
    """
    if config.eplb_interval is None and config.eplb_record is None and config.eplb_draft_record is None:
        return None
    names, paths = ("target", "draft"), (config.eplb_record, config.eplb_draft_record)
    sets = []
    for name, path, placed, own, group in zip(names, paths, placements, layers, links or (None, None)):
        if placed is not None:
            file = None if path is None else WindowFile(path, groups.pp, placed.by_stage, placed.placement.shape)
            sets.append(_make_set(name, config, groups, group, placed, own, file))
    return ExpertKeeper(sets, groups.tp, config.eplb_interval)


def _make_set(
    name: str,
    config: EngineConfig,
    groups: Groups,
    beside: Group | None,
    placed: PlacedExperts,
    layers: Sequence[MoE],
    file: WindowFile | None,
) -> ExpertSet:
    if not layers:
        return ExpertSet(None, None, file)
    live = placed.of_stage(groups.pp.rank)
    counter = PickCounter([layer.slots for layer in layers], live, groups.tp)
    options = BalanceOptions(
        config.eplb_threshold, config.eplb_target, config.eplb_max_moves, config.eplb_layers_per_step
    )
    balancer = beside and Balancer(name, layers, live, counter, groups.tp, beside, options)
    return ExpertSet(counter, balancer, file)
