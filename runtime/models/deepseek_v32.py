"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, whose lightning indexer chooses what a query sees."""

from __future__ import annotations

from typing import Any

from ...layers.attention.dsa import DSASizes
from ..checkpoint.config_decoder import common_fields, finish, num_layers_of
from ..checkpoint.config_keys import ConfigKeys
from ..model_config import LIMITS, within
from .decoder_config import DecoderConfig
from .decoder_family import DecoderFamily
from .deepseek_v3 import read_ffn, read_latent


class DeepseekV32(DecoderFamily):
    """See :class:`.base.Family`. The indexer of an FP8 checkpoint computes in FP8, as the release does."""

    @classmethod
    def read(cls, keys: ConfigKeys, generation: dict[str, Any] | None) -> DecoderConfig:
        """See :meth:`.decoder_family.DecoderFamily.read`."""
        num_layers, fields = num_layers_of(keys), common_fields(keys, generation)
        latent, rope = read_latent(keys, fields)
        for layer, name in enumerate(keys.optional_list("layer_types", str, num_layers) or ()):
            if name != "indexed_attention":
                raise keys.error(f"layer_types[{layer}] is {name!r:.60}, not indexed_attention")
        if latent.q_lora_rank is None:
            raise keys.error("q_lora_rank is missing; the indexer's queries are projected from that latent")
        sparse = DSASizes(
            latent=latent,
            index_num_heads=keys.required_int("index_n_heads"),
            index_head_dim=keys.required_int("index_head_dim"),
            index_topk=keys.required_int("index_topk"),
            index_fp8=fields["quantization"] is not None,
        )
        for name in ("index_num_heads", "index_head_dim", "index_topk"):
            within(name, getattr(sparse, name), *LIMITS[name])
        if latent.rope_dim > sparse.index_head_dim:
            raise keys.error(f"qk_rope_head_dim {latent.rope_dim} exceeds index_head_dim {sparse.index_head_dim}")
        ffn = read_ffn(keys, fields, num_layers)
        finish(keys)
        layers = {"attention": (sparse,) * num_layers, "ffn": ffn}
        return DecoderConfig(model_type="deepseek_v32", rope=rope, **layers, **fields)
