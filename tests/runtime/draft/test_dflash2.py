"""DFlash 2 on a dense target: a block against its formula written out, and what is refused."""

import json

import pytest
import torch
from dspark.runtime.draft import own_draft
from dspark.runtime.model_config import load_model_config
from dspark.runtime.request import Request, SamplingParams
from safetensors import safe_open
from safetensors.torch import load_file

TOLERANCE = 2e-5
TAPS, GROUP, RANK, TOP_K = 3, 8, 5, 6
ADDED = {"selector_rank": RANK, "selector_top_k": TOP_K, "conv_kernel_size": TAPS, "conv_group_size": GROUP}


def folder_of(dense, data, name, block_below=False, **changes):
    """The DFlash draft of the reference data with convolutions near the identity and a selector, all made up."""
    with safe_open(data / "tiny_dflash_qwen3.safetensors", "pt") as file:
        config = json.loads(file.metadata()["meta"])["draft"] | {"dtype": "float32"}
        tensors = {k.removeprefix("draft."): file.get_tensor(k) for k in file.keys() if k.startswith("draft.")}
    generator = torch.Generator().manual_seed(11)
    for layer in range(2):
        for conv in ("attention_conv", "mlp_conv"):
            base = 0.2 * torch.randn(2, TAPS, 32, generator=generator)
            base[:, 0] += 1.0
            tensors[f"layers.{layer}.{conv}.base_kernel"] = base
            shape = (2 * TAPS * 32 // GROUP, 32)
            tensors[f"layers.{layer}.{conv}.kernel_projection.weight"] = 0.05 * torch.randn(shape, generator=generator)
    tensors["candidate_selector.hidden_projection.weight"] = 0.2 * torch.randn(RANK, 32, generator=generator)
    for side in ("predecessor", "successor"):
        tensors[f"candidate_selector.{side}_codebook"] = torch.randn(24, RANK, generator=generator)
    nested = config["dflash_config"] | ADDED
    if block_below:
        nested["block_size"] = config.pop("block_size")
    return dense.write(
        name, config | {"dflash_config": nested, "architectures": ["DFlash2DraftModel"]} | changes, tensors
    )


@pytest.fixture(scope="module")
def draft(dense, speculative_data):
    return folder_of(dense, speculative_data, "dflash2", block_below=True)


def rms(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def turn(x, positions):
    inverse = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    angles = positions.unsqueeze(1) * inverse
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def convolve(x, delta, base):
    """Row by row, tap by tap, channel by channel of a group."""
    y = torch.zeros_like(x)
    for i in range(len(x)):
        for tap in range(min(TAPS, i + 1)):
            y[i] += (base[tap] + delta[i, tap].repeat_interleave(GROUP)) * x[i - tap]
    return y


def around(w, name, x, sublayer):
    kernels = (x @ w[f"{name}.kernel_projection.weight"].T).view(len(x), 2, TAPS, 32 // GROUP)
    base = w[f"{name}.base_kernel"]
    return convolve(sublayer(convolve(x, kernels[:, 0], base[0])), kernels[:, 1], base[1])


def block_by_the_formula(tensors, context, x, start):
    """The block's states behind the final norm; ``context`` [C, D] behind hidden_norm, ``x`` [B, D] embeddings."""
    past, here = torch.arange(len(context)), torch.arange(start, start + len(x))
    for layer in range(2):
        w = {k.removeprefix(f"layers.{layer}."): t for k, t in tensors.items() if k.startswith(f"layers.{layer}.")}

        def heads(rows, name, w=w):
            out = (rows @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, 8))
            return out if name == "v" else rms(out, w[f"self_attn.{name}_norm.weight"])

        def attend(rows, heads=heads, w=w):
            q = turn(heads(rows, "q"), here)
            k = torch.cat((turn(heads(context, "k"), past), turn(heads(rows, "k"), here))).repeat_interleave(2, 1)
            v = torch.cat((heads(context, "v"), heads(rows, "v"))).repeat_interleave(2, 1)
            p = (torch.einsum("thd,lhd->htl", q, k) * 8**-0.5).softmax(-1)
            return torch.einsum("htl,lhd->thd", p, v).flatten(1) @ w["self_attn.o_proj.weight"].T

        def mlp(rows, w=w):
            gate = torch.nn.functional.silu(rows @ w["mlp.gate_proj.weight"].T)
            return (gate * (rows @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T

        x = x + around(w, "attention_conv", rms(x, w["input_layernorm.weight"]), attend)
        x = x + around(w, "mlp_conv", rms(x, w["post_attention_layernorm.weight"]), mlp)
    return rms(x, tensors["norm.weight"])


def test_a_block_against_its_formula(dense, draft, speculative_data):
    with safe_open(speculative_data / "tiny_dflash_qwen3.safetensors", "pt") as file:
        features = file.get_tensor("cycle0.context_hidden")
    with safe_open(speculative_data / "tiny_dspark_qwen3.safetensors", "pt") as file:
        prompt = file.get_tensor("prompt").tolist()
    tensors, target = load_file(draft / "model.safetensors"), load_file(dense.target / "model.safetensors")
    engine, seen = dense.load(draft), []
    forward = engine.drafter.forward

    def noted(requests):
        seen.append((requests, *forward(requests)))
        return seen[-1][1:]

    engine.drafter.forward = noted
    engine.add(Request("a", tuple(prompt), SamplingParams(max_new_tokens=3, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    requests, hidden, logits = seen[0]
    assert requests.starts == [11]
    context = rms(features @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    embedded = target["model.embed_tokens.weight"][[requests.anchors[0], *[23] * 5]]
    expected = block_by_the_formula(tensors, context, embedded, 11)[1:]
    assert (hidden[0] - expected).abs().max() < TOLERANCE
    assert (logits[0] - expected @ target["lm_head.weight"].T).abs().max() < 10 * TOLERANCE
    assert (hidden[0, 1] - hidden[0, 0]).abs().max() > 1e-3


def test_recognised(dense, draft):
    assert own_draft(load_model_config(dense.target), str(draft)) == "dflash2"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"is_causal": True}, "is_causal is not false"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "is_causal is not false"),
        ({"input_embedding_scale": 2.0}, "input_embedding_scale is not 1"),
        ({"hidden_size": 64}, "hidden_size 64, but this one has 32"),
    ],
)
def test_refused(dense, speculative_data, changes, message):
    folder = folder_of(dense, speculative_data, f"refused_{'_'.join(changes)}", **changes)
    with pytest.raises(ValueError, match=message):
        dense.load(folder)


def test_sizes_that_do_not_fit(dense, draft):
    config = json.loads((draft / "config.json").read_text())
    for name, value, message in (
        ("conv_group_size", 5, "conv_group_size 5 does not divide hidden_size 32"),
        ("conv_kernel_size", 9, r"conv_kernel_size is 9, outside \[1, 6\]"),
        ("selector_top_k", 25, r"selector_top_k is 25, outside \[1, 24\]"),
    ):
        changed = config | {"dflash_config": config["dflash_config"] | {name: value}}
        folder = dense.write(f"bad_{name}", changed, {})
        with pytest.raises(ValueError, match=message):
            dense.load(folder)
