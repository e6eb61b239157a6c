"""Native sparse attention against its formula, written out with masks over all keys, query by query: logits of whole
models in one step, in chunks and token by token, over ranks, and greedy tokens of the engine for every layout."""

import functools
import json

import pytest
import torch
from dspark.layers.attention.nsa import NSASizes
from dspark.layers.kernels import Kernels
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.cache import Cache
from dspark.runtime.checkpoint import CheckpointReader
from dspark.runtime.draft import own_draft
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import cache_layout, load_engine
from dspark.runtime.model_config import load_model_config
from dspark.runtime.models import family
from dspark.runtime.request import Request, SamplingParams
from dspark.runtime.step import Span, build_step
from dspark.runtime.verbs.check import check as check_folder
from safetensors.torch import save_file

CPU = torch.device("cpu")
TOLERANCE = 1e-4
LENGTHS = (40, 23, 3)
BASE = {
    "model_type": "nsa",
    "architectures": ["NSAForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 8,
    "qkv_bias": False,
    "hidden_act": "swish",
    "hidden_ratio": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 1024,
    "norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "fuse_norm": True,
    "elementwise_affine": True,
    "torch_dtype": "float32",
}
LEARNED = {"kernel_size": 4, "kernel_stride": 2, "block_size": 8, "compress_type": "linear"}
CASES = {
    "mean": {"block_size": 4, "block_counts": 4, "window_size": 6},
    "no window": {"block_size": 4, "block_counts": 3, "window_size": None, "init_blocks": 0, "local_blocks": 1},
    "learned": {"block_counts": 3, "window_size": 5, **LEARNED},
    "wide summaries": {"block_counts": 3, "window_size": 5, "block_size": 8, "kernel_size": 8, "kernel_stride": 2},
}
CUTS = {"one step": [40], "chunks": [1, 12, 3, 17, 2, 5], "stepwise": [1] * 40}


def tensors_of(config):
    """Weights in the public naming that make choices matter."""
    generator = torch.Generator().manual_seed(7)
    hidden, width, kv, d = 32, 64, 32, 8
    attention = {"q_proj": (width, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    attention |= {"o_proj": (hidden, width), "g_proj": (24, hidden)}
    mlp = {"gate_proj": (48, hidden), "up_proj": (48, hidden), "down_proj": (hidden, 48)}
    shapes = {"model.embeddings.weight": (96, hidden), "lm_head.weight": (96, hidden)}
    for n in range(2):
        shapes |= {f"model.layers.{n}.attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"model.layers.{n}.mlp.{name}.weight": shape for name, shape in mlp.items()}
        if config.get("compress_type") == "linear":
            size = config["kernel_size"]
            shapes |= {f"model.layers.{n}.attn.{name}": (4, size * d, d) for name in ("compress_key", "compress_value")}
            shapes |= {f"model.layers.{n}.attn.intra_block_pe": (4, size, d)}
    made = {}
    for name, shape in shapes.items():
        fan = shape[1] if "compress" in name else shape[-1]
        scale = 1.0 if "embed" in name or "pe" in name else 1.5 * fan**-0.5
        made[name] = scale * torch.randn(shape, generator=generator)
    norms = ["model.norm", *(f"model.layers.{n}.{name}_norm" for n in range(2) for name in ("attn", "mlp"))]
    return made | {f"{name}.weight": 0.7 + 0.6 * torch.rand(hidden, generator=generator) for name in norms}


def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def turn(x, positions, sign=1):
    """``x`` [T, heads, d] rotated, channels paired as (i, i + d / 2)."""
    inverse = 10000.0 ** -(torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angles = positions.unsqueeze(1) * inverse
    cos, sin = angles.cos().unsqueeze(1), sign * angles.sin().unsqueeze(1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def summaries(config, w, k, v):
    """Keys and values [C, H_k, d] of every whole summary of ``k`` (not rotated) and ``v`` [T, H_k, d]."""
    block = config["block_size"]
    size, stride = config.get("kernel_size", block), config.get("kernel_stride", block)
    keys, values = [], []
    for begin in range(0, len(k) - size + 1, stride):
        at = torch.arange(begin, begin + size)
        if config.get("compress_type") == "linear":
            placed = k[at] + w["intra_block_pe"].transpose(0, 1)
            flat = [x.transpose(0, 1).flatten(1) for x in (placed, v[at])]
            made = [torch.einsum("hf,hfe->he", x, w[f"compress_{n}"]) for x, n in zip(flat, ("key", "value"))]
            keys.append(turn(made[0].unsqueeze(0), torch.tensor([begin]))[0])
            values.append(made[1])
        else:
            keys.append(turn(k[at], at).mean(0))
            values.append(v[at].mean(0))
    return keys, values, size, stride


def softmax_over(q, keys, values, seen):
    """Attention of one query [d] over rows that are ``seen``; zero if none is. Also the weights."""
    if not any(seen):
        return torch.zeros_like(q), torch.zeros(len(keys))
    scores = torch.stack([q @ k for k in keys]) * len(q) ** -0.5
    p = scores.masked_fill(~torch.tensor(seen), -torch.inf).softmax(0)
    return p @ torch.stack(list(values)), p


def attention(config, w, x):
    """The formula, for every query and key head."""
    block, window = config["block_size"], config["window_size"] or 0
    init, local = config.get("init_blocks", 1), config.get("local_blocks", 2)
    num, positions = len(x), torch.arange(len(x))
    q, k, v = ((x @ w[f"{n}_proj.weight"].T).unflatten(1, (-1, 8)) for n in "qkv")
    gates = (x @ w["g_proj.weight"].T).sigmoid().unflatten(1, (-1, 3))
    ck, cv, size, stride = summaries(config, w, k, v)
    q, k = turn(q, positions), turn(k, positions)
    out = torch.zeros(num, 8, 8)
    for t in range(num):
        for h in range(4):
            group, weight, parts = (2 * h, 2 * h + 1), torch.zeros(len(ck)), {}
            whole = [i * stride + size - 1 <= t for i in range(len(ck))]
            for j in group:
                parts[j], p = softmax_over(q[t, j], [c[h] for c in ck], [c[h] for c in cv], whole)
                weight += p
            own, scores = t // block, []
            for b in range(own + 1):
                total = 0.0
                for m in range(block // stride):
                    for n in range(size // stride):
                        i = (block // stride) * (b + 1) - 1 - m - n
                        total += float(weight[i]) if 0 <= i < len(ck) else 0.0
                scores.append(float("inf") if b < init or b > own - local else total)
            best = sorted(range(own + 1), key=lambda b: (-scores[b], b))[: config["block_counts"]]
            selected = [s <= t and s // block in best for s in range(num)]
            near = [t - window < s <= t for s in range(num)]
            for j in group:
                slc, swa = (softmax_over(q[t, j], k[:, h], v[:, h], seen)[0] for seen in (selected, near))
                g = gates[t, j]
                out[t, j] = g[0] * parts[j] + g[1] * slc + g[2] * swa
    return out.flatten(1) @ w["o_proj.weight"].T


def logits_of(config, tensors, ids):
    x = tensors["model.embeddings.weight"][ids]
    for n in range(2):
        part = {k.removeprefix(f"model.layers.{n}."): t for k, t in tensors.items() if f"layers.{n}." in k}
        w = {k.removeprefix("attn."): t for k, t in part.items() if k.startswith("attn.")}
        x = x + attention(config, w, norm(x, part["attn_norm.weight"]))
        y = norm(x, part["mlp_norm.weight"])
        up = torch.nn.functional.silu(y @ part["mlp.gate_proj.weight"].T) * (y @ part["mlp.up_proj.weight"].T)
        x = x + up @ part["mlp.down_proj.weight"].T
    return norm(x, tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """``made(case)``: a folder, token ids of several lengths and their logits by the formula."""

    @functools.cache
    def make(case):
        config = BASE | CASES[case]
        tensors = tensors_of(config)
        folder = tmp_path_factory.mktemp("nsa") / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        generator = torch.Generator().manual_seed(1)
        ids = [torch.randint(3, 96, (length,), generator=generator) for length in LENGTHS]
        return folder, ids, [logits_of(config, tensors, one) for one in ids]

    return make


def build(rank, world, folder, max_context=64):
    groups = Groups.build(Topology(tp=world), rank) if world > 1 else Groups.single()
    config = load_model_config(folder)
    reader = CheckpointReader(folder, config)
    model = family("nsa").build(config, reader, groups, Kernels("torch"), max_context, CPU)
    assert not reader.untaken() or world > 1
    return model, cache_layout(config, range(config.num_layers), 1, 4, world)


def run(rank, world, folder, ids, logits, cuts):
    """How far the logits of requests of several lengths are off, by cut; a request ends when its tokens do."""
    model, layout = build(rank, world, folder)
    found = {}
    for cut in cuts:
        cache = Cache(layout, 4, 6, 64, CPU, torch.float32)
        slots = [cache.acquire() for _ in range(4)][1:]
        assert all(cache.reserve(slot, 40) for slot in slots)
        start, worst = 0, 0.0
        for length in CUTS[cut]:
            parts = [(n, slot, ids[n][start : start + length].tolist()) for n, slot in enumerate(slots)]
            parts = [part for part in parts if part[2]]
            spans = [Span(slot, start, tokens, len(tokens)) for _, slot, tokens in parts]
            step = build_step(spans, cache.page_table, layout.ratios, 96)
            got = model.forward(step, cache).logits.split([len(tokens) for _, _, tokens in parts])
            for (n, _, tokens), one in zip(parts, got):
                worst = max(worst, (one - logits[n][start : start + len(tokens)]).abs().max().item())
            start += length
        found[cut] = worst
    return found


@pytest.mark.parametrize("case", CASES)
def test_against_the_formula(case, made):
    folder, ids, logits = made(case)
    assert logits[0].std() > 0.5
    for cut, error in run(0, 1, folder, ids, logits, CUTS).items():
        assert error <= TOLERANCE, f"{cut}: logits are off by {error:.2e}"


@pytest.mark.parametrize("case, world", [("mean", 2), ("learned", 4), ("mean", 8)])
def test_several_ranks(case, world, made, run_ranks):
    """On 8, two ranks each hold a query head of the same key head."""
    folder, ids, logits = made(case)
    for found in run_ranks(run, world, folder, ids, logits, ["chunks", "stepwise"]):
        assert max(found.values()) <= TOLERANCE, found


@pytest.mark.parametrize("case", ["mean", "wide summaries"])
def test_check_prints_what_the_kind_promises(case, made):
    """Per token and layer: keys and values of 4 heads of 8, and as much again for every stride."""
    report = check_folder(made(case)[0], Topology(), 4, 1, 64)
    stride = CASES[case].get("kernel_stride", 4)
    assert report["ok"] and report["memory"]["cache_per_token"] == 4 * 2 * 64 * (1 + 1 / stride)


def test_sizes_of_the_paper():
    """Keys read of 64k, a tenth of a full layer's; each part is bounded but for the summaries."""
    sizes = NSASizes(2560, 64, 4, 192, 32, 16, 64, 16, 512)
    assert sizes.num_summaries(31) == 0 and sizes.num_summaries(32) == 1 and sizes.num_summaries(48) == 2
    assert sizes.keys_read(65536) == 4095 + 1024 + 512
    assert sizes.keys_read(20) == 40
    assert sizes.operations(65536) == 4 * 64 * 192 * 5631


def test_sparsity(made):
    """Distinct keys that a token reads of a growing context: bounded, but for one summary a stride."""
    model, layout = build(0, 1, made("mean")[0], 1024)
    sizes, chosen, shares = model.config.attention[0], [], []

    def probe(name, layer, value):
        if name == "selected" and layer == 0:
            chosen.append(value)

    cache, ids = Cache(layout, 1, 4, 1024, CPU, torch.float32), torch.arange(801).remainder(90).tolist()
    assert cache.reserve(cache.acquire(), 801)
    for begin, end in ((0, 20), (20, 100), (100, 800)):
        for span in (Span(0, begin, ids[begin:end], 1), Span(0, end, ids[end : end + 1], 1)):
            model.forward(build_step([span], cache.page_table, layout.ratios, 96), cache, probe)
        for blocks in chosen[-1][0].tolist():
            own = end // 4
            assert len(blocks) == len(set(blocks)) == 4 and {0, own - 1, own} < set(blocks)
            selected = {token for block in blocks for token in range(4 * block, 4 * block + 4) if token <= end}
            distinct = sizes.num_summaries(end + 1) + len(selected | set(range(end - 5, end + 1)))
            assert distinct <= sizes.keys_read(end + 1) == (end + 1) // 4 + 16 + 6
        shares.append(distinct / (end + 1))
    assert shares[0] > 0.8 and shares[1] < 0.45 and shares[2] < 0.28


LAYOUTS = {
    "dp 2": {"tp": 2, "dp": 2},
    "cp 2 interleave": {"tp": 2, "cp": 2},
    "cp 2 zigzag": {"tp": 2, "cp": 2, "cp_split": "zigzag"},
    "tp 2 pp 2": {"tp": 2, "pp": 2},
    "tp 8, halves": {"tp": 8, "overlap": "tbo", "overlap_min_rows": 1},
}


def decode(rank, world, folder, prompts, layout=None, **options):
    layout = dict(layout or {})
    options |= {name: layout.pop(name) for name in [*layout] if name in EngineConfig.__dataclass_fields__}
    config = resolve(
        EngineConfig(**{"max_context": 1024, "max_running": 2, "chunk_size": 16} | options),
        model_dir=str(folder),
        device_type="cpu",
        max_positions=1024,
        own_draft=own_draft(load_model_config(folder), options.get("draft_model")),
    )
    groups = Groups.build(Topology(**layout), rank) if world > 1 else Groups.single()
    engine = load_engine(config, groups, CPU)
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), tuple(prompt), SamplingParams(max_new_tokens=12, ignore_eos=True)))
    tokens = {str(i): [] for i in range(len(prompts))}
    while engine.has_work():
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return list(tokens.values())


@pytest.mark.parametrize("case", ["mean", "learned"])
def test_layouts(case, made, run_ranks):
    """The engine's greedy tokens, with drafts that are rolled back and with prompts that share pages."""
    folder, ids, logits = made(case)
    shared = torch.arange(300).remainder(90).tolist()
    prompts = [ids[0].tolist(), ids[2].tolist(), [*shared, 5, 6], [*shared, 7], [*shared, 7, 8]]
    expected = decode(0, 1, folder, prompts, chunk_size=512)
    assert expected[0][0] == logits[0][-1].argmax()
    ways = [{"chunk_size": 5, "max_running": 5}, {"prefix_cache": True, "max_running": 1}]
    if case == "learned":
        ways += [{"draft": "ngram"}, {"draft": "model", "draft_model": str(made("mean")[0]), "gamma": 3}]
    for options in ways:
        assert decode(0, 1, folder, prompts, **options) == expected, options
    for name in ["cp 2 interleave", "tp 2 pp 2", "tp 8, halves"] if case == "learned" else ["dp 2", "cp 2 zigzag"]:
        layout = LAYOUTS[name]
        assert run_ranks(decode, layout["tp"] * layout.get("pp", 1), folder, prompts, layout)[0] == expected, name


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"kernel_size": 3, "kernel_stride": 2}, "kernel_size 3 is not a multiple of kernel_stride 2"),
        ({"kernel_size": 8}, "kernel_size is 8, outside \\[1, 4\\]"),
        ({"block_counts": 2}, r"block_counts \(init_blocks \+ local_blocks at least\) is 2, outside \[3"),
        ({"compress_type": "conv"}, "compress_type is 'conv', not mean or linear"),
        ({"qkv_bias": True}, "qkv_bias is True"),
        ({"num_kv_heads": 3}, "num_heads 8 is not a multiple of num_kv_heads 3"),
    ],
)
def test_refused_configs(keys, message):
    with pytest.raises(ValueError, match=message):
        family("nsa").read_config(BASE | CASES["mean"] | keys, None)


def test_refused_layouts(made):
    folder, _, _ = made("mean")
    report = check_folder(folder, Topology(tp=16), 4, 1, 64)
    assert not report["ok"]
    assert any("num_attention_heads = 8 is not divisible by attn_tp = 16" in p for p in report["problems"])
    with pytest.raises(ValueError, match="--cp-keys ring .* but the model has .*nsa"):
        decode(0, 1, folder, [], cp_keys="ring")
