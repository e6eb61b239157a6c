"""Which tensors a model consists of: a pure function of its config, in canonical (DeepSeek's own) names.

Shapes: D hidden, V vocabulary, n residual streams, E routed experts, I expert width, m tokens per compressed entry.
Draft tensors live under ``mtp.S.`` for stage S: either plain multi-token prediction layers, or the stages of a DSpark
draft, whose context projection belongs to stage 0 and whose heads belong to the last stage.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..model_config import Config, DSparkConfig, ModelConfig


class TensorSpec(NamedTuple):
    """One expected tensor.

    ``kind`` says which number formats it may have: ``"expert"`` floats, FP8 or packed FP4; ``"linear"`` floats or FP8;
    ``"plain"`` floats; ``"table"`` integers. A tensor with ``copy_of`` may be absent and repeats that other tensor.
    """

    shape: tuple[int, ...]
    role: Literal["target", "draft"]
    kind: Literal["expert", "linear", "plain", "table"]
    copy_of: str | None = None


def expected_tensors(config: Config, *, with_draft: bool = True) -> dict[str, TensorSpec]:
    """Canonical name -> what it must be, for the target and, if the config announces one, its draft.

    ``with_draft=False`` leaves the draft out.
    """
    return config.tensors(with_draft)


def v4_tensors(config: ModelConfig, with_draft: bool) -> dict[str, TensorSpec]:
    """:func:`expected_tensors` of a DeepSeek-V4-style model."""
    hidden, vocab = config.hidden_size, config.vocab_size
    specs = {
        "embed.weight": TensorSpec((vocab, hidden), "target", "plain"),
        "norm.weight": TensorSpec((hidden,), "target", "plain"),
        "head.weight": TensorSpec((vocab, hidden), "target", "plain"),
    }
    specs |= _hc_head(config, "", "target")
    for layer in range(config.num_layers):
        specs |= _block(
            config,
            f"layers.{layer}.",
            "target",
            compressor=_compressor(config, layer),
            hashed=config.hash_layers[layer],
            num_experts=config.num_experts,
        )
    for stage in range(config.num_draft_stages if with_draft else 0):
        specs |= _draft_stage(config, stage)
    return specs


def _hc_head(config: ModelConfig, prefix: str, role: str) -> dict[str, TensorSpec]:
    streams, width = config.hc_mult, config.hc_mult * config.hidden_size
    return {
        f"{prefix}hc_head_fn": TensorSpec((streams, width), role, "plain"),
        f"{prefix}hc_head_base": TensorSpec((streams,), role, "plain"),
        f"{prefix}hc_head_scale": TensorSpec((1,), role, "plain"),
    }


def _pool(hidden: int, ratio: int, head_dim: int, halves: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """A compressor: ``halves`` is 2 where neighbouring windows overlap."""
    return {
        "wkv.weight": ((halves * head_dim, hidden), "linear"),
        "wgate.weight": ((halves * head_dim, hidden), "linear"),
        "norm.weight": ((head_dim,), "plain"),
        "ape": ((ratio, halves * head_dim), "plain"),
    }


def _compressor(config: ModelConfig, layer: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """What a CSA or HCA layer has besides the attention every layer has; names below ``attn.``."""
    kind, ratio, hidden = config.layer_kinds[layer], config.compress_ratios[layer], config.hidden_size
    if kind == "sliding":
        return {}
    parts = _pool(hidden, ratio, config.head_dim, 2 if kind == "csa" else 1)
    result = {f"compressor.{name}": part for name, part in parts.items()}
    if kind == "csa":
        heads, dim = config.index_num_heads, config.index_head_dim
        result["indexer.wq_b.weight"] = ((heads * dim, config.q_lora_rank), "linear")
        result["indexer.weights_proj.weight"] = ((heads, hidden), "linear")
        result |= {f"indexer.compressor.{name}": part for name, part in _pool(hidden, ratio, dim, 2).items()}
    return result


def _block(
    config: ModelConfig,
    prefix: str,
    role: str,
    *,
    compressor: dict[str, tuple[tuple[int, ...], str]],
    hashed: bool,
    num_experts: int,
) -> dict[str, TensorSpec]:
    hidden, heads, head_dim, width = config.hidden_size, config.num_heads, config.head_dim, config.moe_intermediate_size
    streams = config.hc_mult
    parts: dict[str, tuple[tuple[int, ...], str]] = {
        "attn_norm.weight": ((hidden,), "plain"),
        "ffn_norm.weight": ((hidden,), "plain"),
        "attn.wq_a.weight": ((config.q_lora_rank, hidden), "linear"),
        "attn.q_norm.weight": ((config.q_lora_rank,), "plain"),
        "attn.wq_b.weight": ((heads * head_dim, config.q_lora_rank), "linear"),
        "attn.wkv.weight": ((head_dim, hidden), "linear"),
        "attn.kv_norm.weight": ((head_dim,), "plain"),
        "attn.attn_sink": ((heads,), "plain"),
        "attn.wo_a.weight": ((config.o_groups * config.o_lora_rank, heads * head_dim // config.o_groups), "linear"),
        "attn.wo_b.weight": ((hidden, config.o_groups * config.o_lora_rank), "linear"),
    }
    for sublayer in ("attn", "ffn"):
        mixes = (2 + streams) * streams
        parts[f"hc_{sublayer}_fn"] = ((mixes, streams * hidden), "plain")
        parts[f"hc_{sublayer}_base"] = ((mixes,), "plain")
        parts[f"hc_{sublayer}_scale"] = ((3,), "plain")
    parts |= {f"attn.{name}": part for name, part in compressor.items()}
    parts["ffn.gate.weight"] = ((num_experts, hidden), "plain")
    if hashed:
        parts["ffn.gate.tid2eid"] = ((config.vocab_size, config.num_experts_per_tok), "table")
    else:
        parts["ffn.gate.bias"] = ((num_experts,), "plain")
    matrices = {"w1": (width, hidden), "w2": (hidden, width), "w3": (width, hidden)}
    for matrix, shape in matrices.items():
        parts[f"ffn.shared_experts.{matrix}.weight"] = (shape, "expert")
    for expert in range(num_experts):
        for matrix, shape in matrices.items():
            parts[f"ffn.experts.{expert}.{matrix}.weight"] = (shape, "expert")
    return {f"{prefix}{name}": TensorSpec(shape, role, kind) for name, (shape, kind) in parts.items()}


def _draft_stage(config: ModelConfig, stage: int) -> dict[str, TensorSpec]:
    hidden, draft, prefix = config.hidden_size, config.dspark, f"mtp.{stage}."
    num_experts = config.num_experts if draft is None else draft.num_routed_experts
    specs = _block(config, prefix, "draft", compressor={}, hashed=False, num_experts=num_experts)
    for name, original in (("embed.weight", "embed.weight"), ("head.weight", "head.weight")):
        specs[prefix + name] = TensorSpec((config.vocab_size, hidden), "draft", "plain", copy_of=original)
    parts: dict[str, tuple[tuple[int, ...], str]] = {}
    if draft is None:
        parts |= {
            "e_proj.weight": ((hidden, hidden), "linear"),
            "h_proj.weight": ((hidden, hidden), "linear"),
            "enorm.weight": ((hidden,), "plain"),
            "hnorm.weight": ((hidden,), "plain"),
        }
    elif stage == 0:
        parts["main_proj.weight"] = ((hidden, hidden * len(draft.target_layer_ids)), "linear")
        parts["main_norm.weight"] = ((hidden,), "plain")
    if draft is None or stage == config.num_draft_stages - 1:
        parts["norm.weight"] = ((hidden,), "plain")
        specs |= _hc_head(config, prefix, "draft")
    if draft is not None and stage == config.num_draft_stages - 1:
        parts |= _draft_heads(config, draft)
    return specs | {f"{prefix}{name}": TensorSpec(shape, "draft", kind) for name, (shape, kind) in parts.items()}


def _draft_heads(config: ModelConfig, draft: DSparkConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """The Markov head (gated and rnn kinds have one more linear layer, with a bias) and the confidence head."""
    hidden, vocab, rank = config.hidden_size, config.vocab_size, draft.markov_rank
    parts: dict[str, tuple[tuple[int, ...], str]] = {}
    if rank > 0:
        parts["markov_head.markov_w1.weight"] = ((vocab, rank), "plain")
        parts["markov_head.markov_w2.weight"] = ((vocab, rank), "plain")
        if draft.markov_head_type == "gated":
            parts["markov_head.gate_proj.weight"] = ((rank, hidden + rank), "plain")
            parts["markov_head.gate_proj.bias"] = ((rank,), "plain")
        elif draft.markov_head_type == "rnn":
            parts["markov_head.joint_proj.weight"] = ((3 * rank, 2 * rank + hidden), "plain")
            parts["markov_head.joint_proj.bias"] = ((3 * rank,), "plain")
    if draft.enable_confidence_head:
        width = hidden + (rank if draft.confidence_head_with_markov else 0)
        parts["confidence_head.proj.weight"] = ((1, width), "plain")
    return parts
