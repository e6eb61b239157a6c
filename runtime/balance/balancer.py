"""Keeps the experts of one model even while it runs: counts, plans, and moves weights a few layers at a time.

Every rank of a tensor group calls it after each step, and all that happens is decided for all of them at the same
step. The first rank plans, on a thread; the plan is broadcast. Weights travel on threads and on connections of their
own, batch by batch; when those of a few layers have come everywhere, their maps change on all ranks between two steps.
Until then, and wherever anything fails, the old map works on.

Legend: L layers here, E experts, P slots of all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ...comm.collectives import all_gather_ints, barrier, broadcast
from ...eplb.migrate import Arrivals, fetch
from ...eplb.moves import Transfer, keep_slots, transfers
from ...eplb.placement import Placement
from ...eplb.replan import replan
from ...layers.expert_slots import ExpertSlots
from ...parallel.groups import Group
from .background import Background
from .counts import PickCounter

log = logging.getLogger(__name__)

PENDING, READY, NOTHING, FAILED = 0, 1, 2, 3
PATIENCE = 200
"""Steps after which ranks that are still waited for are named in the log."""

Planner = Callable[[np.ndarray, Placement], Placement]
"""``(loads [L, E], live map) -> the map to move to``, possibly the live one."""


class ExpertLayer(Protocol):
    """A layer with experts. ``weights``: tensors [slots here, ...], all with one row a slot; written in place."""

    slots: ExpertSlots
    weights: Sequence[torch.Tensor]

    def use_slots(self, slots: Sequence[int]) -> None:
        """The slots of all ranks hold these experts, and weights were written accordingly."""
        ...


class BalanceOptions(NamedTuple):
    """A plan is made where the mean balance of the last window is below ``threshold``; it aims at the balance
    ``target`` in each layer and moves at most ``max_moves`` experts (None: as many as that takes).

    ``layers_per_step``: layers that move together. ``batch``: experts that a rank sends or receives at a time.
    """

    threshold: float = 1.0
    target: float = 0.98
    max_moves: int | None = None
    layers_per_step: int = 1
    batch: int = 2


def replanner(options: BalanceOptions) -> Planner:
    """Few moves from the live map, where the balance is below the threshold."""

    def plan(load: np.ndarray, live: Placement) -> Placement:
        if live.balance(load).mean() >= options.threshold:
            return live
        return replan(load, live, target=options.target, max_moves=options.max_moves).placement

    return plan


class Move(NamedTuple):
    """A migration under way: where it goes, the layers that still have to move in runs that move together, and the
    transfers of each layer."""

    target: Placement
    runs: list[list[int]]
    transfers: dict[int, list[Transfer]]


class Balancer:
    """See the module text. ``layers``: the expert layers of this rank, at least one, whose live map is ``placement``.

    ``counter`` counts their picks.
    ``tp``: the ranks that decide together; ``experts``: the ranks of the placement's GPUs, on connections that nothing
    else uses. ``name`` is for messages.
    """

    def __init__(
        self,
        name: str,
        layers: Sequence[ExpertLayer],
        placement: Placement,
        counter: PickCounter,
        tp: Group,
        experts: Group,
        options: BalanceOptions,
    ) -> None:
        self.name, self.live, self._layers, self._options = name, placement, layers, options
        self._counter, self._tp, self._experts = counter, tp, experts
        self.planner = replanner(options)
        self._planning: Background[Placement] | None = None
        self._is_planning, self._is_off, self._waited = False, False, 0
        self._move: Move | None = None
        self._fetching: Background[list[Arrivals]] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a plan is being made or weights are under way; the same on all ranks."""
        return self._is_planning or self._move is not None

    def after_step(self) -> None:
        """A step of the model ended. Collective over the tensor group."""
        if self._is_planning:
            self._poll_plan()
        elif self._move is not None:
            self._poll_move()

    def consider(self, load: np.ndarray | None) -> None:
        """Begin to plan for ``load`` [L, E], known on the first rank, unless something is under way."""
        if self.is_busy or self._is_off:
            return
        self._is_planning, self._waited = True, 0
        if self._tp.rank == 0:
            live = self.live
            self._planning = Background(lambda: keep_slots(live, self.planner(load, live)), f"plan of {self.name}")

    def _poll_plan(self) -> None:
        code = torch.zeros(1, dtype=torch.int64)
        if self._tp.rank == 0 and self._planning.is_done:
            code[0] = self._plan_code()
        code = int(broadcast(code, self._tp))
        if code == PENDING:
            return
        self._is_planning = False
        if code == READY:
            slots = torch.empty(self.live.slots.shape, dtype=torch.int32)
            if self._tp.rank == 0:
                slots.copy_(torch.from_numpy(np.array(self._planning.result().slots)))
            self._start(Placement(broadcast(slots, self._tp).numpy(), self.live.shape))
        self._planning = None

    def _plan_code(self) -> int:
        if self._planning.error is not None:
            log.warning(
                "planning the experts of the %s failed, the map stays as it is: %r", self.name, self._planning.error
            )
            return NOTHING
        return NOTHING if np.array_equal(self._planning.result().slots, self.live.slots) else READY

    def _start(self, target: Placement) -> None:
        changed = np.flatnonzero((target.slots != self.live.slots).any(1)).tolist()
        together = self._options.layers_per_step
        runs = [changed[i : i + together] for i in range(0, len(changed), together)]
        moves: dict[int, list[Transfer]] = {layer: [] for layer in changed}
        for transfer in transfers(self.live, target):
            moves[transfer.layer].append(transfer)
        everything = [transfer for layer in changed for transfer in moves[layer]]
        log.info(
            "experts of the %s: %d of %d layers change, %d experts move, %d of them to another node",
            self.name,
            len(changed),
            len(self._layers),
            len(everything),
            sum(transfer.crosses_node for transfer in everything),
        )
        self._move = Move(target, runs, moves)
        self._fetch()

    def _fetch(self) -> None:
        """Begin to bring the weights of the next run of layers."""
        move, live, group, device = self._move, self.live, self._experts, self._layers[0].weights[0].device
        run = move.runs[0]

        def work() -> list[Arrivals]:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # of this thread
            barrier(group)  # a backend may want everyone at the first exchange
            return [
                fetch(
                    move.transfers[layer],
                    live.slots[layer],
                    move.target.slots[layer],
                    self._layers[layer].weights,
                    group,
                    self._options.batch,
                )
                for layer in run
            ]

        self._waited = 0
        self._fetching = Background(work, f"experts of the {self.name}")

    def _poll_move(self) -> None:
        code = PENDING
        if self._fetching.is_done:
            code = READY if self._fetching.error is None else FAILED
        codes = [row[0] for row in all_gather_ints([code], self._tp, torch.device("cpu"))]
        if FAILED in codes:
            self._give_up(codes)
        elif PENDING in codes:
            self._waited += 1
            if self._waited == PATIENCE and self._tp.rank == 0:
                late = [self._tp.ranks[i] for i, one in enumerate(codes) if one == PENDING]
                log.warning("experts of the %s: still waiting for ranks %s; the old map works on", self.name, late)
        else:
            self._change_maps()

    def _give_up(self, codes: list[int]) -> None:
        if self._fetching.is_done and self._fetching.error is not None:
            log.warning("moving experts of the %s failed: %r", self.name, self._fetching.error)
        if self._tp.rank == 0:
            failed = [self._tp.ranks[i] for i, one in enumerate(codes) if one == FAILED]
            log.warning(
                "moving experts of the %s failed on ranks %s; the map stays as it is and is not changed any more",
                self.name,
                failed,
            )
        # Peers may still wait for what will not come, so these connections are not used again.
        self._move, self._fetching, self._is_off = None, None, True

    def _change_maps(self) -> None:
        """The weights of a run of layers are here on all ranks: use them from the next step on."""
        self._counter.flush()
        run, slots = self._move.runs.pop(0), np.array(self.live.slots)
        for layer, arrivals in zip(run, self._fetching.result()):
            slots[layer] = self._move.target.slots[layer]
            arrivals.put(self._layers[layer].weights)
            self._layers[layer].use_slots(slots[layer].tolist())
            self._counter.change_map(layer, slots[layer])
        self.live, self._fetching = Placement(slots, self.live.shape), None
        if self._move.runs:
            self._fetch()
        else:
            self._move = None
            log.info("experts of the %s have moved", self.name)
