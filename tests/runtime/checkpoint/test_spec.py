"""The list of tensors against what is known of released checkpoints."""

import json
import math
import pathlib
from collections import Counter

import pytest
from dspark.runtime.checkpoint import expected_tensors
from dspark.runtime.model_config import ModelConfig

DATA = pathlib.Path(__file__).resolve().parents[2] / "data" / "checkpoint"
QUANTISED = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "main_proj", "w1", "w2", "w3")


def released_format(name, spec):
    """How the releases store a tensor: (dtype, bytes), and the same for its scales if it has any."""
    count, stem = math.prod(spec.shape), name.split(".")[-2] if "." in name else ""
    if spec.kind == "table":
        return ("I64", 8 * count), None
    if ".experts." in name:
        return ("I8", count // 2), count // 32
    if stem in QUANTISED and "compressor" not in name:
        return ("F8_E4M3", count), math.ceil(spec.shape[0] / 128) * math.ceil(spec.shape[1] / 128)
    if any(part in name for part in ("hc_", "ape", "attn_sink", "gate.bias")):
        return ("F32", 4 * count), None
    return ("BF16", 2 * count), None


@pytest.mark.parametrize(
    "name, num_tensors, num_bytes", [("flash", 72_317, 166_878_536_440), ("pro", 149_782, 892_727_580_904)]
)
def test_released_checkpoints_have_these_tensors(name, num_tensors, num_bytes):
    """The published number of tensors and payload bytes of both releases with a bundled draft."""
    specs = expected_tensors(ModelConfig.from_dict(json.loads((DATA / f"{name}.json").read_text())))
    stored = [released_format(*item) for item in specs.items() if item[1].copy_of is None]
    scales = [scale for _, scale in stored if scale is not None]
    assert len(stored) + len(scales) == num_tensors
    assert sum(size for (_, size), _ in stored) + sum(scales) == num_bytes


def test_the_draft_of_the_flash_release():
    """Published: 4,705 tensors under mtp., by number format."""
    specs = expected_tensors(ModelConfig.from_dict(json.loads((DATA / "flash.json").read_text())))
    draft = {name: spec for name, spec in specs.items() if spec.role == "draft" and spec.copy_of is None}
    formats = [released_format(*item) for item in draft.items()]
    counts = Counter(dtype for (dtype, _), _ in formats)
    assert counts == {"BF16": 20, "F32": 27, "F8_E4M3": 25, "I8": 2304}
    assert sum(scale is not None for _, scale in formats) == 2329
    assert {name for name in draft if name.startswith("mtp.2.") and "head" in name} == {
        "mtp.2.hc_head_fn",
        "mtp.2.hc_head_base",
        "mtp.2.hc_head_scale",
        "mtp.2.markov_head.markov_w1.weight",
        "mtp.2.markov_head.markov_w2.weight",
        "mtp.2.confidence_head.proj.weight",
    }
    assert "mtp.0.main_proj.weight" in draft and "mtp.1.main_proj.weight" not in draft
    assert "mtp.1.norm.weight" not in draft and "mtp.2.norm.weight" in draft


def test_plain_prediction_layers(make_tiny):
    specs = make_tiny(num_nextn_predict_layers=2, compress_ratios=[0, 4, 128, 0, 0]).specs
    for stage in (0, 1):
        for name in ("e_proj.weight", "h_proj.weight", "enorm.weight", "hnorm.weight", "norm.weight", "hc_head_fn"):
            assert f"mtp.{stage}.{name}" in specs
    assert specs["mtp.1.ffn.gate.bias"].shape == (4,) and specs["mtp.1.embed.weight"].copy_of == "embed.weight"
    assert not any("compressor" in name for name in specs if name.startswith("mtp."))


@pytest.mark.parametrize(
    "kind, extra", [("vanilla", {}), ("gated", {"gate_proj": (6, 38)}), ("rnn", {"joint_proj": (18, 44)})]
)
def test_draft_heads(make_tiny, kind, extra):
    specs = make_tiny(
        dspark_block_size=3,
        dspark_markov_rank=6,
        dspark_markov_head_type=kind,
        dspark_noise_token_id=2,
        dspark_target_layer_ids=[0, 2],
        confidence_head_with_markov=kind != "vanilla",
    ).specs
    heads = {name.split(".")[3]: spec.shape for name, spec in specs.items() if name.startswith("mtp.1.markov_head.")}
    assert heads == {"markov_w1": (40, 6), "markov_w2": (40, 6), **{name: heads[name] for name in extra}}
    for name, shape in extra.items():
        assert specs[f"mtp.1.markov_head.{name}.weight"].shape == shape
        assert specs[f"mtp.1.markov_head.{name}.bias"].shape == shape[:1]
    assert specs["mtp.1.confidence_head.proj.weight"].shape == (1, 32 if kind == "vanilla" else 38)
    assert specs["mtp.0.main_proj.weight"].shape == (32, 64)
