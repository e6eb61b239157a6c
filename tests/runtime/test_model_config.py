"""config.json in its dialects, and what is refused."""

import json
import pathlib

import pytest
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.model_config import ModelConfig, RopeConfig, YarnConfig, load_model_config

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "checkpoint"

FLAT = {
    "model_type": "deepseek_v4",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "topk_method": "noaux_tc",
    "sliding_window": 12,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1024,
    "compress_ratios": [0, 4, 128, 0],
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
DSPARK = {
    "dspark_block_size": 5,
    "dspark_markov_rank": 8,
    "dspark_noise_token_id": 2,
    "dspark_target_layer_ids": [0, 2],
}
# Keys that may be left out because they have one usual meaning when they are.
OPTIONAL = {
    "model_type",
    "num_key_value_heads",
    "norm_topk_prob",
    "topk_method",
    "rope_scaling",
    "bos_token_id",
    "eos_token_id",
    "hidden_act",
    "tie_word_embeddings",
}


def changed(**changes):
    """FLAT with keys replaced, or removed where the new value is ``...``."""
    config = {**FLAT, **changes}
    return {key: value for key, value in config.items() if value is not ...}


def nested():
    """The model of FLAT in HuggingFace's dialect."""
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
    yarn = {key: value for key, value in FLAT["rope_scaling"].items() if key != "type"}
    return changed(
        compress_ratios=...,
        num_hash_layers=...,
        rope_scaling=...,
        torch_dtype=...,
        dtype="bfloat16",
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        partial_rotary_factor=0.5,
        rope_parameters={
            "main": {**rope, "rope_theta": 10000.0},
            "compress": {**rope, **yarn, "rope_theta": 160000.0, "rope_type": "yarn", "attention_factor": 1.0},
        },
    )


def inference():
    """The model of FLAT in the names of inference/config.json."""
    names = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "qk_rope_head_dim": "rope_head_dim",
        "num_experts_per_tok": "n_activated_experts",
        "moe_intermediate_size": "moe_inter_dim",
        "scoring_func": "score_func",
        "routed_scaling_factor": "route_scale",
        "sliding_window": "window_size",
        "num_hash_layers": "n_hash_layers",
        "num_nextn_predict_layers": "n_mtp_layers",
        "torch_dtype": "dtype",
    }
    left_out = OPTIONAL | {"hc_eps", "rms_norm_eps", "max_position_embeddings"}
    config = {names.get(key, key): value for key, value in FLAT.items() if key not in left_out}
    return config | {"original_seq_len": 64, "rope_factor": 16, "beta_fast": 32, "beta_slow": 1, "max_seq_len": 4096}


def test_the_three_dialects_mean_the_same_model():
    flat = ModelConfig.from_dict(FLAT)
    assert ModelConfig.from_dict(nested()) == flat
    assert ModelConfig.from_dict(inference(), {"bos_token_id": 0, "eos_token_id": 1}) == ModelConfig.from_dict(
        changed(bos_token_id=...)
    )
    assert flat.layer_kinds == ("sliding", "csa", "hca")
    assert flat.compress_ratios == (0, 4, 128)
    assert flat.hash_layers == (True, False, False)
    assert flat.main_rope == RopeConfig(10000.0)
    assert flat.compress_rope == RopeConfig(160000.0, YarnConfig(16.0, 64, 32.0, 1.0))
    assert flat.dtype == "bfloat16" and flat.eos_token_ids == (1,) and flat.num_draft_stages == 1


@pytest.mark.parametrize(
    "name, kinds, num_layers",
    [("flash", {"sliding": 2, "csa": 21, "hca": 20}, 43), ("pro", {"sliding": 0, "csa": 30, "hca": 31}, 61)],
)
def test_released_configs(name, kinds, num_layers):
    config = ModelConfig.from_dict(json.loads((DATA / f"{name}.json").read_text()))
    assert {kind: config.layer_kinds.count(kind) for kind in kinds} == kinds
    assert config.num_layers == num_layers and sum(config.hash_layers) == 3
    assert config.num_draft_stages == 3 and config.num_nextn_predict_layers == 1
    assert config.dspark.block_size == 5 and config.dspark.num_routed_experts == config.num_experts
    assert config.dspark.enable_confidence_head and config.dspark.confidence_head_with_markov
    assert config.quantization.block_shape == (128, 128) and config.expert_dtype == "fp4"


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_what_transformers_saves_means_the_same(tmp_path, name):
    library = pytest.importorskip("transformers.models.deepseek_v4.configuration_deepseek_v4")
    text = (DATA / f"{name}.json").read_text()
    library.DeepseekV4Config(**json.loads(text)).save_pretrained(tmp_path)
    assert "compress_ratios" not in (tmp_path / "config.json").read_text()
    assert load_model_config(tmp_path) == ModelConfig.from_dict(json.loads(text))


