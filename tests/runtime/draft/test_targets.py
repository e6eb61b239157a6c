"""Drafts with a folder of their own on every kind of target, whatever they were made for: the target's own greedy
tokens, over ranks too, and its law when sampled."""

import functools

import numpy as np
import pytest
import torch
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.request import Request, SamplingParams
from dspark.runtime.step import Span, build_step
from scipy.stats import chi2

SIZES = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LATENT = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "v_head_dim": 8}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
LATENT |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 4}
LATENT |= {"num_nextn_predict_layers": 0}
SPARSE = LATENT | {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 6}
SLIDING = HEADS | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
# kind of target -> class of transformers and its keys
TARGETS = {
    "llama": ("Llama", HEADS),
    "sliding": ("Qwen3", SLIDING),
    "mla": ("DeepseekV3", LATENT),
    "dsa": ("DeepseekV32", SPARSE),
}
NSA = SIZES | {
    "model_type": "nsa",
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "norm_eps": 1e-6,
    "rope_theta": 1e4,
}
NSA |= {"block_size": 4, "block_counts": 4, "window_size": 6, "kernel_stride": 2, "max_position_embeddings": 512}
KINDS = ("nsa", *TARGETS)
DRAFTS = ("dflash", "dflash2", "eagle", "eagle3", "model", "ngram")


def spread(name, tensor, generator):
    """Weights that make choices matter."""
    if tensor.dim() == 1:
        return tensor
    size = 1.0 if "embed" in name else 1.5 * tensor.shape[-1] ** -0.5
    return size * torch.randn(tensor.shape, generator=generator)


def nsa_tensors(generator):
    shapes = {"model.embeddings": (24, 32), "lm_head": (24, 32), "model.norm": (32,)}
    for n in range(5):
        shapes |= {f"model.layers.{n}.{name}_norm": (32,) for name in ("attn", "mlp")}
        widths = {"q": 32, "k": 16, "v": 16, "g": 12}
        shapes |= {f"model.layers.{n}.attn.{name}_proj": (width, 32) for name, width in widths.items()}
        shapes |= {f"model.layers.{n}.attn.o_proj": (32, 32), f"model.layers.{n}.mlp.down_proj": (32, 48)}
        shapes |= {f"model.layers.{n}.mlp.{name}_proj": (48, 32) for name in ("gate", "up")}
    return {f"{name}.weight": spread(name, torch.ones(shape), generator) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def target(dense):
    """``target(kind)``: the folder of a random target."""

    @functools.cache
    def make(kind):
        generator = torch.Generator().manual_seed(3)
        if kind == "nsa":
            return dense.write("target_nsa", NSA | {"dtype": "float32"}, nsa_tensors(generator))
        transformers = pytest.importorskip("transformers")
        name, keys = TARGETS[kind]
        config = getattr(transformers, f"{name}Config")(**SIZES, **ROPE, **keys)
        config.dtype = torch.float32
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        for name, tensor in model.named_parameters():
            tensor.data = spread(name, tensor.data, generator)
        folder = dense.root / f"target_{kind}"
        model.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def draft(dense):
    """``draft(name)``: the options that choose a draft, made for the Qwen3 target."""

    @functools.cache
    def make(name):
        if name in ("eagle", "model"):
            return {"draft_model": dense.eagle if name == "eagle" else dense.target}
        if name == "ngram":
            return {"draft": "ngram"}
        stored = "eagle3" if name == "eagle3" else "dflash"
        meta, tensors = dense.stored(stored)
        tensors = {k.removeprefix("draft."): v for k, v in tensors.items() if k.startswith("draft.")}
        config = meta["draft"] | {"dtype": "float32"}
        if name == "dflash2":
            generator = torch.Generator().manual_seed(6)
            added = {"selector_rank": 4, "selector_top_k": 6, "conv_kernel_size": 2, "conv_group_size": 8}
            config["dflash_config"] = config["dflash_config"] | added
            shapes = {"candidate_selector.hidden_projection.weight": (4, 32)}
            shapes |= {f"candidate_selector.{side}_codebook": (24, 4) for side in ("predecessor", "successor")}
            for conv in (f"layers.{layer}.{around}_conv" for layer in range(2) for around in ("attention", "mlp")):
                shapes |= {f"{conv}.base_kernel": (2, 2, 32), f"{conv}.kernel_projection.weight": (16, 32)}
            tensors |= {key: 0.3 * torch.randn(shape, generator=generator) for key, shape in shapes.items()}
        return {"draft_model": dense.write(f"draft_{name}", config, tensors)}

    return make


def greedy(engine, num_new=14):
    prompts = [tuple(np.random.default_rng(5 + n).integers(0, 24, n).tolist()) for n in (19, 2, 9)]
    tokens, drafted = {}, 0
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt, SamplingParams(max_new_tokens=num_new - i, ignore_eos=True)))
    while engine.has_work():
        for event in engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            drafted += event.spec["drafted"] if event.spec else 0
    return tokens, drafted


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens(kind, dense, target, draft):
    expected, _ = greedy(dense.load(target=target(kind), draft="none"))
    assert len({token for tokens in expected.values() for token in tokens}) > 5
    for name in DRAFTS:
        got, drafted = greedy(dense.load(target=target(kind), **draft(name)))
        assert got == expected and drafted > 0, name


