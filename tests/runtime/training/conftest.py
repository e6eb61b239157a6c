"""A tiny target with made-up weights, and made-up states of it, for training drafts in a moment."""

import dataclasses

import pytest
import torch
from dspark.runtime.checkpoint import RandomWeights
from dspark.runtime.model_config import ModelConfig, RopeConfig
from dspark.runtime.training.hidden_cache import HiddenData
from dspark.runtime.training.methods import METHODS, Recipe

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    num_layers=4,
    num_heads=4,
    head_dim=8,
    rope_dim=4,
    q_lora_rank=8,
    o_groups=2,
    o_lora_rank=4,
    index_num_heads=2,
    index_head_dim=8,
    index_topk=4,
    num_experts=6,
    num_experts_per_tok=2,
    num_shared_experts=1,
    moe_intermediate_size=8,
    scoring_func="sqrtsoftplus",
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
    sliding_window=6,
    swiglu_limit=10.0,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_norm_eps=1e-6,
    main_rope=RopeConfig(10000.0),
    compress_rope=RopeConfig(160000.0),
    layer_kinds=("sliding", "csa", "hca", "csa"),
    compress_ratios=(0, 4, 16, 4),
    hash_layers=(True, False, False, False),
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_ids=(1,),
    pad_token_id=None,
    num_nextn_predict_layers=0,
    dtype="float32",
)


def make_recipe(method="dspark", **changes):
    recipe = Recipe(
        gamma=5,
        target_layer_ids=METHODS[method].default_layers(CONFIG),
        noise_token_id=2,
        num_experts=4,
        top_k=2,
        markov_rank=8,
    )
    return dataclasses.replace(recipe, **changes)


def build_draft(method="dspark", seed=3, window=None, **changes):
    """A draft under training, its starting weights jittered so that no head is at zero."""
    config = CONFIG if window is None else dataclasses.replace(CONFIG, sliding_window=window)
    generator = torch.Generator().manual_seed(seed)
    source = RandomWeights(config, seed=1)
    draft = METHODS[method].build(make_recipe(method, **changes), config, source, generator, torch.device("cpu"))
    with torch.no_grad():
        for name, weight in draft.weights.items():
            if name.startswith("mtp.") and not name.endswith("gate.bias"):
                weight += 0.1 * torch.randn(weight.shape, generator=generator) * weight.abs().mean().clamp(min=0.5)
    return draft


def make_states(method="dspark", lengths=(30, 9, 17, 24, 12, 40), seed=0, held_out=2):
    """Random sequences and states; the last ``held_out`` sequences are held out."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens, layers = sum(lengths), len(METHODS[method].default_layers(CONFIG))
    width = CONFIG.hidden_size * layers * (CONFIG.hc_mult if METHODS[method].feature == "streams" else 1)
    ids = torch.randint(3, CONFIG.vocab_size, (num_tokens,), generator=generator)
    starts = torch.tensor((0, *lengths)).cumsum(0)
    ids[starts[:-1]] = 0
    return HiddenData(
        ids,
        torch.randn(num_tokens, width, generator=generator),
        torch.randn(num_tokens, CONFIG.hidden_size, generator=generator),
        starts,
        torch.ones(len(lengths), dtype=torch.int64),
        tuple("ab"[q % 2] for q in range(len(lengths))),
        tuple(q >= len(lengths) - held_out for q in range(len(lengths))),
    )


@pytest.fixture
def make_draft():
    """``make_draft(method, **recipe changes)``."""
    return build_draft


@pytest.fixture
def make_data():
    """``make_data(method, lengths, seed, held_out)``."""
    return make_states


@pytest.fixture
def tiny_config():
    return CONFIG