def test_end_of_sequence_ids_come_from_both_files():
    assert load_model_config(bundled_model()).eos_token_ids == (1, 4)
    assert ModelConfig.from_dict(changed(eos_token_id=[5, 1]), {"eos_token_id": [1, 7]}).eos_token_ids == (5, 1, 7)
    assert ModelConfig.from_dict(changed(eos_token_id=...)).eos_token_ids == ()


def test_oracle_configs(shared):
    manifest = json.loads((shared / "oracle" / "v4" / "manifest.json").read_text())
    kinds = {
        "sliding_attention": "sliding",
        "compressed_sparse_attention": "csa",
        "heavily_compressed_attention": "hca",
    }
    assert len(manifest["cases"]) == 8
    for name, case in manifest["cases"].items():
        config = load_model_config(shared / "oracle" / "v4" / name)
        assert config.layer_kinds == tuple(kinds[kind] for kind in case["layer_types"]), name
        assert config.hash_layers == tuple(kind == "hash_moe" for kind in case["mlp_layer_types"]), name


@pytest.mark.parametrize("key", sorted(set(FLAT) - OPTIONAL - {"qk_rope_head_dim", "num_nextn_predict_layers"}))
def test_nothing_is_guessed(key):
    with pytest.raises(ValueError, match="num_hash_layers" if key == "num_hash_layers" else key.removeprefix("torch_")):
        ModelConfig.from_dict(changed(**{key: ...}))


def test_keys_that_may_be_absent():
    bare = ModelConfig.from_dict({key: value for key, value in FLAT.items() if key not in OPTIONAL})
    assert bare.norm_topk_prob and bare.bos_token_id is None and bare.compress_rope.yarn is None


def test_keys_without_influence_change_nothing():
    noise = {"transformers_version": "9", "router_aux_loss_coef": 0.1, "use_cache": True, "initializer_range": 0.02}
    assert ModelConfig.from_dict({**FLAT, **noise}) == ModelConfig.from_dict(FLAT)


