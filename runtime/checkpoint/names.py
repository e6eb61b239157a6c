"""The names that files use -> canonical names, which are DeepSeek's own without the prefix ``model.``.

HuggingFace's names, DeepSeek's, and mixtures of both (saving a loaded model writes some) are read. Renaming goes
segment by segment and knows nothing of the model; whether a resulting name is one that the model has is decided
afterwards, against :func:`~dspark.runtime.checkpoint.spec.expected_tensors`, so an unforeseen name is an error.
"""

from __future__ import annotations

import re

from ..model_config import LIMITS
from .safetensors_file import DTYPE_BITS, StoredTensor

_SEGMENTS = {
    "self_attn": "attn",
    "mlp": "ffn",
    "embed_tokens": "embed",
    "embeddings": "embed",
    "lm_head": "head",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp_norm": "ffn_norm",
    "q_a_proj": "wq_a",
    "q_a_norm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_proj": "wkv",
    "o_a_proj": "wo_a",
    "o_b_proj": "wo_b",
    "sinks": "attn_sink",
    "position_bias": "ape",
    "e_score_correction_bias": "bias",
    "weight_scale_inv": "scale",
}
_EXPERT_MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
# (parent, segment) -> segment, after the renaming above.
_IN_CONTEXT = {
    ("compressor", "gate_proj"): "wgate",
    ("compressor", "kv_norm"): "norm",
    ("attn", "norm"): "kv_norm",
    ("markov_head", "embed"): "markov_w1",
    ("markov_head", "head"): "markov_w2",
}
# The bulk of a large checkpoint needs no renaming.
_EXPERT = re.compile(r"(?:model\.)?((?:layers|mtp)\.\d+\.ffn\.experts\.\d+\.w[123]\.(?:weight|scale))")
_DRAFT_HEADS = ("markov_head", "confidence_head")


def canonical_name(name: str, num_draft_stages: int = 0) -> str:
    """The canonical form of the name of one (unstacked) tensor.

    The Markov and confidence heads of a draft belong to its last stage, wherever the file has them;
    ``num_draft_stages`` says which that is. A scale becomes ``X.scale``, beside ``X.weight``.
    """
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        return expert.group(1)
    parts = name.split(".")
    if parts[0] == "model":
        del parts[0]
    parts = [_SEGMENTS.get(part, part) for part in parts]
    if "indexer" in parts:
        parts = _indexer(parts)
    result: list[str] = []
    for part in parts:
        parent = result[-1] if result else ""
        if (part in ("fn", "base", "scale") and parent in ("attn_hc", "ffn_hc")) or (
            parent == "hc_head" and part.startswith("hc_")
        ):
            result[-1] = f"hc_head_{part[3:]}" if parent == "hc_head" else f"hc_{parent[:-3]}_{part}"
            continue
        if part in _EXPERT_MATRICES and (parent == "shared_experts" or parent.isdecimal()):
            part = _EXPERT_MATRICES[part]
        result.append(_IN_CONTEXT.get((parent, part), part))
    if num_draft_stages and len(result) > 2 and result[0] == "mtp" and result[2] in _DRAFT_HEADS:
        result[1] = str(num_draft_stages - 1)
    return ".".join(result)


def _indexer(parts: list[str]) -> list[str]:
    """HuggingFace keeps the indexer inside the compressor, and the indexer's compressor flat inside the indexer."""
    at = parts.index("indexer")
    before, after = parts[:at], parts[at + 1 :]
    if not before or before[-1] != "compressor" or not after:
        return parts
    before = before[:-1]
    if after[0] == "scorer":
        return [*before, "indexer", *after[1:]]
    if after[0] == "wq_b":
        return [*before, "indexer", *after]
    return [*before, "indexer", "compressor", *after]


def unstack_experts(name: str, tensor: StoredTensor) -> list[tuple[str, StoredTensor]] | None:
    """The per-expert parts of a stacked expert tensor by their canonical names, or ``None`` if ``name`` is not one.

    ``mlp.experts.gate_up_proj`` [E, 2I, D] holds w1 above w3, ``mlp.experts.down_proj`` [E, D, I] holds w2; scales of
    FP8 weights carry ``_scale_inv`` and are stacked alike. Each part is a contiguous range of bytes, so it becomes a
    tensor of its own. Raises ``ValueError`` when the shape cannot be cut like that.
    """
    parts = name.split(".")
    if len(parts) < 2 or parts[-2] != "experts":
        return None
    stem = parts[-1].removesuffix("_scale_inv")
    matrices = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}.get(stem)
    if matrices is None:
        return None
    leaf = "weight" if stem == parts[-1] else "scale"
    if len(tensor.shape) != 3 or tensor.shape[1] % len(matrices):
        raise ValueError(f"{name!r} has shape {list(tensor.shape)}; stacked experts need three axes, the second even")
    if tensor.shape[0] > LIMITS["num_experts"][1]:
        raise ValueError(
            f"{name!r} stacks {tensor.shape[0]} experts, more than the limit of {LIMITS['num_experts'][1]}"
        )
    num_experts, rows, columns = tensor.shape[0], tensor.shape[1] // len(matrices), tensor.shape[2]
    bits = rows * columns * DTYPE_BITS[tensor.dtype]
    if bits % 8:
        raise ValueError(f"{name!r} has shape {list(tensor.shape)}, whose parts do not fill whole bytes")
    prefix = canonical_name(".".join(parts[:-1]))
    result = []
    for expert in range(num_experts):
        for position, matrix in enumerate(matrices):
            begin = tensor.begin + (expert * len(matrices) + position) * (bits // 8)
            part = StoredTensor(tensor.dtype, (rows, columns), tensor.file, begin, bits // 8)
            result.append((f"{prefix}.{expert}.{matrix}.{leaf}", part))
    return result
