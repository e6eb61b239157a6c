"""The model seam: what the engine and the drafts need of a model, and what a family of models offers.

Legend: T rows of a step, D hidden width, N rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch

from ...comm.dispatch import DispatchOptions
from ...comm.pipeline import StageLink
from ...layers.attention.plan import CacheRows
from ...layers.embedding import ParallelLMHead, VocabParallelEmbedding
from ...layers.kernels import Kernels
from ...layers.moe import MoE, MoESizes
from ...layers.params import ParamSource
from ...layers.probe import Probe, ignore
from ...parallel.groups import Groups
from ...parallel.topology import Topology
from ..balance.placement import PlacedExperts
from ..cache import Cache
from ..model_config import Config
from ..step import Step

TapKind = Literal["mean", "streams"]
"""What is tapped of a layer's output: the mean of its residual streams, or all of them; the same where there is one."""


class ModelOutput(NamedTuple):
    """``logits`` float32 [N, V], equal on every rank of the attention block. ``taps`` [T, width]: the mean of the
    streams after each tapped layer side by side, or all n streams of each, n D wide."""

    logits: torch.Tensor
    taps: torch.Tensor


STANDARD = DispatchOptions()


def placed(moe: MoESizes, experts: PlacedExperts | None, index: int) -> MoESizes:
    """``moe`` with the slots of one layer of ``experts``; ``index`` counts the layers that have some."""
    if experts is None:
        return moe
    return moe._replace(slots=tuple(experts.placement.slots[index].tolist()), copy_rule=experts.copy_rule)


class Model(Protocol):
    """A model on this rank: the layers of its pipeline stage.

    The first stage embeds, the last has the head; with tapped layers the last embeds too, for the draft.
    """

    config: Config
    is_first: bool
    is_last: bool
    embed: VocabParallelEmbedding
    head: ParallelLMHead
    dispatch: DispatchOptions
    expert_layers: tuple[MoE, ...]
    """Its layers with experts, in order."""

    def forward(self, step: Step, cache: Cache, probe: Probe = ignore) -> ModelOutput:
        """The whole forward of ``step`` on the only stage, without overlap. Collective."""
        ...

    def run_stage(
        self, steps: Sequence[Step], cache: Cache, link: StageLink, in_pieces: bool = False
    ) -> tuple[ModelOutput, ...] | None:
        """This rank's part of the forward of a step, or of both halves of one, which then take turns: receives from the
        stage before, sends to the next, and gives an output for each on the last stage. ``in_pieces``: experts send
        back results while they compute others. Collective over the stage's tensor group.

        Raises ``ValueError``, on every rank and before anything is sent, for more rows than a rank may send at once.
        """
        ...


class Family(Protocol):
    """A kind of model; never instantiated."""

    @classmethod
    def read_config(cls, config: dict[str, Any], generation: dict[str, Any] | None) -> Config:
        """The config from the parsed ``config.json`` and, if there is one, ``generation_config.json``.

        Raises ``ValueError`` naming the key on anything unknown, missing, contradictory or absurd.
        """
        ...

    @classmethod
    def cache_rows(cls, config: Config, num_ranks: int) -> tuple[CacheRows, ...]:
        """What each layer keeps on a rank of the ``num_ranks`` of an attention block."""
        ...

    @classmethod
    def draft_cache_rows(cls, config: Config, num_ranks: int) -> tuple[CacheRows, ...]:
        """The same for the draft that a checkpoint brings; empty without one."""
        ...

    @classmethod
    def problems(cls, config: Config, topology: Topology, all_to_all: bool, redundant: int = 0) -> list[str]:
        """What keeps ``config`` from being cut like ``topology``, with both numbers each; ``all_to_all``: whether rows
        travel to their experts; ``redundant``: slots of a layer beyond one per expert."""
        ...

    @classmethod
    def layer_labels(cls, config: Config) -> tuple[str, ...]:
        """What people call the attention of each layer."""
        ...

    @classmethod
    def build(
        cls,
        config: Config,
        source: ParamSource,
        groups: Groups,
        kernels: Kernels,
        max_context: int,
        device: torch.device,
        tap_layers: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        tap_kind: TapKind = "mean",
        dispatch: DispatchOptions = STANDARD,
        experts: PlacedExperts | None = None,
    ) -> Model:
        """The model on this rank, with room for ``max_context`` positions; ``tap_layers`` are handed to the draft;
        ``dispatch``: how rows reach their experts; ``experts``: where these are, one row for each layer that has any,
        None for whole blocks in order."""
        ...