REFUSED = [
    ({"engram_layers": 3}, "unknown key 'engram_layers'"),
    (dict(dspark_block_sizes=3, **DSPARK), "unknown key 'dspark_block_sizes'"),
    ({"num_hidden_layers": 2}, r"4 entries; num_hidden_layers is 2 .* 1 draft stages, so 2 or 3"),
    ({"compress_ratios": [0, 4, 128, 4]}, r"compress_ratios\[3\] is 4"),
    ({"compress_ratios": [0, 4, 64]}, r"compress_ratios\[2\] is 64"),
    ({"layer_types": ["sliding_attention"] * 2}, "layer_types has 2 entries but num_hidden_layers is 3"),
    ({"layer_types": ["sliding_attention"] * 3}, r"layer_types\[1\].*compress_ratios\[1\] is 4"),
    ({"layer_types": ["full_attention"] * 3}, r"layer_types\[0\] is 'full_attention'"),
    ({"compress_rates": {"heavily_compressed_attention": 16}, "compress_ratios": [0, 4, 64]}, r"\[2\] is 64"),
    ({"mlp_layer_types": ["moe"] * 3}, "num_hash_layers is 1 but mlp_layer_types has 0"),
    ({"mlp_layer_types": ["moe"] * 2}, "mlp_layer_types has 2 entries but num_hidden_layers is 3"),
    ({"num_hash_layers": 4}, "num_hash_layers is 4"),
    ({"qk_rope_head_dim": 7}, "rope_dim is 7"),
    ({"qk_rope_head_dim": 32}, "rope_dim 32 exceeds head_dim 16"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25 of head_dim 16 is not the 8"),
    ({"num_attention_heads": 5}, "num_heads 5 is not a multiple of o_groups 2"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 8"),
    ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
    ({"n_shared_experts": 2}, r"num_shared_experts is 2, outside \[1, 1\]"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"model_type": "deepseek_v41"}, "model_type is 'deepseek_v41'"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"scoring_func": "relu"}, "scoring_func is 'relu'"),
    ({"torch_dtype": "int8"}, "torch_dtype is 'int8'"),
    ({"dim": 64}, "hidden_size is 32 but dim is 64"),
    ({"hidden_size": True}, "hidden_size must be an integer"),
    ({"hidden_size": 32.5}, "hidden_size must be an integer"),
    ({"hidden_size": "32"}, "hidden_size must be an integer"),
    ({"hidden_size": 0}, r"hidden_size is 0, outside \[1, 65536\]"),
    ({"hidden_size": 10**15}, "hidden_size is 1000000000000000, outside"),
    ({"vocab_size": 2**40}, "vocab_size is 1099511627776"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ({"n_routed_experts": 10**9}, "num_experts is 1000000000"),
    ({"sliding_window": -1}, "sliding_window is -1"),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    ({"hc_eps": 2.0}, "hc_eps is 2"),
    ({"swiglu_limit": -3.0}, "swiglu_limit is -3"),
    ({"routed_scaling_factor": 10**20}, "routed_scaling_factor is"),
    ({"eos_token_id": 96}, "eos_token_ids.*vocab_size is 96.* is 96"),
    ({"eos_token_id": "1"}, "eos_token_id must be an integer"),
    ({"pad_token_id": -1}, "pad_token_id"),
    ({"rope_theta": 0.5}, "main_rope.theta is 0.5"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type is 'linear'"),
    ({"rope_scaling": {**FLAT["rope_scaling"], "mscale": 1.0}}, "unknown key 'mscale'"),
    ({"rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings is missing"),
    ({"rope_scaling": {**FLAT["rope_scaling"], "beta_fast": 0.5}}, "beta_fast 0.5 is below beta_slow 1"),
    ({"rope_scaling": {**FLAT["rope_scaling"], "attention_factor": 1.3}}, "attention_factor is 1.3"),
    ({"rope_parameters": {"main": {"rope_theta": 1e4}}}, "compress is missing"),
    ({"rope_parameters": {"main": {"rope_theta": 2e4}, "compress": {}}}, "rope_theta is 20000.0 but the flat key"),
    ({"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq'"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "weight_block_size"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}}, "weight_block_size"),
    ({"expert_dtype": "fp3"}, "expert_dtype is 'fp3'"),
    ({"enable_confidence_head": True}, "enable_confidence_head describes a draft"),
    ({"dspark_block_size": 5}, "dspark_markov_rank, dspark_noise_token_id, dspark_target_layer_ids is missing"),
    ({"dspark_markov_head_type": "rnn"}, "dspark_markov_head_type announces a DSpark draft"),
    ({**DSPARK, "dspark_target_layer_ids": []}, "dspark_target_layer_ids is empty"),
    ({**DSPARK, "dspark_target_layer_ids": [0, 3]}, r"target_layer_ids\[1\] is 3, outside \[0, 2\]"),
    ({**DSPARK, "dspark_target_layer_ids": [2, 0]}, "must rise strictly"),
    ({**DSPARK, "dspark_noise_token_id": 96}, "noise_token_id .vocab_size is 96. is 96"),
    ({**DSPARK, "dspark_block_size": 0}, "block_size is 0"),
    ({**DSPARK, "dspark_markov_rank": 0, "dspark_markov_head_type": "rnn"}, "markov_rank is 0"),
    ({**DSPARK, "dspark_markov_head_type": "lstm"}, "markov_head_type is 'lstm'"),
    ({**DSPARK, "dspark_n_routed_experts": 1}, "num_experts_per_tok 2 exceeds the 1"),
]


@pytest.mark.parametrize("changes, message", REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_contradictions_and_absurd_values_are_refused(changes, message):
    drafted = {"compress_ratios": [0, 4, 128, 0, 0]} if "dspark_target_layer_ids" in changes else {}
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(changed(**drafted, **changes))


def test_a_bundled_draft():
    config = ModelConfig.from_dict(changed(compress_ratios=[0, 4, 128, 0, 0], enable_confidence_head=False, **DSPARK))
    assert config.num_draft_stages == 2 and config.dspark.markov_head_type == "vanilla"
    assert not config.dspark.enable_confidence_head and config.dspark.sample_from_anchor
    assert ModelConfig.from_dict(changed(compress_ratios=[0, 4, 128], **DSPARK)).num_draft_stages == 2


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"vocab_size": 1, "vocab_size": 2}', "duplicate key 'vocab_size'"),
        ('{"a": ' + "9" * 5000 + "}", "an integer of 5000 digits"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"hidden_size": ' + "[" * 900 + "]" * 900 + "}", "nested deeper than 16"),
        ('{"a": ' + "[" * 50000 + "]" * 50000 + "}", "nested deeper than 16"),
        (" " * (4 * 2**20 + 1), "more than the limit"),
        ("\udc80", "not UTF-8"),
    ],
)
def test_files_that_are_not_strict_json(tmp_path, text, message):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        load_model_config(tmp_path)


def test_where_the_config_is(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "inference").mkdir()
    (tmp_path / "inference" / "config.json").write_text(json.dumps(inference()))
    assert load_model_config(tmp_path).hidden_size == 32
