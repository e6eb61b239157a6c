"""Tiny random checkpoints of other people's models, written by transformers with its logits beside them."""

import functools

import pytest
import torch

COMMON = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 1024}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
# case -> (class of transformers, its config's keys)
CASES = {
    "qwen3_gqa": ("Qwen3", {"num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}),
    "qwen3_mha": (
        "Qwen3",
        {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
        | {"tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "qwen3_mqa_sliding": (
        "Qwen3",
        {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8}
        | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    ),
    "llama": ("Llama", {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "llama3": (
        "Llama",
        {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "rope_parameters": LLAMA3},
    ),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "deepseek_v3_yarn": (
        "DeepseekV3",
        LATENT
        | {"q_lora_rank": None, "rope_interleave": False}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v32": ("DeepseekV32", LATENT | {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 7}),
}


def random_model(case, seed=0):
    """The model of ``case`` with weights that make its logits and choices matter."""
    transformers = pytest.importorskip("transformers")
    name, keys = CASES[case]
    config = getattr(transformers, f"{name}Config")(
        **{"rope_parameters": ROPE, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None} | COMMON | keys
    )
    config._attn_implementation = "eager"
    config.dtype = torch.float32
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            tensor.data.normal_(std=0.1)
        elif tensor.dim() > 1 and tensor.is_floating_point():
            tensor.data.normal_(std=1.0 if "embed" in name else 1.5 * tensor.shape[-1] ** -0.5)
        elif "norm" in name:
            tensor.data.uniform_(0.7, 1.3)
    return model


@pytest.fixture(scope="session")
def hf_checkpoint(tmp_path_factory):
    """``hf_checkpoint(case)``: folder, token ids [2, 40] and logits [2, 40, V] of a random model of transformers."""

    @functools.cache
    def make(case):
        model = random_model(case)
        folder = tmp_path_factory.mktemp("hf") / case
        model.save_pretrained(folder)
        ids = torch.randint(3, COMMON["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            return folder, ids, model(ids).logits

    return make
