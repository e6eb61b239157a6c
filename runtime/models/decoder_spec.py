"""Which tensors a plain decoder consists of, in canonical names: HuggingFace's, shortened as V4's are."""

from __future__ import annotations

import re

from ...layers.attention import AttentionSizes
from ...layers.attention.dsa import DSASizes
from ...layers.attention.gqa import GQASizes
from ...layers.attention.mla import MLASizes
from ...layers.attention.nsa import NSASizes
from ...layers.mlp import MLPSizes
from ...layers.moe import MoESizes
from ..checkpoint.spec import TensorSpec
from .decoder_config import DecoderConfig

Parts = dict[str, tuple[tuple[int, ...], str]]
"""Name below a layer -> shape and kind, see :class:`..checkpoint.spec.TensorSpec`."""

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def decoder_tensors(config: DecoderConfig, with_draft: bool) -> dict[str, TensorSpec]:
    """See :meth:`..model_config.Config.tensors`."""
    hidden, vocab = config.hidden_size, config.vocab_size
    copy_of = "embed.weight" if config.tied else None
    specs = {
        "embed.weight": TensorSpec((vocab, hidden), "target", "plain"),
        "norm.weight": TensorSpec((hidden,), "target", "plain"),
        "head.weight": TensorSpec((vocab, hidden), "target", "plain", copy_of=copy_of),
    }
    for layer, (attention, ffn) in enumerate(zip(config.attention, config.ffn)):
        specs |= named_parts(f"layers.{layer}.", "target", block_parts(hidden, attention, ffn))
    for stage in range(config.num_draft_stages if with_draft else 0):
        parts = block_parts(hidden, config.attention[-1], config.ffn[-1]) | _prediction_parts(hidden)
        specs |= named_parts(f"mtp.{stage}.", "draft", parts)
        for name, original in (("embed.weight", "embed.weight"), ("shared_head.head.weight", "head.weight")):
            specs[f"mtp.{stage}.{name}"] = TensorSpec((vocab, hidden), "draft", "plain", copy_of=original)
    return specs


def decoder_name(name: str, config: DecoderConfig) -> str:
    """See :meth:`..model_config.Config.rename`: prediction layers are numbered on behind the target's."""
    found = _LAYER.fullmatch(name)
    stage = int(found.group(1)) - config.num_layers if found else -1
    if 0 <= stage < config.num_draft_stages:
        return f"mtp.{stage}.{found.group(2)}"
    return name


def named_parts(prefix: str, role: str, parts: Parts) -> dict[str, TensorSpec]:
    """``parts`` with ``prefix``, as tensors of ``role``."""
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


def nsa_parts(hidden: int, sizes: NSASizes) -> Parts:
    """As :func:`gqa_parts`."""
    heads, dim, size = sizes.num_kv_heads, sizes.head_dim, sizes.kernel_size
    parts = gqa_parts(hidden, sizes) | {"g_proj.weight": ((3 * sizes.num_heads, hidden), "linear")}
    if sizes.compression == "mean":
        return parts
    learned = dict.fromkeys(("compress_key", "compress_value"), ((heads, size * dim, dim), "plain"))
    return parts | learned | {"intra_block_pe": ((heads, size, dim), "plain")}


ATTENTION_PARTS = {"gqa": gqa_parts, "injected": gqa_parts, "mla": mla_parts, "dsa": dsa_parts, "nsa": nsa_parts}


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
