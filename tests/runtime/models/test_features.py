"""What works with which model: every cell of the table in docs/models.md is either planned or refused by name."""

import json

import pytest
import torch
from dspark.parallel.topology import Topology
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.cli import main
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load_plan import plan_load
from dspark.runtime.model_config import load_model_config
from dspark.runtime.models import MODELS, family

CPU = torch.device("cpu")
COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "num_attention_heads": 4,
    "torch_dtype": "float32",
}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
LATENT = EXPERTS | {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 8, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1}
KEYS = {
    "qwen3": {"head_dim": 8},
    "qwen3, sliding": {"head_dim": 8, "layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
    "llama": {},
    "nsa": {"head_dim": 8, "block_size": 8, "block_counts": 4, "window_size": 8},
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT | {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8},
}
DENSE = ("qwen3", "qwen3, sliding", "llama", "nsa")
OTHERS = tuple(KEYS)
ALL = ("deepseek_v4", *KEYS)
RING = ("qwen3", "llama", "deepseek_v3")
# options -> the models they are for, and what the refusal of others says
FEATURES = [
    ({"prefix_cache": True}, ALL, ""),
    ({"overlap": "tbo"}, ALL, ""),
    ({"draft": "ngram"}, ALL, ""),
    ({"draft": "ngram", "prefix_cache": True}, (), "--prefix-cache stores nothing of the draft ngram"),
    ({"draft": "mtp_v3", "prefix_cache": True}, (), "--prefix-cache stores nothing|needs a deepseek_v3"),
    ({"draft": "mtp_v3"}, ("deepseek_v3", "deepseek_v32"), "the draft mtp_v3 needs a deepseek_v3 or deepseek_v32"),
    ({"draft": "mtp_v3", "tree": "dynamic"}, ("deepseek_v3",), "--tree dynamic is for layers|needs a deepseek_v3"),
    ({"cp_keys": "ring"}, RING, "--cp-keys ring is for layers"),
    ({"dispatcher": "normal"}, ("deepseek_v4", "deepseek_v3", "deepseek_v32"), "--dispatcher normal is about experts"),
    ({"expert_format": "fp8"}, ("deepseek_v4", "deepseek_v3", "deepseek_v32"), "--expert-format fp8 is about experts"),
    ({"num_redundant_experts": 2}, ("deepseek_v4", "deepseek_v3", "deepseek_v32"), "there is no expert to place"),
    ({"deterministic": True}, ("deepseek_v4",), "--deterministic works on deepseek_v4"),
    ({"kv_format": "fp8", "kernels": "torch"}, ("deepseek_v4",), "--kv-format fp8 works on deepseek_v4"),
]


def config_of(name):
    if name == "deepseek_v4":
        return load_model_config(bundled_model())
    kind = name.split(",")[0]
    return family(kind).read_config(COMMON | {"model_type": kind} | KEYS[name], None)


def test_every_model_is_in_the_table():
    assert {name.split(",")[0] for name in ALL} == set(MODELS)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("options, models, message", FEATURES, ids=lambda x: str(x)[:40])
def test_planned_or_refused(options, models, message, name):
    config = resolve(
        EngineConfig(**{"draft": "none", "max_context": 64, "dtype": "float32"} | options),
        model_dir="",
        device_type="cpu",
        max_positions=256,
        own_draft="none",
    )
    arguments = config, config_of(name), Topology(tp=2, ep=2 if name not in DENSE else 1), CPU
    if name in models:
        plan_load(*arguments)
    else:
        with pytest.raises(ValueError, match=message):
            plan_load(*arguments)


@pytest.mark.parametrize("name", OTHERS)
def test_training_and_traffic_are_refused(name, tmp_path, capsys):
    kind = name.split(",")[0]
    (tmp_path / "config.json").write_text(json.dumps(COMMON | {"model_type": kind} | KEYS[name]))
    (tmp_path / "text.jsonl").write_text('{"token_ids": [5, 6, 7]}')
    text = ["--text", str(tmp_path / "text.jsonl"), "--output", str(tmp_path / "draft"), "--steps", "1"]
    for what, verb in (("train-draft", ["train-draft", *text]), ("bench traffic", ["bench", "traffic"])):
        assert main([*verb, "--model", str(tmp_path)]) == 2
        assert f"{what} works on deepseek_v4 models, but this one is {kind}" in capsys.readouterr().err


def test_experts_of_a_dense_model_are_refused():
    for name in DENSE:
        found = family(name.split(",")[0]).problems(config_of(name), Topology(tp=2, ep=2), all_to_all=False)
        assert "ep = 2, but the model has no experts" in found
