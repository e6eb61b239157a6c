"""Llama 2 and 3: grouped queries over all positions."""

from __future__ import annotations

from typing import Any

from ...layers.attention.gqa import GQASizes
from ...layers.mlp import MLPSizes
from ..checkpoint.config_decoder import common_fields, finish, num_layers_of, read_decoder_rope
from ..checkpoint.config_file import or_default
from ..checkpoint.config_keys import ConfigKeys
from .decoder_config import DecoderConfig
from .decoder_family import DecoderFamily


class Llama(DecoderFamily):
    """See :class:`.base.Family`."""

    @classmethod
    def read(cls, keys: ConfigKeys, generation: dict[str, Any] | None) -> DecoderConfig:
        """See :meth:`.decoder_family.DecoderFamily.read`."""
        num_layers, fields = num_layers_of(keys), common_fields(keys, generation)
        rope, _ = read_decoder_rope(keys)
        num_heads = keys.required_int("num_attention_heads")
        attention = GQASizes(
            hidden_size=fields["hidden_size"],
            num_heads=num_heads,
            num_kv_heads=or_default(keys.optional_int("num_key_value_heads"), num_heads),
            head_dim=or_default(keys.optional_int("head_dim"), fields["hidden_size"] // max(num_heads, 1)),
            norm_eps=fields["rms_norm_eps"],
        )
        mlp = MLPSizes(fields["hidden_size"], keys.required_int("intermediate_size"))
        finish(keys)
        layers = {"attention": (attention,) * num_layers, "ffn": (mlp,) * num_layers}
        return DecoderConfig(model_type="llama", rope=rope, **layers, **fields)
