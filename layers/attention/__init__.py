"""Attention kinds: one file each, and one line in the table.

A kind is a class ``(source, sizes, rope, group, kernels, layer)`` with ``stages(x, cache, plan, start_sum, probe)``,
and sizes that say what a layer keeps (``cache``), how it may be cut (``problems``) and what it costs (``operations``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol

import torch

from ...comm.collectives import Pending
from ...parallel.groups import Group
from ..kernels import Kernels
from ..params import Scope
from ..probe import Probe
from ..rope import RopeTable
from ..stages import Stages
from .plan import AttentionPlan, CacheRows, LayerCache

# kind -> "module:class" below this package
ATTENTION_KINDS: dict[str, str] = {
    "gqa": "gqa:GQAttention",
    "mla": "mla:MLAttention",
    "dsa": "dsa:DSAttention",
    "nsa": "nsa:NSAttention",
    "injected": "injected:InjectedAttention",
}


class AttentionSizes(Protocol):
    """Sizes of one attention layer; hashable and comparable."""

    kind: str
    """A key of :data:`ATTENTION_KINDS`."""

    @property
    def label(self) -> str:
        """What people call it."""
        ...

    @property
    def num_heads(self) -> int:
        """Query heads of all ranks."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Key heads that are cut over ranks; 1 where all heads share one."""
        ...

    @property
    def head_dim(self) -> int:
        """Channels of a query head."""
        ...

    @property
    def rope_dim(self) -> int:
        """Rotated channels."""
        ...

    def cache(self, num_ranks: int) -> CacheRows:
        """What each of ``num_ranks`` ranks that share the heads keeps."""
        ...

    def keys_read(self, context: int) -> int:
        """Keys that a token behind ``context`` positions attends to; one that two parts of a kind read counts twice,
        and an indexer's do not count."""
        ...

    def operations(self, context: int) -> int:
        """Multiplications and additions that depend on the context, of one token behind ``context`` positions."""
        ...

    def problems(self, num_ranks: int) -> list[str]:
        """What keeps the layer from being cut over ``num_ranks`` ranks, with both numbers each."""
        ...


class Attention(Protocol):
    """One attention layer on this rank."""

    def stages(
        self,
        x: torch.Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        start_sum: Callable[[torch.Tensor], Pending],
        probe: Probe,
    ) -> Stages[torch.Tensor]:
        """Normed rows [T, D] -> what ``start_sum`` makes of this rank's summand [T, D]: the sum over the group, of all
        rows or some. Collective; yields while that sum is in flight. Stores what the layer keeps of the step's rows in
        the cache."""
        ...


def make_attention(
    source: Scope, sizes: AttentionSizes, rope: RopeTable, group: Group, kernels: Kernels, layer: int
) -> Attention:
    """The layer of ``sizes``, cut over ``group``."""
    module, _, name = ATTENTION_KINDS[sizes.kind].partition(":")
    return getattr(importlib.import_module(f".{module}", __name__), name)(source, sizes, rope, group, kernels, layer)
