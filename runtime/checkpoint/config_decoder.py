"""Keys that the ``config.json`` of every plain decoder has, as HuggingFace names them."""

from __future__ import annotations

import math
from typing import Any

from ...layers.rope import Llama3, Yarn
from ..model_config import LIMITS, positive, within
from ..models.decoder_config import DecoderRope
from .config_file import or_default, read_dtype, read_eos_token_ids, read_quantization
from .config_keys import NOT_FOR_INFERENCE, ConfigKeys

# Keys of classes of the library that change nothing in the models here.
ALSO_IGNORED = frozenset({"head_dim", "max_window_layers", "use_sliding_window", "model_type"})


def num_layers_of(keys: ConfigKeys) -> int:
    """``num_hidden_layers``, checked before lists of that length are made."""
    num_layers = keys.required_int("num_hidden_layers")
    within("num_hidden_layers", num_layers, *LIMITS["num_layers"])
    return num_layers


def common_fields(keys: ConfigKeys, generation: dict[str, Any] | None) -> dict[str, Any]:
    """The fields of a :class:`~..models.decoder_config.DecoderConfig` that need nothing of the model's own.

    Raises ``ValueError`` for what no decoder here has: biases, other activations.
    """
    keys.expect("hidden_act", "silu", "swish")
    keys.expect("attention_bias", False)
    keys.expect("mlp_bias", False)
    quantization, _ = read_quantization(keys)
    return {
        "vocab_size": keys.required_int("vocab_size"),
        "hidden_size": keys.required_int("hidden_size"),
        "rms_norm_eps": keys.required_float("rms_norm_eps"),
        "tied": or_default(keys.optional_bool("tie_word_embeddings"), False),
        "max_position_embeddings": keys.required_int("max_position_embeddings"),
        "bos_token_id": keys.optional_int("bos_token_id"),
        "eos_token_ids": read_eos_token_ids(keys, generation),
        "pad_token_id": keys.optional_int("pad_token_id"),
        "dtype": read_dtype(keys),
        "quantization": quantization,
    }


def finish(keys: ConfigKeys, also: frozenset[str] = frozenset()) -> None:
    """Refuse keys that nobody asked for, besides some that never matter and those in ``also``."""
    keys.finish(NOT_FOR_INFERENCE | ALSO_IGNORED | also)


def read_decoder_rope(keys: ConfigKeys) -> tuple[DecoderRope, float]:
    """Rotary settings from ``rope_parameters``, or ``rope_theta`` with ``rope_scaling``, and what scores are scaled by
    besides (yarn with ``mscale_all_dim``; 1 otherwise). Raises ``ValueError`` for scalings that are not built."""
    nested, scaling = keys.optional_dict("rope_parameters"), keys.optional_dict("rope_scaling")
    theta = keys.optional_float("rope_theta")
    part = nested or scaling
    if nested is not None and "rope_theta" in nested:
        theta = nested.required_float("rope_theta")
    if theta is None:
        raise keys.error("rope_theta is missing; it is never guessed, because libraries disagree about its default")
    if part is None:
        return DecoderRope(theta), 1.0
    kind = part.optional_str("rope_type")
    kind = or_default(kind, part.optional_str("type"))
    if kind in (None, "default"):
        part.expect("partial_rotary_factor", 1, 1.0)
        part.finish(frozenset({"type"}))
        return DecoderRope(theta), 1.0
    factor = part.required_float("factor")
    positive("rope factor", factor, 1e6)
    original = or_default(part.optional_int("original_max_position_embeddings"), 0)
    within("original_max_position_embeddings", original, *LIMITS["max_position_embeddings"])
    if kind == "llama3":
        low, high = part.required_float("low_freq_factor"), part.required_float("high_freq_factor")
        if not 0 < low < high:
            raise part.error(f"low_freq_factor is {low} and high_freq_factor {high}; they must rise from above 0")
        part.finish(frozenset({"type"}))
        return DecoderRope(theta, Llama3(factor, original, low, high)), 1.0
    if kind != "yarn":
        raise part.error(f"rope_type is {kind!r:.60}; only default, yarn and llama3 are supported")
    return _yarn(part, theta, factor, original)


def _yarn(part: ConfigKeys, theta: float, factor: float, original: int) -> tuple[DecoderRope, float]:
    fast, slow = (or_default(part.optional_float(name), d) for name, d in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if not 0 < slow <= fast:
        raise part.error(f"beta_slow is {slow} and beta_fast {fast}; they must be positive and not fall")
    part.expect("truncate", True)
    attention, mscale, all_dim = (
        part.optional_float(name) for name in ("attention_factor", "mscale", "mscale_all_dim")
    )
    part.finish(frozenset({"type"}))
    if attention is None:
        attention = magnitude(factor, mscale) / magnitude(factor, all_dim) if mscale and all_dim else magnitude(factor)
    yarn = Yarn(factor, original, fast, slow)
    return DecoderRope(theta, yarn, attention), magnitude(factor, all_dim) ** 2 if all_dim else 1.0


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """Yarn's growth of cos and sin for a context ``factor`` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
