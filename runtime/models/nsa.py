"""Decoders with native sparse attention, in the layout of flash-linear-attention's models, whose keys say nothing of
summaries: those are means of the selected blocks. The keys ``kernel_size``, ``kernel_stride``, ``init_blocks``,
``local_blocks`` and ``compress_type`` say more."""

from __future__ import annotations

from typing import Any

from ...layers.attention.nsa import NSASizes
from ...layers.mlp import MLPSizes
from ..checkpoint.config_decoder import common_fields, finish, num_layers_of, read_decoder_rope
from ..checkpoint.config_file import or_default
from ..checkpoint.config_keys import ConfigKeys
from ..model_config import LIMITS, MAX_COMPRESS_RATIO, within
from .decoder_config import DecoderConfig
from .decoder_family import DecoderFamily

# How the library computes, not what.
ALSO_IGNORED = frozenset(
    {"elementwise_affine", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp"}
)
WIDTH_UNIT = 256


class NSA(DecoderFamily):
    """See :class:`.base.Family`."""

    @classmethod
    def read(cls, keys: ConfigKeys, generation: dict[str, Any] | None) -> DecoderConfig:
        """See :meth:`.decoder_family.DecoderFamily.read`."""
        num_layers, fields = num_layers_of(keys), common_fields(keys, generation)
        rope, _ = read_decoder_rope(keys)
        if rope.scaling is not None:
            raise keys.error("rope_scaling is there, but native sparse attention rotates without scaling")
        attention = read_sizes(keys, fields["hidden_size"])
        mlp = MLPSizes(fields["hidden_size"], mlp_width(keys, fields["hidden_size"]))
        finish(keys, ALSO_IGNORED)
        layers = {"attention": (attention,) * num_layers, "ffn": (mlp,) * num_layers}
        return DecoderConfig(model_type="nsa", rope=rope, **layers, **fields)


def read_sizes(keys: ConfigKeys, hidden: int) -> NSASizes:
    """The attention of a layer. Raises ``ValueError`` for blocks that do not fit together."""
    num_heads, block = keys.required_int("num_attention_heads"), keys.required_int("block_size")
    sizes = NSASizes(
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=or_default(keys.optional_int("num_key_value_heads"), num_heads),
        head_dim=keys.required_int("head_dim"),
        kernel_size=or_default(keys.optional_int("kernel_size"), block),
        kernel_stride=or_default(keys.optional_int("kernel_stride"), block),
        block_size=block,
        block_counts=keys.required_int("block_counts"),
        window=or_default(keys.optional_int("sliding_window"), 0),
        init_blocks=or_default(keys.optional_int("init_blocks"), 1),
        local_blocks=or_default(keys.optional_int("local_blocks"), 2),
        compression=or_default(keys.optional_str("compress_type"), "mean"),
    )
    within("block_size", block, 1, MAX_COMPRESS_RATIO)
    for name in ("kernel_size", "kernel_stride"):
        within(name, getattr(sizes, name), 1, block)
    within("window_size", sizes.window, 0, LIMITS["sliding_window"][1])
    within("num_key_value_heads", sizes.num_kv_heads, 1, num_heads)
    within("init_blocks", sizes.init_blocks, 0, LIMITS["index_topk"][1])
    within("local_blocks", sizes.local_blocks, 1, LIMITS["index_topk"][1])
    within(
        "block_counts (init_blocks + local_blocks at least)",
        sizes.block_counts,
        sizes.init_blocks + sizes.local_blocks,
        LIMITS["index_topk"][1],
    )
    for name in ("kernel_size", "block_size"):
        if getattr(sizes, name) % sizes.kernel_stride:
            raise keys.error(f"{name} {getattr(sizes, name)} is not a multiple of kernel_stride {sizes.kernel_stride}")
    if num_heads % sizes.num_kv_heads:
        raise keys.error(f"num_heads {num_heads} is not a multiple of num_kv_heads {sizes.num_kv_heads}")
    if sizes.compression not in ("mean", "linear"):
        raise keys.error(f"compress_type is {sizes.compression!r:.40}, not mean or linear")
    return sizes


def mlp_width(keys: ConfigKeys, hidden: int) -> int:
    """``intermediate_size``, or two thirds of ``hidden_ratio`` times the hidden width, rounded up."""
    width, ratio = keys.optional_int("intermediate_size"), keys.optional_int("hidden_ratio")
    if width is not None:
        return width
    if ratio is None:
        raise keys.error("neither intermediate_size nor hidden_ratio is there")
    return -(-int(hidden * ratio * 2 / 3) // WIDTH_UNIT) * WIDTH_UNIT
