"""What all plain decoders have in common as a :class:`.base.Family`: their tensors, their cuts, how they are built.

A model's own file reads its config and, where its attention has tensors of its own, names them.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from ...comm.dispatch import DispatchOptions
from ...eplb.placement import Placement
from ...layers.attention import AttentionSizes
from ...layers.attention.dsa import DSASizes
from ...layers.attention.gqa import GQASizes
from ...layers.attention.mla import MLASizes
from ...layers.attention.plan import CacheRows
from ...layers.kernels import Kernels
from ...layers.mlp import MLPSizes
from ...layers.moe import MoESizes
from ...layers.params import ParamSource
from ...parallel.groups import Groups
from ...parallel.topology import Topology
from ..checkpoint.config_keys import ConfigKeys
from ..checkpoint.spec import TensorSpec
from .base import STANDARD, TapKind
from .decoder import Decoder
from .decoder_config import DecoderConfig
from .demands import expert_demand, indivisible, shared_demand

Parts = dict[str, tuple[tuple[int, ...], str]]
"""Name below a layer -> shape and kind, see :class:`..checkpoint.spec.TensorSpec`."""

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


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
    def tensors(cls, config: DecoderConfig, with_draft: bool) -> dict[str, TensorSpec]:
        """See :meth:`.base.Family.tensors`."""
        hidden, vocab = config.hidden_size, config.vocab_size
        copy_of = "embed.weight" if config.tied else None
        specs = {
            "embed.weight": TensorSpec((vocab, hidden), "target", "plain"),
            "norm.weight": TensorSpec((hidden,), "target", "plain"),
            "head.weight": TensorSpec((vocab, hidden), "target", "plain", copy_of=copy_of),
        }
        for layer, (attention, ffn) in enumerate(zip(config.attention, config.ffn)):
            specs |= _named(f"layers.{layer}.", "target", block_parts(hidden, attention, ffn))
        for stage in range(config.num_draft_stages if with_draft else 0):
            parts = block_parts(hidden, config.attention[-1], config.ffn[-1]) | _prediction_parts(hidden)
            specs |= _named(f"mtp.{stage}.", "draft", parts)
            for name, original in (("embed.weight", "embed.weight"), ("shared_head.head.weight", "head.weight")):
                specs[f"mtp.{stage}.{name}"] = TensorSpec((vocab, hidden), "draft", "plain", copy_of=original)
        return specs

    @classmethod
    def rename(cls, name: str, config: DecoderConfig) -> str:
        """See :meth:`.base.Family.rename`: prediction layers are numbered on behind the target's."""
        found = _LAYER.fullmatch(name)
        stage = int(found.group(1)) - config.num_layers if found else -1
        if 0 <= stage < config.num_draft_stages:
            return f"mtp.{stage}.{found.group(2)}"
        return name

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
        experts: Placement | None = None,
    ) -> Decoder:
        """See :meth:`.base.Family.build`; there is one stream, so ``tap_kind`` makes no difference."""
        return Decoder(config, source, groups, kernels, max_context, device, tap_layers, dtype, dispatch, experts)


def _named(prefix: str, role: str, parts: Parts) -> dict[str, TensorSpec]:
    return {f"{prefix}{name}": TensorSpec(shape, role, kind) for name, (shape, kind) in parts.items()}


def block_parts(hidden: int, attention: AttentionSizes, ffn: MLPSizes | MoESizes) -> Parts:
    """The tensors of one layer."""
    parts: Parts = {"attn_norm.weight": ((hidden,), "plain"), "ffn_norm.weight": ((hidden,), "plain")}
    parts |= {f"attn.{name}": part for name, part in ATTENTION_PARTS[attention.kind](hidden, attention).items()}
    return parts | {f"ffn.{name}": part for name, part in _ffn_parts(hidden, ffn).items()}


def gqa_parts(hidden: int, sizes: GQASizes) -> Parts:
    """The tensors of one attention layer of the kind, below ``attn.``."""
    width, kv_width = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    parts: Parts = {
        "q_proj.weight": ((width, hidden), "linear"),
        "k_proj.weight": ((kv_width, hidden), "linear"),
        "v_proj.weight": ((kv_width, hidden), "linear"),
        "o_proj.weight": ((hidden, width), "linear"),
    }
    if sizes.qk_norm:
        parts |= {f"{name}.weight": ((sizes.head_dim,), "plain") for name in ("q_norm", "k_norm")}
    return parts


def mla_parts(hidden: int, sizes: MLASizes) -> Parts:
    """As :func:`gqa_parts`."""
    width, rank, q_rank = sizes.num_heads * sizes.head_dim, sizes.kv_lora_rank, sizes.q_lora_rank
    parts: Parts = {
        "kv_a_proj_with_mqa.weight": ((rank + sizes.rope_dim, hidden), "linear"),
        "kv_a_layernorm.weight": ((rank,), "plain"),
        "kv_b_proj.weight": ((sizes.num_heads * (sizes.nope_dim + sizes.v_head_dim), rank), "linear"),
        "o_proj.weight": ((hidden, sizes.num_heads * sizes.v_head_dim), "linear"),
    }
    if q_rank is None:
        return parts | {"q_proj.weight": ((width, hidden), "linear")}
    return parts | {
        "wq_a.weight": ((q_rank, hidden), "linear"),
        "q_a_layernorm.weight": ((q_rank,), "plain"),
        "wq_b.weight": ((width, q_rank), "linear"),
    }


def dsa_parts(hidden: int, sizes: DSASizes) -> Parts:
    """As :func:`gqa_parts`."""
    heads, dim = sizes.index_num_heads, sizes.index_head_dim
    index: Parts = {
        "wq_b.weight": ((heads * dim, sizes.latent.q_lora_rank), "linear"),
        "wk.weight": ((dim, hidden), "linear"),
        "k_norm.weight": ((dim,), "plain"),
        "k_norm.bias": ((dim,), "plain"),
        "weights_proj.weight": ((heads, hidden), "linear"),
    }
    return mla_parts(hidden, sizes.latent) | {f"indexer.{name}": part for name, part in index.items()}


ATTENTION_PARTS = {"gqa": gqa_parts, "mla": mla_parts, "dsa": dsa_parts}


def _ffn_parts(hidden: int, ffn: MLPSizes | MoESizes) -> Parts:
    if isinstance(ffn, MLPSizes):
        return {
            "gate_proj.weight": ((ffn.width, hidden), "linear"),
            "up_proj.weight": ((ffn.width, hidden), "linear"),
            "down_proj.weight": ((hidden, ffn.width), "linear"),
        }
    matrices = {"w1": (ffn.width, hidden), "w2": (hidden, ffn.width), "w3": (ffn.width, hidden)}
    parts: Parts = {"gate.weight": ((ffn.num_experts, hidden), "plain"), "gate.bias": ((ffn.num_experts,), "plain")}
    for name in ("shared_experts", *(f"experts.{expert}" for expert in range(ffn.num_experts))):
        parts |= {f"{name}.{matrix}.weight": (shape, "expert") for matrix, shape in matrices.items()}
    return parts


def _prediction_parts(hidden: int) -> Parts:
    """What a prediction layer has besides its block."""
    parts: Parts = {f"{name}.weight": ((hidden,), "plain") for name in ("enorm", "hnorm", "shared_head.norm")}
    return parts | {"eh_proj.weight": ((hidden, 2 * hidden), "linear")}
