"""The dialects of ``config.json`` -> :class:`~dspark.runtime.model_config.ModelConfig`.

HuggingFace nested: ``layer_types``, ``mlp_layer_types``, ``compress_rates``, ``rope_parameters{main, compress}``.
Release, flat: ``compress_ratios`` (with one more 0 per draft stage), ``num_hash_layers``, ``rope_scaling``.
``inference/config.json``: ``dim``, ``n_layers``, ``moe_inter_dim``, ``original_seq_len``, ``rope_factor``, ...
Keys of several dialects may stand side by side as long as they agree.
"""

from __future__ import annotations

import pathlib
from typing import Any

from ..model_config import LIMITS, DSparkConfig, ModelConfig, QuantizationConfig
from .config_keys import NOT_FOR_INFERENCE, ConfigKeys
from .config_rope import read_rope
from .strict_json import read_json_object

MAX_CONFIG_BYTES = 4 * 2**20

LAYER_TYPE_KINDS = {
    "sliding_attention": "sliding",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
# The only ratios that name a kind by themselves.
RATIO_KINDS = {0: "sliding", 4: "csa", 128: "hca"}
DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "bf16": "bfloat16", "fp8": "bfloat16"}
EXPERT_DTYPES = ("fp4", "fp8", "bf16", "bfloat16", "float16", "float32")
SCALE_FORMATS = {"ue8m0": "ue8m0", "fp32": "float32", "float32": "float32"}
DSPARK_CORE = ("dspark_block_size", "dspark_markov_rank", "dspark_noise_token_id", "dspark_target_layer_ids")
MAX_LAYERS = LIMITS["num_layers"][1]
MAX_STAGES = LIMITS["num_nextn_predict_layers"][1]


