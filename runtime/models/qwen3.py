"""Qwen3, the dense models: grouped queries, queries and keys normalised per head, full or sliding layers."""

from __future__ import annotations

from typing import Any

from ...layers.attention.gqa import GQASizes
from ...layers.mlp import MLPSizes
from ..checkpoint.config_decoder import common_fields, finish, num_layers_of, read_decoder_rope
from ..checkpoint.config_file import or_default
from ..checkpoint.config_keys import ConfigKeys
from .decoder_config import DecoderConfig
from .decoder_family import DecoderFamily

LAYER_TYPES = ("full_attention", "sliding_attention")


class Qwen3(DecoderFamily):
    """See :class:`.base.Family`."""

    @classmethod
    def read(cls, keys: ConfigKeys, generation: dict[str, Any] | None) -> DecoderConfig:
        """See :meth:`.decoder_family.DecoderFamily.read`."""
        num_layers, fields = num_layers_of(keys), common_fields(keys, generation)
        rope, _ = read_decoder_rope(keys)
        num_heads = keys.required_int("num_attention_heads")
        full = GQASizes(
            hidden_size=fields["hidden_size"],
            num_heads=num_heads,
            num_kv_heads=or_default(keys.optional_int("num_key_value_heads"), num_heads),
            head_dim=keys.required_int("head_dim"),
            norm_eps=fields["rms_norm_eps"],
            qk_norm=True,
        )
        attention = tuple(full._replace(window=window) for window in windows(keys, num_layers))
        mlp = MLPSizes(fields["hidden_size"], keys.required_int("intermediate_size"))
        finish(keys)
        return DecoderConfig(model_type="qwen3", attention=attention, ffn=(mlp,) * num_layers, rope=rope, **fields)


def windows(keys: ConfigKeys, num_layers: int) -> list[int]:
    """The sliding window of each layer, 0 for full attention: from ``layer_types``, or from ``use_sliding_window`` with
    ``max_window_layers`` full layers first."""
    window, types = keys.optional_int("sliding_window"), keys.optional_list("layer_types", str, num_layers)
    first_sliding = or_default(keys.optional_int("max_window_layers"), num_layers)
    if types is None:
        slides = or_default(keys.optional_bool("use_sliding_window"), False) and window is not None
        types = [LAYER_TYPES[slides and layer >= first_sliding] for layer in range(num_layers)]
    if len(types) != num_layers:
        raise keys.error(f"layer_types has {len(types)} entries but num_hidden_layers is {num_layers}")
    for layer, name in enumerate(types):
        if name not in LAYER_TYPES:
            raise keys.error(f"layer_types[{layer}] is {name!r:.60}, not one of {', '.join(LAYER_TYPES)}")
    if "sliding_attention" in types and (window is None or window < 1):
        raise keys.error(f"layer_types has sliding layers, but sliding_window is {window}")
    return [window if name == "sliding_attention" else 0 for name in types]
