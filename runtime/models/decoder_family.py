"""What all plain decoders have in common as a :class:`.base.Family`: their cuts, and how they are built.

A model's own file reads its config.
"""

from __future__ import annotations

from typing import Any

import torch

from ...comm.dispatch import DispatchOptions
from ...layers.attention.plan import CacheRows
from ...layers.kernels import Kernels
from ...layers.moe import MoESizes
from ...layers.params import ParamSource
from ...parallel.groups import Groups
from ...parallel.topology import Topology
from ..balance.placement import PlacedExperts
from ..checkpoint.config_keys import ConfigKeys
from .base import STANDARD, TapKind
from .decoder import Decoder
from .decoder_config import DecoderConfig
from .demands import expert_demand, indivisible, shared_demand


class DecoderFamily:
    """See :class:`.base.Family`; a model adds :meth:`read`."""

    @classmethod
    def read(cls, keys: ConfigKeys, generation: dict[str, Any] | None) -> DecoderConfig:
        """The config; every key is read or refused."""
        raise NotImplementedError

    @classmethod
    def read_config(cls, config: dict[str, Any], generation: dict[str, Any] | None) -> DecoderConfig:
        """See :meth:`.base.Family.read_config`."""
        return cls.read(ConfigKeys(config, "config.json"), generation)

    @classmethod
    def cache_rows(cls, config: DecoderConfig, num_ranks: int) -> tuple[CacheRows, ...]:
        """See :meth:`.base.Family.cache_rows`."""
        return tuple(sizes.cache(num_ranks) for sizes in config.attention)

    @classmethod
    def draft_cache_rows(cls, config: DecoderConfig, num_ranks: int) -> tuple[CacheRows, ...]:
        """See :meth:`.base.Family.draft_cache_rows`."""
        return (config.attention[-1].cache(num_ranks),) * config.num_draft_stages

    @classmethod
    def problems(cls, config: DecoderConfig, topology: Topology, all_to_all: bool, redundant: int = 0) -> list[str]:
        """See :meth:`.base.Family.problems`."""
        found = dict.fromkeys(problem for one in config.attention for problem in one.problems(topology.attn_tp))
        demands = []
        for ffn in config.ffn:
            if isinstance(ffn, MoESizes):
                demands += [
                    expert_demand("n_routed_experts", ffn.num_experts, redundant, topology),
                    ("moe_intermediate_size", ffn.width, "moe_tp", topology.moe_tp),
                    shared_demand(ffn.width, topology, all_to_all),
                ]
            else:
                demands.append(("intermediate_size", ffn.width, "attn_tp", topology.attn_tp))
        found |= dict.fromkeys(indivisible(demands))
        if topology.ep > 1 and config.routed is None:
            found[f"ep = {topology.ep}, but the model has no experts"] = None
        return list(found)

    @classmethod
    def layer_labels(cls, config: DecoderConfig) -> tuple[str, ...]:
        """See :meth:`.base.Family.layer_labels`."""
        return tuple(sizes.label for sizes in config.attention)

    @classmethod
    def build(
        cls,
        config: DecoderConfig,
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
    ) -> Decoder:
        """See :meth:`.base.Family.build`; there is one stream, so ``tap_kind`` makes no difference."""
        return Decoder(config, source, groups, kernels, max_context, device, tap_layers, dtype, dispatch, experts)
