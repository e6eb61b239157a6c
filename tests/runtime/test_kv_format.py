"""``--kv-format fp8``: logits near those of full precision, and the same tokens for every cut into steps and ranks."""

import json
import pathlib

import pytest
import torch
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.cache import Cache
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.cli import main
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import cache_layout, load_engine
from dspark.runtime.model_config import load_model_config
from dspark.runtime.request import Request, SamplingParams
from dspark.runtime.score import score
from safetensors.torch import load_file

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
CPU = torch.device("cpu")
# Of the bundled model, whose logits have a standard deviation of 4.4: means over all tokens of the golden prompts.
MOST_DIVERGENCE, MOST_RMS, LEAST_SAME_CHOICES, MOST_NLL_CHANGE = 5e-3, 0.25, 0.97, 5e-3
LAYOUTS = {
    "tp 2": {"tp": 2},
    "dp 2, prefixes": {"tp": 2, "dp": 2, "prefix_cache": True},
    "cp 2": {"tp": 2, "cp": 2},
    "pp 2, dspark": {"pp": 2, "draft": "dspark"},
}


def engine_of(folder, groups=None, own_draft="none", **options):
    config = resolve(
        EngineConfig(**{"max_running": 4, "max_context": 512, "kv_format": "fp8"} | options),
        model_dir=str(folder),
        device_type="cpu",
        max_positions=4096,
        own_draft=own_draft,
    )
    return load_engine(config, groups or Groups.single(), CPU)


def logits(folder, sequences, chunks, **options):
    """[all tokens, V]."""
    found = [[] for _ in sequences]
    score(engine_of(folder, **options), sequences, chunks, lambda i, start, rows: found[i].append(rows.clone()))
    return torch.cat([torch.cat(rows) for rows in found])


def golden_items():
    return json.loads((DATA / "models" / "golden.json").read_text())["items"]


def test_logits_are_near_those_of_full_precision():
    sequences = [[*item["prompt_ids"], *item["output_ids"]][:200] for item in golden_items()[:6]]
    exact, packed = (logits(bundled_model(), sequences, (512,), kv_format=name) for name in ("native", "fp8"))
    laws = [rows.double().log_softmax(-1) for rows in (exact, packed)]
    divergence = (laws[0].exp() * (laws[0] - laws[1])).sum(-1).mean()
    rms = (exact - packed).square().mean().sqrt()
    same = (exact.argmax(-1) == packed.argmax(-1)).double().mean()
    ends = torch.tensor([len(tokens) for tokens in sequences]).cumsum(0) - 1
    inner = torch.ones(len(exact), dtype=torch.bool)
    inner[ends] = False
    following = torch.tensor([token for tokens in sequences for token in tokens[1:]])
    nll = [-law[inner].gather(1, following[:, None]).mean() for law in laws]
    figures = f"divergence {divergence:.1e}, rms {rms:.3f}, same {same:.4f}, nll {nll[0]:.4f} and {nll[1]:.4f}"
    assert 0 < divergence <= MOST_DIVERGENCE and rms <= MOST_RMS and same >= LEAST_SAME_CHOICES, figures
    assert abs(nll[1] / nll[0] - 1) <= MOST_NLL_CHANGE, figures


def test_logits_do_not_depend_on_the_cut_into_steps():
    """A key is rounded in the step as it is in the cache. Only sums in another order, which can move a number to the
    next code, are left."""
    folder = DATA / "v4" / "mixed_yarn"
    sequences = load_file(folder / "golden.safetensors")["input_ids"].tolist()
    whole = logits(folder, sequences, (512,))
    for chunks in ((7, 1, 3), (1,)):
        assert (logits(folder, sequences, chunks) - whole).abs().max() <= 5e-3


def decode(rank, world, prompts, layout):
    options = {name: value for name, value in layout.items() if name in EngineConfig.__dataclass_fields__}
    sizes = {name: value for name, value in layout.items() if name not in options}
    groups = Groups.build(Topology(**sizes), rank) if world > 1 else Groups.single()
    engine = engine_of(bundled_model(), groups, **{"draft": "none", "chunk_size": 32} | options)
    assert {layer.window.dtype for layer in engine.cache.layers} == {torch.uint8}
    tokens = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), tuple(prompt), SamplingParams(max_new_tokens=10, ignore_eos=True)))
    while engine.has_work():
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return list(tokens.values())


def test_layouts_give_the_same_tokens(run_ranks):
    prompts = [item["prompt_ids"][:90] for item in golden_items()[:4]]
    expected = decode(0, 1, prompts, {})
    assert decode(0, 1, prompts, {"draft": "dspark", "chunk_size": 512}) == expected
    for name, layout in LAYOUTS.items():
        world = layout.get("tp", 1) * layout.get("pp", 1)
        assert run_ranks(decode, world, prompts, layout)[0] == expected, name


def test_check_counts_the_bytes(capsys):
    """Rows of 32 with a rotated tail: 8-bit numbers, one exponent, and the tail at 2 bytes, to a multiple of 8."""
    sizes = {}
    for name in ("native", "fp8"):
        assert main(["check", "--json", "--dtype", "bfloat16", "--kv-format", name]) == 0
        sizes[name] = json.loads(capsys.readouterr().out)["memory"]
    config = load_model_config(bundled_model())
    row = -(-(2 * config.rope_dim + (32 - config.rope_dim) + 1) // 8) * 8
    assert sizes["fp8"]["cache_per_token"] == 2 * (row + 2 * 32) / 4 + row / 16
    assert sizes["native"]["cache_per_request"] - sizes["fp8"]["cache_per_request"] == 4 * (64 + 8) * (2 * 32 - row)
    layout = cache_layout(config, range(4), 8, 2, packed=True)
    cache = Cache(layout, 3, 5, 512, CPU, torch.bfloat16)
    held = sum(buffer.nbytes for layer in cache.layers for buffer in layer[:4])
    assert held == 3 * layout.bytes_per_slot + 5 * layout.bytes_per_page


def test_what_cannot_be_packed_is_refused(tmp_path):
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
    raw = {"model_type": "llama", "rope_theta": 1e4, "bos_token_id": 0, "eos_token_id": 1, "dtype": "float32"}
    raw |= sizes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="--kv-format fp8 works on deepseek_v4 models, but this one is llama"):
        cache_layout(load_model_config(tmp_path), range(2), 1, 2, packed=True)
    with pytest.raises(ValueError, match="--deterministic with --kv-format fp8 needs --kernels triton"):
        engine_of(bundled_model(), deterministic=True)
    with pytest.raises(ValueError, match="--kv-format is 'fp4'; allowed: native, fp8"):
        engine_of(bundled_model(), kv_format="fp4")
