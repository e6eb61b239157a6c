"""DeepSeek-V4 as a :class:`.base.Family`."""

from __future__ import annotations

from typing import Any

import torch

from ...comm.dispatch import DispatchOptions
from ...layers.attention.plan import CacheRows
from ...layers.kernels import Kernels
from ...layers.params import ParamSource
from ...parallel.groups import Groups
from ...parallel.topology import Topology
from ..balance.placement import PlacedExperts
from ..checkpoint.config_file import model_config_from_dict
from ..model_config import ModelConfig
from .base import STANDARD, TapKind
from .deepseek_v4 import DeepseekV4, attention_sizes, draft_stage_sizes
from .demands import expert_demand, indivisible, shared_demand


class DeepseekV4Family:
    """See :class:`.base.Family`."""

    @classmethod
    def read_config(cls, config: dict[str, Any], generation: dict[str, Any] | None) -> ModelConfig:
        """See :meth:`.base.Family.read_config`."""
        return model_config_from_dict(config, generation)

    @classmethod
    def cache_rows(cls, config: ModelConfig, num_ranks: int) -> tuple[CacheRows, ...]:
        """See :meth:`.base.Family.cache_rows`: the one key head is on every rank."""
        return tuple(attention_sizes(config, layer) for layer in range(config.num_layers))

    @classmethod
    def draft_cache_rows(cls, config: ModelConfig, num_ranks: int) -> tuple[CacheRows, ...]:
        """See :meth:`.base.Family.draft_cache_rows`."""
        return (draft_stage_sizes(config)[0],) * config.num_draft_stages

    @classmethod
    def problems(cls, config: ModelConfig, topology: Topology, all_to_all: bool, redundant: int = 0) -> list[str]:
        """See :meth:`.base.Family.problems`."""
        demands = (
            ("num_attention_heads", config.num_heads, "attn_tp", topology.attn_tp),
            ("o_groups", config.o_groups, "attn_tp", topology.attn_tp),
            expert_demand("n_routed_experts", config.num_experts, redundant, topology),
            ("moe_intermediate_size", config.moe_intermediate_size, "moe_tp", topology.moe_tp),
            shared_demand(config.moe_intermediate_size, topology, all_to_all),
        )
        return indivisible(demands)

    @classmethod
    def layer_labels(cls, config: ModelConfig) -> tuple[str, ...]:
        """See :meth:`.base.Family.layer_labels`."""
        return config.layer_kinds

    @classmethod
    def build(
        cls,
        config: ModelConfig,
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
    ) -> DeepseekV4:
        """See :meth:`.base.Family.build`."""
        sizes = (max_context, device, tap_layers, dtype, tap_kind, dispatch, experts)
        return DeepseekV4(config, source, groups, kernels, *sizes)