def read_config_files(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The parsed ``config.json`` (else ``inference/config.json``) of ``folder`` and ``generation_config.json``, if any.

    Raises ``ValueError`` when there is no config, or a file is too large or not strict JSON.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; a model or a draft is a folder that holds config.json")
    candidates = [folder / "config.json", folder / "inference" / "config.json"]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        raise ValueError(f"{folder}: holds no config.json")
    generation = folder / "generation_config.json"
    return (
        read_json_object(path, max_bytes=MAX_CONFIG_BYTES),
        read_json_object(generation, max_bytes=MAX_CONFIG_BYTES) if generation.is_file() else None,
    )


def model_config_from_dict(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """See :meth:`ModelConfig.from_dict`."""
    keys = ConfigKeys(config, "config.json")
    _refuse_other_models(keys)
    num_layers = keys.required_int("num_hidden_layers")
    if not 1 <= num_layers <= MAX_LAYERS:
        raise keys.error(f"num_hidden_layers is {num_layers}, outside [1, {MAX_LAYERS}]")
    num_nextn = keys.optional_int("num_nextn_predict_layers") or 0
    head_dim = keys.required_int("head_dim")
    num_experts, top_k = keys.required_int("n_routed_experts"), keys.required_int("num_experts_per_tok")
    dspark = _dspark(keys, num_experts, top_k)
    num_stages = len(dspark.target_layer_ids) if dspark is not None else num_nextn
    kinds, ratios = _layers(keys, num_layers, num_stages)
    rope_dim, main_rope, compress_rope, max_position = read_rope(keys, head_dim)
    quantization, expert_dtype = read_quantization(keys)
    result = ModelConfig(
        vocab_size=keys.required_int("vocab_size"),
        hidden_size=keys.required_int("hidden_size"),
        num_layers=num_layers,
        num_heads=keys.required_int("num_attention_heads"),
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_lora_rank=keys.required_int("q_lora_rank"),
        o_groups=keys.required_int("o_groups"),
        o_lora_rank=keys.required_int("o_lora_rank"),
        index_num_heads=keys.required_int("index_n_heads"),
        index_head_dim=keys.required_int("index_head_dim"),
        index_topk=keys.required_int("index_topk"),
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        num_shared_experts=keys.required_int("n_shared_experts"),
        moe_intermediate_size=keys.required_int("moe_intermediate_size"),
        scoring_func=keys.required_str("scoring_func"),
        norm_topk_prob=or_default(keys.optional_bool("norm_topk_prob"), True),
        routed_scaling_factor=keys.required_float("routed_scaling_factor"),
        sliding_window=keys.required_int("sliding_window"),
        swiglu_limit=_swiglu_limit(keys),
        hc_mult=keys.required_int("hc_mult"),
        hc_sinkhorn_iters=keys.required_int("hc_sinkhorn_iters"),
        hc_eps=_epsilon(keys, "hc_eps"),
        rms_norm_eps=_epsilon(keys, "rms_norm_eps"),
        main_rope=main_rope,
        compress_rope=compress_rope,
        layer_kinds=kinds,
        compress_ratios=ratios,
        hash_layers=_hash_layers(keys, num_layers),
        max_position_embeddings=max_position,
        bos_token_id=keys.optional_int("bos_token_id"),
        eos_token_ids=read_eos_token_ids(keys, generation),
        pad_token_id=keys.optional_int("pad_token_id"),
        num_nextn_predict_layers=num_nextn,
        dtype=read_dtype(keys),
        quantization=quantization,
        expert_dtype=expert_dtype,
        dspark=dspark,
        hc_kind=or_default(keys.optional_str("hc_kind"), "mhc"),
    )
    keys.finish(NOT_FOR_INFERENCE)
    return result


def or_default(value: Any, default: Any) -> Any:
    """``default`` for None."""
    return default if value is None else value


def _refuse_other_models(keys: ConfigKeys) -> None:
    keys.expect("model_type", "deepseek_v4")
    keys.expect("hidden_act", "silu")
    keys.expect("attention_bias", False)
    keys.expect("mlp_bias", False)
    keys.expect("num_key_value_heads", 1)
    keys.expect("topk_method", "noaux_tc")
    if keys.optional_bool("tie_word_embeddings"):
        raise keys.error("tie_word_embeddings is true, but only models with their own head.weight are supported")


def _layers(keys: ConfigKeys, num_layers: int, num_stages: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Kind and compress ratio of each layer, from ``layer_types``, ``compress_ratios`` and ``compress_rates``."""
    types = keys.optional_list("layer_types", str, MAX_LAYERS)
    ratios = keys.optional_list("compress_ratios", int, MAX_LAYERS + MAX_STAGES)
    rates = _compress_rates(keys)
    if types is None and ratios is None:
        raise keys.error("neither layer_types nor compress_ratios is there, so the kinds of the layers are unknown")
    if types is not None and len(types) != num_layers:
        raise keys.error(f"layer_types has {len(types)} entries but num_hidden_layers is {num_layers}")
    if ratios is not None:
        ratios = _without_draft_entries(keys, ratios, num_layers, num_stages)
    kinds, result = [], []
    for layer in range(num_layers):
        kind = _layer_kind(keys, layer, types, ratios)
        kinds.append(kind)
        if kind == "sliding":
            result.append(0)
        elif kind in rates:
            if ratios is not None and ratios[layer] not in (rates[kind], *_literals(kind)):
                raise keys.error(
                    f"compress_ratios[{layer}] is {ratios[layer]} but compress_rates gives {rates[kind]} for that kind"
                )
            result.append(rates[kind])
        elif ratios is not None:
            result.append(ratios[layer])
        else:
            raise keys.error(f"compress_rates is missing an entry for layer_types[{layer}] = {types[layer]!r}")
    return tuple(kinds), tuple(result)


def _literals(kind: str) -> list[int]:
    return [ratio for ratio, name in RATIO_KINDS.items() if name == kind]


def _layer_kind(keys: ConfigKeys, layer: int, types: list[str] | None, ratios: list[int] | None) -> str:
    if types is not None:
        if types[layer] not in LAYER_TYPE_KINDS:
            raise keys.error(f"layer_types[{layer}] is {types[layer]!r:.60}, not one of {', '.join(LAYER_TYPE_KINDS)}")
        kind = LAYER_TYPE_KINDS[types[layer]]
        if ratios is not None and (kind == "sliding") != (ratios[layer] == 0):
            raise keys.error(
                f"layer_types[{layer}] is {types[layer]!r} but compress_ratios[{layer}] is {ratios[layer]}"
            )
        return kind
    if ratios[layer] not in RATIO_KINDS:
        raise keys.error(
            f"compress_ratios[{layer}] is {ratios[layer]}; only 0, 4 and 128 name a kind of layer, so other "
            "ratios need layer_types, or compress_rates beside the ratios 4 and 128"
        )
    return RATIO_KINDS[ratios[layer]]


def _without_draft_entries(keys: ConfigKeys, ratios: list[int], num_layers: int, num_stages: int) -> list[int]:
    extra = len(ratios) - num_layers
    if extra not in (0, num_stages):
        raise keys.error(
            f"compress_ratios has {len(ratios)} entries; num_hidden_layers is {num_layers} and there are "
            f"{num_stages} draft stages, so {num_layers} or {num_layers + num_stages} were expected"
        )
    for index, ratio in enumerate(ratios[num_layers:], start=num_layers):
        if ratio != 0:
            raise keys.error(f"compress_ratios[{index}] is {ratio}, but draft stages are sliding layers (0)")
    return ratios[:num_layers]


def _compress_rates(keys: ConfigKeys) -> dict[str, int]:
    rates = keys.optional_dict("compress_rates")
    result = {}
    if rates is not None:
        for name, kind in LAYER_TYPE_KINDS.items():
            rate = rates.optional_int(name)
            if rate is None:
                continue
            if kind == "sliding" and rate != 0:
                raise rates.error(f"{name} is {rate}, but sliding layers compress nothing (0)")
            result[kind] = rate
        rates.finish()
    return result


def _hash_layers(keys: ConfigKeys, num_layers: int) -> tuple[bool, ...]:
    types = keys.optional_list("mlp_layer_types", str, MAX_LAYERS)
    count = keys.optional_int("num_hash_layers")
    if types is None and count is None:
        raise keys.error("neither mlp_layer_types nor num_hash_layers is there, so the routers are unknown")
    if count is not None and not 0 <= count <= num_layers:
        raise keys.error(f"num_hash_layers is {count}, outside [0, num_hidden_layers = {num_layers}]")
    if types is None:
        return tuple(layer < count for layer in range(num_layers))
    if len(types) != num_layers:
        raise keys.error(f"mlp_layer_types has {len(types)} entries but num_hidden_layers is {num_layers}")
    for layer, name in enumerate(types):
        if name not in ("hash_moe", "moe"):
            raise keys.error(f"mlp_layer_types[{layer}] is {name!r:.60}, not hash_moe or moe")
    result = tuple(name == "hash_moe" for name in types)
    if count is not None and result != tuple(layer < count for layer in range(num_layers)):
        raise keys.error(f"num_hash_layers is {count} but mlp_layer_types has {sum(result)} hash_moe layers")
    return result


def _swiglu_limit(keys: ConfigKeys) -> float | None:
    """The clamp of gate and up; null or 0 mean none, and an absent key is an error."""
    if "swiglu_limit" not in keys:
        raise keys.error("swiglu_limit is missing; write null if the experts are not clamped")
    return keys.optional_float("swiglu_limit") or None


def _epsilon(keys: ConfigKeys, key: str) -> float:
    if key not in keys and keys.is_inference_dialect:
        return 1e-6  # what the reference code that reads this dialect fixes
    return keys.required_float(key)


def read_dtype(keys: ConfigKeys) -> str:
    """The floating type that the checkpoint says it has."""
    name = keys.required_str("dtype")
    if name.removeprefix("torch.") not in DTYPES:
        raise keys.error(f"{keys.spelled('dtype')} is {name!r:.60}, not one of {', '.join(DTYPES)}")
    return DTYPES[name.removeprefix("torch.")]


def read_quantization(keys: ConfigKeys) -> tuple[QuantizationConfig | None, str | None]:
    """What is said of block-scaled weights, and the format of experts."""
    expert_dtype = keys.optional_str("expert_dtype")
    block = keys.optional_dict("quantization_config")
    result = None
    if block is not None:
        block.expect("quant_method", "fp8")
        block.expect("fmt", "e4m3")
        block.expect("activation_scheme", "dynamic")
        block.expect("dequantize", True, False)
        block.take("modules_to_not_convert")  # which weights are quantised is read off the tensors
        expert_dtype = or_default(expert_dtype, block.optional_str("expert_dtype"))
        shape = block.optional_list("weight_block_size", int, 2)
        if shape is None or len(shape) != 2 or not all(1 <= edge <= 2**16 for edge in shape):
            raise block.error(f"weight_block_size must be two sizes in [1, {2**16}], got {shape}")
        result = QuantizationConfig(
            (shape[0], shape[1]), _scale_format(block, or_default(block.optional_str("scale_fmt"), "float32"))
        )
        block.finish()
    elif keys.optional_str("scale_fmt") is not None:
        result = QuantizationConfig((128, 128), _scale_format(keys, keys.required_str("scale_fmt")))
    if expert_dtype is not None and expert_dtype not in EXPERT_DTYPES:
        raise keys.error(f"expert_dtype is {expert_dtype!r:.60}, not one of {', '.join(EXPERT_DTYPES)}")
    return result, expert_dtype


def _scale_format(keys: ConfigKeys, name: str) -> str:
    if name not in SCALE_FORMATS:
        raise keys.error(f"scale_fmt is {name!r:.60}, not one of {', '.join(SCALE_FORMATS)}")
    return SCALE_FORMATS[name]


def read_eos_token_ids(keys: ConfigKeys, generation: dict[str, Any] | None) -> tuple[int, ...]:
    """Ids of both files, in order, without repetition."""
    ids: dict[int, None] = {}
    sources = [keys] if generation is None else [keys, ConfigKeys(generation, "generation_config.json")]
    for source in sources:
        value = source.take("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool):
                raise source.error(f"eos_token_id must be an integer or a list of integers, got {value!r:.80}")
            ids[token] = None
    if len(ids) > 64:
        raise keys.error(f"eos_token_id has {len(ids)} ids, more than the limit of 64")
    return tuple(ids)


def _dspark(keys: ConfigKeys, num_experts: int, top_k: int) -> DSparkConfig | None:
    """The bundled draft; a partial set of its keys is refused."""
    present = [key for key in DSPARK_CORE if key in keys]
    extra = keys.starting_with("dspark_")
    if not present and not extra:
        for key in ("enable_confidence_head", "confidence_head_with_markov", "sample_from_anchor"):
            if key in keys:
                raise keys.error(f"{key} describes a draft, but there are no dspark_* keys")
        return None
    missing = [key for key in DSPARK_CORE if key not in present]
    if missing:
        raise keys.error(f"{extra[0]} announces a DSpark draft, but {', '.join(missing)} is missing")
    target_ids = keys.optional_list("dspark_target_layer_ids", int, MAX_STAGES)
    if not target_ids:
        raise keys.error("dspark_target_layer_ids is empty; it names the target layers that the draft reads")
    rank = keys.required_int("dspark_markov_rank")
    return DSparkConfig(
        block_size=keys.required_int("dspark_block_size"),
        markov_rank=rank,
        markov_head_type=or_default(keys.optional_str("dspark_markov_head_type"), "vanilla"),
        noise_token_id=keys.required_int("dspark_noise_token_id"),
        target_layer_ids=tuple(target_ids),
        num_routed_experts=or_default(keys.optional_int("dspark_n_routed_experts"), num_experts),
        num_experts_per_tok=or_default(keys.optional_int("dspark_num_experts_per_tok"), top_k),
        enable_confidence_head=or_default(keys.optional_bool("enable_confidence_head"), True),
        confidence_head_with_markov=or_default(keys.optional_bool("confidence_head_with_markov"), rank > 0),
        sample_from_anchor=or_default(keys.optional_bool("sample_from_anchor"), True),
    )