def on_ranks(rank, world, dense, folder, drafts, layout):
    groups = Groups.build(Topology(**layout), rank)
    return {name: greedy(dense.load(target=folder, groups=groups, **options))[0] for name, options in drafts.items()}


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "dp": 2}], ids=["tp2", "dp2"])
@pytest.mark.parametrize("kind", KINDS)
def test_over_ranks(kind, layout, dense, target, draft, run_ranks):
    expected, _ = greedy(dense.load(target=target(kind), draft="none"))
    drafts = {name: draft(name) for name in DRAFTS}
    for found in run_ranks(on_ranks, 2, dense, target(kind), drafts, layout, timeout=180):
        assert found == dict.fromkeys(DRAFTS, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_law(kind, dense, target, draft):
    """The first two tokens of many requests, against whole forwards of the target."""
    prompt = [3, 14, 15, 9, 2, 6, 5, 3, 5]
    params = SamplingParams(max_new_tokens=2, ignore_eos=True, temperature=1.3, top_k=5)
    engine, law, num_samples = dense.load(target=target(kind), draft="none"), {(): 1.0}, 250
    for _ in range(2):
        longer = {}
        for tokens, mass in law.items():
            top = (next_logits(engine, [*prompt, *tokens]).double() / params.temperature).topk(params.top_k)
            for token, share in zip(top.indices.tolist(), top.values.softmax(-1).tolist()):
                longer[(*tokens, token)] = mass * share
        law = longer
    for name in DRAFTS:
        engine = dense.load(target=target(kind), max_running=64, chunk_size=576, gamma=2, **draft(name))
        p = p_value(sample(engine, prompt, params, num_samples), law)
        assert p > 1e-3, f"{name}: p = {p:.1e}"


def sample(engine, prompt, params, num_samples):
    for i in range(num_samples):
        engine.add(Request(str(i), tuple(prompt), params))
    tokens = {str(i): [] for i in range(num_samples)}
    while engine.has_work():
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return [tuple(ids) for ids in tokens.values()]


def p_value(samples, law):
    """Of the chi-square test that ``samples`` come from ``law``; rare outcomes are pooled."""
    seen = dict.fromkeys(law, 0)
    for ids in samples:
        seen[ids] += 1
    cells = [(seen[ids], mass * len(samples)) for ids, mass in law.items()]
    common = [cell for cell in cells if cell[1] >= 5]
    common.append(tuple(np.sum([cell for cell in cells if cell[1] < 5] or [(0, 1e-9)], axis=0)))
    return chi2.sf(sum((o - e) ** 2 / e for o, e in common), len(common) - 1)


def next_logits(engine, tokens):
    slot = engine.cache.acquire()
    assert engine.cache.reserve(slot, len(tokens))
    step = build_step([Span(slot, 0, tokens, 1)], engine.cache.page_table, engine.cache.layout.ratios, 24)
    logits = engine.model.forward(step, engine.cache).logits[0]
    engine.cache.release(slot)
    return logits
