"""Rotary settings of a `config.json`: `rope_parameters`, `rope_scaling`, or the flat keys of the reference code."""

from __future__ import annotations

from ..model_config import RopeConfig, YarnConfig
from .config_keys import ConfigKeys


def read_rope(keys: ConfigKeys, head_dim: int) -> tuple[int, RopeConfig, RopeConfig, int]:
    """Rotated channels, main and compress rotary settings, and the largest number of positions.

    Raises ``ValueError`` on missing or contradictory keys and on scalings other than yarn.
    """
    rope_dim, fraction = keys.optional_int("qk_rope_head_dim"), keys.optional_float("partial_rotary_factor")
    if rope_dim is None and fraction is None:
        raise keys.error("neither qk_rope_head_dim nor partial_rotary_factor is there")
    if rope_dim is None:
        rope_dim = round(head_dim * fraction)
    _check_fraction(keys, fraction, rope_dim, head_dim)
    theta, compress_theta = keys.required_float("rope_theta"), keys.required_float("compress_rope_theta")
    yarn = _flat_yarn(keys)
    main, compress = RopeConfig(theta), RopeConfig(compress_theta, yarn)
    nested = keys.optional_dict("rope_parameters")
    if nested is not None:
        found = []
        for name, flat in (("main", theta), ("compress", compress_theta)):
            part = nested.optional_dict(name)
            if part is None:
                raise nested.error(f"{name} is missing; it needs one entry for main and one for compress")
            _check_fraction(part, part.optional_float("partial_rotary_factor"), rope_dim, head_dim)
            rope = RopeConfig(part.required_float("rope_theta"), _yarn(part))
            part.finish()
            if rope.theta != flat:
                raise part.error(f"rope_theta is {rope.theta} but the flat key says {flat}")
            found.append(rope)
        nested.finish()
        if yarn is not None and found[1].yarn != yarn:
            raise keys.error("rope_scaling and rope_parameters.compress disagree")
        main, compress = found
    max_position = keys.optional_int("max_position_embeddings")
    if max_position is None and keys.is_inference_dialect and compress.yarn is not None:
        max_position = int(compress.yarn.factor * compress.yarn.original_max_position)
    keys.take("max_seq_len")  # the size of a buffer of the reference code, not of the model
    if max_position is None:
        raise keys.error("max_position_embeddings is missing; it is never guessed")
    return rope_dim, main, compress, max_position


def _check_fraction(keys: ConfigKeys, fraction: float | None, rope_dim: int, head_dim: int) -> None:
    if fraction is not None and abs(fraction * head_dim - rope_dim) > 1e-6 * max(head_dim, 1):
        raise keys.error(
            f"partial_rotary_factor {fraction} of head_dim {head_dim} is not the {rope_dim} rotated channels"
        )


def _flat_yarn(keys: ConfigKeys) -> YarnConfig | None:
    scaling = keys.optional_dict("rope_scaling")
    if scaling is not None:
        yarn = _yarn(scaling)
        scaling.finish()
        return yarn
    original, factor = keys.optional_int("original_seq_len"), keys.optional_float("rope_factor")
    fast, slow = keys.optional_float("beta_fast"), keys.optional_float("beta_slow")
    if not original:
        return None
    if factor is None or fast is None or slow is None:
        raise keys.error(f"original_seq_len is {original}, which needs rope_factor, beta_fast and beta_slow as well")
    return YarnConfig(factor, original, fast, slow)


def _yarn(part: ConfigKeys) -> YarnConfig | None:
    """Yarn settings of one rotary object, ``None`` when it is plain."""
    kind, old_kind = part.optional_str("rope_type"), part.optional_str("type")
    if kind is not None and old_kind is not None and kind != old_kind:
        raise part.error(f"rope_type is {kind!r} but type is {old_kind!r}")
    kind = kind or old_kind
    if kind in (None, "default"):
        return None
    if kind != "yarn":
        raise part.error(f"rope_type is {kind!r:.60}; only default and yarn are supported")
    # Released models do not multiply cos and sin by yarn's usual factor.
    part.expect("attention_factor", 1, 1.0)
    part.expect("truncate", True)
    return YarnConfig(
        factor=part.required_float("factor"),
        original_max_position=part.required_int("original_max_position_embeddings"),
        beta_fast=part.required_float("beta_fast"),
        beta_slow=part.required_float("beta_slow"),
    )
