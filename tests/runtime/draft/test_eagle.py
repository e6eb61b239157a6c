"""EAGLE-1 on a dense target: the layer against plain dense maths, and how a folder is recognised."""

import json

import numpy as np
import pytest
import torch
from dspark.layers.attention.plan import build_plan
from dspark.runtime.draft import own_draft
from dspark.runtime.model_config import load_model_config
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, scaled_dot_product_attention, silu

TOLERANCE = 2e-5


def turned(x, positions, theta=10000.0):
    """``x`` [T, H, d] rotated in halves at ``positions`` [T]."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-torch.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), -1)


def plain_layer(weights, embedding, tokens, states, seen):
    """The draft's states [T, D]; ``seen`` bool [T, T] which rows see each other, a row's position being its depth."""
    positions = seen.sum(1) - 1
    x = linear(torch.cat((embedding[tokens], states), 1), weights["fc.weight"], weights["fc.bias"])
    q, k, v = (
        linear(x, weights[f"layers.0.self_attn.{name}_proj.weight"]).unflatten(1, (-1, 8)) for name in ("q", "k", "v")
    )
    q, k = turned(q, positions), turned(k, positions)
    heads = (part.repeat_interleave(q.shape[1] // part.shape[1], 1).transpose(0, 1) for part in (q, k, v))
    o = scaled_dot_product_attention(*heads, attn_mask=seen).transpose(0, 1).flatten(1)
    x = x + linear(o, weights["layers.0.self_attn.o_proj.weight"])
    normed = x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    gate, up = (linear(normed, weights[f"layers.0.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return x + linear(silu(gate) * up, weights["layers.0.mlp.down_proj.weight"])


def test_against_plain_maths(dense):
    """The rows of a prompt, then a chain on the layer's own states."""
    engine = dense.load(dense.eagle, gamma=3)
    drafter, weights = engine.drafter, load_file(dense.eagle / "model.safetensors")
    target = load_file(dense.target / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    tokens, taps = torch.randint(0, 24, (14,), generator=generator), torch.randn(11, 32, generator=generator)
    states = taps * (taps.square().mean(1, keepdim=True) + 1e-6).rsqrt() * target["model.norm.weight"]
    rows = np.stack([np.arange(11), np.zeros(11), np.zeros(11), np.full(11, 11), np.arange(11)]).astype(np.int64)
    with torch.inference_mode():
        features = drafter.features(taps)
        assert (features - states).abs().max() < TOLERANCE
        plan = build_plan(rows, drafter.cache.page_table, (1,))
        hidden, logits = drafter.forward(tokens[:11], features, plan, (11,))
        for n in range(4):
            size = 11 + n
            causal = torch.ones(size, size, dtype=torch.bool).tril()
            expected = plain_layer(weights, target["model.embed_tokens.weight"], tokens[:size], states, causal)
            assert (hidden - expected[-len(hidden) :]).abs().max() < TOLERANCE
            assert (logits - linear(expected[-len(hidden) :], target["lm_head.weight"])).abs().max() < TOLERANCE
            states = torch.cat((states, expected[-1:]))
            if n < 3:
                at = np.array([[size], [0], [size], [size + 1], [0]])
                plan = build_plan(at, drafter.cache.page_table, (1,))
                hidden, logits = drafter.forward(tokens[size : size + 1], hidden[-1:], plan, (1,))


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, "eagle"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "eagle"),
        ({"model_type": "eagle", "architectures": ["EAGLEModel"]}, "eagle"),
        ({"draft_vocab_size": 8}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
    ],
)
def test_recognised(dense, change, expected, tmp_path):
    """By the architecture, or, as the public drafts look like a Llama of one layer, by the tensor that joins."""
    config = json.loads((dense.eagle / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    save_file({"fc.weight": torch.zeros(32, 64)}, tmp_path / "model.safetensors")
    assert own_draft(load_model_config(dense.target), str(tmp_path)) == expected


def test_a_llama_of_one_layer_is_a_model(dense, tmp_path):
    config = json.loads((dense.eagle / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.zeros(32)}, tmp_path / "model.safetensors")
    assert own_draft(load_model_config(dense.target), str(tmp_path)) == "model"


def test_refusals(dense, tmp_path):
    config = json.loads((dense.eagle / "config.json").read_text())
    tensors = load_file(dense.eagle / "model.safetensors")
    for name, changed, more, message in (
        ("layers", {"num_hidden_layers": 2, "architectures": ["Eagle"]}, {}, "num_hidden_layers is 2"),
        ("width", {"hidden_size": 64}, {}, "hidden_size 64, but this one has 32"),
        ("bias", {"bias": False}, {}, "fc.bias"),
        ("head", {}, {"lm_head.weight": torch.zeros(24, 32)}, "head.weight of the draft differs"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | changed))
        save_file(tensors | more, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            dense.load(folder)


def test_greedy_tokens(dense):
    expected, _ = dense.run(dense.load())
    for options in ({}, {"gamma": 1, "chunk_size": 64}, {"gamma": 16, "max_running": 1}):
        got, specs = dense.run(dense.load(dense.eagle, **options))
        assert got == expected and sum(spec["accepted"] for spec in specs) > 0, options
