"""DeepSeek-V3 and R1: latent attention, dense layers first, then mixtures of experts with group-limited routing."""

from __future__ import annotations

import math
from typing import Any

from ...layers.attention.mla import MLASizes
from ...layers.mlp import MLPSizes
from ...layers.moe import MoESizes
from ..checkpoint.config_decoder import common_fields, finish, num_layers_of, read_decoder_rope
from ..checkpoint.config_file import or_default
from ..checkpoint.config_keys import ConfigKeys
from ..model_config import LIMITS, within
from .decoder_config import DecoderConfig, DecoderRope
from .decoder_family import DecoderFamily

FFN_TYPES = ("dense", "sparse")


class DeepseekV3(DecoderFamily):
    """See :class:`.base.Family`."""

    @classmethod
    def read(cls, keys: ConfigKeys, generation: dict[str, Any] | None) -> DecoderConfig:
        """See :meth:`.decoder_family.DecoderFamily.read`."""
        num_layers, fields = num_layers_of(keys), common_fields(keys, generation)
        latent, rope = read_latent(keys, fields)
        ffn = read_ffn(keys, fields, num_layers)
        finish(keys)
        layers = {"attention": (latent,) * num_layers, "ffn": ffn}
        return DecoderConfig(model_type="deepseek_v3", rope=rope, **layers, **fields)


def read_latent(keys: ConfigKeys, fields: dict[str, Any]) -> tuple[MLASizes, DecoderRope]:
    """The sizes of latent attention, and rotary settings; adds the prediction layers to ``fields``."""
    rope, growth = read_decoder_rope(keys)
    num_heads = keys.required_int("num_attention_heads")
    keys.expect("num_key_value_heads", num_heads)
    nope_dim, rope_dim = keys.required_int("qk_nope_head_dim"), keys.required_int("qk_rope_head_dim")
    keys.expect("qk_head_dim", nope_dim + rope_dim)
    fields["num_nextn_predict_layers"] = or_default(keys.optional_int("num_nextn_predict_layers"), 0)
    latent = MLASizes(
        hidden_size=fields["hidden_size"],
        num_heads=num_heads,
        q_lora_rank=keys.optional_int("q_lora_rank"),
        kv_lora_rank=keys.required_int("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_head_dim=keys.required_int("v_head_dim"),
        norm_eps=fields["rms_norm_eps"],
        scale=(nope_dim + rope_dim) ** -0.5 * growth,
        interleaved=or_default(keys.optional_bool("rope_interleave"), True),
    )
    for name in ("q_lora_rank", "kv_lora_rank", "v_head_dim"):
        if getattr(latent, name) is not None:
            within(name, getattr(latent, name), *LIMITS["q_lora_rank"])
    return latent, rope


def read_ffn(keys: ConfigKeys, fields: dict[str, Any], num_layers: int) -> tuple[MLPSizes | MoESizes, ...]:
    """The feed-forward sizes of each layer: dense ones first, or as ``mlp_layer_types`` says."""
    keys.expect("n_shared_experts", 1)
    keys.expect("topk_method", "noaux_tc")
    keys.expect("scoring_func", "sigmoid")
    keys.expect("moe_layer_freq", 1)
    num_experts, groups = keys.required_int("n_routed_experts"), or_default(keys.optional_int("n_group"), 1)
    kept = or_default(keys.optional_int("topk_group"), groups)
    within("n_group", groups, 1, max(num_experts, 1))
    within("topk_group", kept, 1, groups)
    if num_experts % groups:
        raise keys.error(f"n_routed_experts {num_experts} is not a multiple of n_group {groups}")
    routed = MoESizes(
        hidden_size=fields["hidden_size"],
        num_experts=num_experts,
        top_k=keys.required_int("num_experts_per_tok"),
        width=keys.required_int("moe_intermediate_size"),
        limit=math.inf,
        scoring="sigmoid",
        renormalise=or_default(keys.optional_bool("norm_topk_prob"), True),
        scale=keys.required_float("routed_scaling_factor"),
        hashed=False,
        vocab_size=fields["vocab_size"],
        num_groups=groups,
        topk_groups=kept,
    )
    if routed.top_k > num_experts // groups * kept:
        raise keys.error(f"num_experts_per_tok {routed.top_k} exceeds the experts of topk_group = {kept} groups")
    dense = MLPSizes(fields["hidden_size"], keys.required_int("intermediate_size"))
    first_routed = keys.optional_int("first_k_dense_replace")
    types = keys.optional_list("mlp_layer_types", str, num_layers)
    if types is None:
        if first_routed is None:
            raise keys.error("neither first_k_dense_replace nor mlp_layer_types is there")
        types = [FFN_TYPES[layer >= first_routed] for layer in range(num_layers)]
    if len(types) != num_layers or not set(types) <= set(FFN_TYPES):
        raise keys.error(f"mlp_layer_types must be {num_layers} of {', '.join(FFN_TYPES)}, got {types!r:.80}")
    return tuple(dense if name == "dense" else routed for name in types)
