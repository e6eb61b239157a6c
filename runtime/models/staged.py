"""How a model's layers are run: one pipeline stage of a step, whole or as two half batches that take turns.

Legend: T rows of a step, t of them that layers outside attention work on here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch

from ...comm.dispatch import Dispatcher, DispatchOptions, Exchange, StepRows, make_dispatcher
from ...comm.pipeline import StageLink
from ...layers.moe import MoESizes
from ...layers.probe import Probe, ignore
from ...layers.stages import Stages, drain, interleave, stage_plan
from ...parallel.groups import Groups
from ..cache import Cache
from ..step import Step
from .base import STANDARD, ModelOutput

A = TypeVar("A")
"""The activations between two pipeline stages."""


def dispatcher_for(
    moe: MoESizes | None, options: DispatchOptions, groups: Groups, dtype: torch.dtype, device: torch.device
) -> Dispatcher:
    """What brings rows to the experts of ``moe``; one without use for a model that has none."""
    if moe is None:
        options, sizes = STANDARD, {"num_experts": groups.moe_ep.size, "top_k": 1, "hidden_size": 1}
    else:
        sizes = {"num_experts": moe.num_slots, "top_k": moe.top_k, "hidden_size": moe.hidden_size}
    return make_dispatcher(options, groups, **sizes, dtype=dtype, device=device)


class Part(NamedTuple):
    """A step, or half of one, and its rows between attention and experts."""

    step: Step
    exchange: Exchange


class Staged(Generic[A]):
    """The running half of a :class:`.base.Model`; a model adds its layers."""

    is_first: bool
    is_last: bool

    def __init__(
        self,
        moe: MoESizes | None,
        dispatch: DispatchOptions,
        groups: Groups,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._groups, self._dtype, self.dispatch = groups, dtype, dispatch
        self.is_first, self.is_last = groups.pp.rank == 0, groups.pp.rank == groups.pp.size - 1
        dispatcher = dispatcher_for(moe, dispatch, groups, dtype, device)
        self.dispatchers = (dispatcher, dispatcher.twin())

    def begin(self, part: Part) -> A:
        """The activations before the first layer, on the first stage. Collective over attn_tp."""
        raise NotImplementedError

    def stages(self, part: Part, cache: Cache, before: A, probe: Probe = ignore) -> Stages[A]:
        """This rank's layers as stages; the step's rows are stored in ``cache``. Collective."""
        raise NotImplementedError

    def finish(self, part: Part, last: A, probe: Probe = ignore) -> ModelOutput:
        """Logits of the wanted rows, on the last stage. Collective over attn_tp (and attn_cp where rows are split)."""
        raise NotImplementedError

    def pack(self, after: A) -> torch.Tensor:
        """Activations for the next stage as one tensor [t, :meth:`packed_width`]."""
        raise NotImplementedError

    def unpack(self, packed: torch.Tensor) -> A:
        """What the stage before packed."""
        raise NotImplementedError

    def packed_width(self) -> int:
        """Columns of what the stage before packs."""
        raise NotImplementedError

    def parts(self, steps: Sequence[Step], in_pieces: bool = False) -> list[Part]:
        """One or two steps made ready, each with a dispatcher of its own."""
        rows = [StepRows(step.counts, step.has_prefill, in_pieces, step.is_split) for step in steps]
        lanes = zip(steps, self.dispatchers, rows)
        return [Part(step, Exchange(self._groups, dispatcher, each)) for step, dispatcher, each in lanes]

    @torch.inference_mode()
    def forward(self, step: Step, cache: Cache, probe: Probe = ignore) -> ModelOutput:
        """See :meth:`.base.Model.forward`."""
        assert self.is_first and self.is_last, "a pipeline runs its stages one by one"
        (part,) = self.parts([step])
        return self.finish(part, drain(self.stages(part, cache, self.begin(part), probe)), probe)

    @torch.inference_mode()
    def run_stage(
        self, steps: Sequence[Step], cache: Cache, link: StageLink, in_pieces: bool = False
    ) -> tuple[ModelOutput, ...] | None:
        """See :meth:`.base.Model.run_stage`."""
        parts = self.parts(steps, in_pieces)
        before = [self.begin(part) for part in parts] if self.is_first else self._receive(parts, link)
        running = [self.stages(part, cache, x) for part, x in zip(parts, before)]
        if len(running) == 1:
            after = (drain(running[0]),)
        else:
            plan = stage_plan(steps[0].has_prefill, self._groups.attn_tp.size > 1)
            after = interleave(*running, plan)
        if self.is_last:
            return tuple(self.finish(part, x) for part, x in zip(parts, after))
        link.send(torch.cat([self.pack(x) for x in after]))
        return None

    def _receive(self, parts: Sequence[Part], link: StageLink) -> list[A]:
        """The parts' activations, which the stage before sent as one tensor."""
        num_rows = [part.exchange.count_own(part.step.tokens.shape[0]) for part in parts]
        shape = (sum(num_rows), self.packed_width())
        packed = link.receive(shape, self._dtype, parts[0].step.tokens.device)
        return [self.unpack(rows) for rows in packed.split(num_rows)]
