"""Reading: both namings, one file and shards, slices, and what a rank asks for."""

import json
import os

import numpy as np
import pytest
import torch
from dspark.runtime.checkpoint import (
    CheckpointError,
    CheckpointReader,
    bundled_model,
    expected_tensors,
    inspect_checkpoint,
)
from dspark.runtime.model_config import load_model_config
from safetensors.torch import load_file

# Canonical names below "layers.N." and HuggingFace's.
HF_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
} | {f"hc_{sub}_{part}": f"{sub}_hc.{part}" for sub in ("attn", "ffn") for part in ("fn", "base", "scale")}
HF_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
} | {f"hc_head_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")}


def hf_tensor(whole, name):
    """The tensor with the canonical ``name`` out of a dict of HuggingFace names."""
    if name in HF_TOP:
        return whole[HF_TOP[name]]
    _, layer, rest = name.split(".", 2)
    prefix = f"model.layers.{layer}."
    if rest in HF_NAMES:
        return whole[prefix + HF_NAMES[rest]]
    _, _, expert, matrix, _ = rest.split(".")
    if matrix == "w2":
        return whole[f"{prefix}mlp.experts.down_proj"][int(expert)]
    return whole[f"{prefix}mlp.experts.gate_up_proj"][int(expert)].chunk(2)[0 if matrix == "w1" else 1]


def to_hf(weights, num_experts):
    """Arrays by canonical names -> arrays by HuggingFace's, experts stacked."""
    result = {}
    for name, array in weights.items():
        if name in HF_TOP:
            result[HF_TOP[name]] = array
        elif ".experts." not in name:
            _, layer, rest = name.split(".", 2)
            result[f"model.layers.{layer}.{HF_NAMES[rest]}"] = array
    for layer in {name.split(".")[1] for name in weights if name.startswith("layers.")}:
        prefix = f"layers.{layer}.ffn.experts"
        parts = [{m: weights[f"{prefix}.{e}.{m}.weight"] for m in ("w1", "w2", "w3")} for e in range(num_experts)]
        stacked = f"model.layers.{layer}.mlp.experts"
        result[f"{stacked}.gate_up_proj"] = np.stack([np.concatenate([p["w1"], p["w3"]]) for p in parts])
        result[f"{stacked}.down_proj"] = np.stack([p["w2"] for p in parts])
    return result


def take_all(folder, config=None, **how):
    config = load_model_config(folder) if config is None else config
    reader = CheckpointReader(folder, config, **how)
    taken = {name: reader.take(name) for name in reader.names()}
    assert reader.untaken() == []
    return taken


def assert_same(taken, weights):
    assert set(taken) == set(weights)
    for name, array in weights.items():
        assert torch.equal(taken[name], torch.as_tensor(array)), name


def test_namings_shards_and_prefix(tiny, tmp_path):
    weights = tiny.weights
    assert_same(take_all(tiny.write(tmp_path / "orig")), weights)
    prefixed = {f"model.{name}": array for name, array in weights.items()}
    assert_same(take_all(tiny.write(tmp_path / "prefixed", prefixed)), weights)
    assert_same(take_all(tiny.write(tmp_path / "hf", to_hf(weights, 4))), weights)
    assert_same(take_all(tiny.write_shards(tmp_path / "shards", tiny.halves())), weights)
    # What saving a loaded model through transformers makes of the key norm and the head's mixing weights.
    odd = {
        name.replace("attn.kv_norm", "attn.norm").replace("hc_head_", "hc_head.hc_"): a for name, a in weights.items()
    }
    assert_same(
        take_all(tiny.write(tmp_path / "mixed", {f"model.{name}": array for name, array in odd.items()})), weights
    )


def test_bundled_model():
    folder = bundled_model()
    whole = load_file(folder / "model-00001-of-00002.safetensors")
    taken = take_all(folder)
    assert len(taken) == len(whole) + len(load_file(folder / "model-00002-of-00002.safetensors"))
    assert len(whole) == 306
    assert torch.equal(taken["layers.2.attn.kv_norm.weight"], whole["model.layers.2.attn.norm.weight"])
    assert torch.equal(taken["hc_head_fn"], whole["model.hc_head.hc_fn"])
    expert = "layers.3.ffn.experts.7.w2.weight"
    assert torch.equal(taken[expert], whole[f"model.{expert}"])
    assert (folder / "licenses" / "python3.12.txt").is_file() and (folder / "README.md").is_file()


def test_bundled_files_are_unchanged(shared):
    """The target is what was trained; the draft beside it came later, and config.json tells of it."""
    ours = {"model.safetensors": "model-00001-of-00002.safetensors"}
    for origin, copy in (("v4-tiny", bundled_model()), ("licenses", bundled_model() / "licenses")):
        files = [path for path in (shared / "models" / origin).iterdir() if path.is_file()]
        assert len(files) >= 7
        for path in files:
            if path.name == "config.json":
                config = json.loads((copy / path.name).read_text())
                assert json.loads(path.read_text()).items() <= config.items()
            else:
                assert (copy / ours.get(path.name, path.name)).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    "case", ["sliding_only", "csa_only", "hca_only", "mixed_hash", "mixed_yarn", "softmax_router", "orig_names"]
)
def test_oracles(shared, case):
    folder = shared / "oracle" / "v4" / case
    whole = {}
    for path in sorted(folder.glob("model*.safetensors")):
        whole |= load_file(path)
    taken = take_all(folder)
    assert set(taken) == {n for n, s in expected_tensors(load_model_config(folder)).items() if s.copy_of is None}
    for name, tensor in taken.items():
        assert torch.equal(tensor, whole[name] if case == "orig_names" else hf_tensor(whole, name)), name


def test_slices_are_slices_of_the_whole(tiny, tmp_path):
    generator = np.random.default_rng(7)
    for folder in (tiny.write(tmp_path / "orig"), tiny.write(tmp_path / "hf", to_hf(tiny.weights, 4))):
        reader = CheckpointReader(folder, tiny.config)
        for name, array in tiny.weights.items():
            for dim, size in enumerate(array.shape):
                start, stop = sorted(generator.integers(0, size + 1, 2).tolist())
                part = reader.take(name, dim=dim, start=start, stop=stop)
                assert part.is_contiguous()
                assert torch.equal(part, torch.as_tensor(array).narrow(dim, start, stop - start)), (name, dim)


def test_only_the_slices_are_read(tiny, tmp_path):
    read = []
    reader = CheckpointReader(tiny.write(tmp_path / "one"), tiny.config, progress=read.append)
    assert read == []
    reader.take("embed.weight", start=10, stop=20)
    reader.take("layers.1.attn.wo_b.weight", dim=1, start=4, stop=8)
    assert read == [10 * 32 * 4, 32 * 4 * 4]
    assert "layers.1.attn.wo_b.weight" not in reader.untaken() and "head.weight" in reader.untaken()
    assert reader.nbytes() == sum(array.nbytes for array in tiny.weights.values())


def test_types(tiny, tmp_path):
    tensors = dict(tiny.weights)
    half = tensors["norm.weight"].astype(np.float16)
    tensors["norm.weight"] = half
    bits = torch.as_tensor(tensors["head.weight"]).bfloat16()
    tensors["head.weight"] = ("BF16", bits.shape, bits.view(torch.uint8).numpy().tobytes())
    table = tensors["layers.0.ffn.gate.tid2eid"]
    tensors["layers.0.ffn.gate.tid2eid"] = ("I32", table.shape, table.astype(np.int32).tobytes())
    reader = CheckpointReader(tiny.write(tmp_path / "one", tensors), tiny.config, torch.bfloat16)
    assert torch.equal(reader.take("norm.weight"), torch.as_tensor(half).bfloat16())
    assert torch.equal(reader.take("norm.weight", dtype=torch.float32), torch.as_tensor(half).float())
    assert torch.equal(reader.take("head.weight", dtype=torch.float32), bits.float())
    ids = reader.take("layers.0.ffn.gate.tid2eid", dtype=torch.float32)
    assert ids.dtype == torch.int64 and torch.equal(ids, torch.as_tensor(table))
    own = reader.take("embed.weight")
    own.zero_()
    assert reader.take("embed.weight").abs().sum() > 0


def test_ranges_are_checked(tiny, tmp_path):
    reader = CheckpointReader(tiny.write(tmp_path / "one"), tiny.config)
    for wrong in ({"start": 30, "stop": 41}, {"start": -1}, {"start": 5, "stop": 4}, {"dim": 2}):
        with pytest.raises(CheckpointError, match=r"embed\.weight"):
            reader.take("embed.weight", **wrong)
    with pytest.raises(CheckpointError, match="layers.9"):
        reader.take("layers.9.attn_norm.weight")


DRAFT = {
    "dspark_block_size": 3,
    "dspark_markov_rank": 6,
    "dspark_noise_token_id": 2,
    "dspark_target_layer_ids": [0, 2],
    "compress_ratios": [0, 4, 128, 0, 0],
}


def test_draft_heads_wherever_they_are(make_tiny, tmp_path):
    tiny = make_tiny(**DRAFT)
    assert_same(take_all(tiny.write(tmp_path / "last")), tiny.weights)
    renames = {
        "mtp.1.markov_head.markov_w1": "mtp.0.markov_head.embed",
        "mtp.1.markov_head.markov_w2": "mtp.0.markov_head.head",
    }
    moved = {}
    for name, array in tiny.weights.items():
        for old, new in renames.items():
            name = name.replace(old, new)
        moved[name.replace("mtp.1.confidence_head", "mtp.0.confidence_head")] = array
    assert set(moved) != set(tiny.weights)
    assert_same(take_all(tiny.write(tmp_path / "first", moved)), tiny.weights)
    both = {**moved, "mtp.1.markov_head.markov_w1.weight": tiny.weights["mtp.1.markov_head.markov_w1.weight"]}
    with pytest.raises(CheckpointError, match=r"markov_w1\.weight is there twice"):
        take_all(tiny.write(tmp_path / "twice", both))


def test_draft_present_absent_and_partial(make_tiny, tmp_path):
    drafted, plain = make_tiny(**DRAFT), make_tiny()
    nextn = make_tiny(num_nextn_predict_layers=1, compress_ratios=[0, 4, 128, 0])
    assert CheckpointReader(drafted.write(tmp_path / "a"), drafted.config).has_draft
    with pytest.raises(CheckpointError, match=r"announces a DSpark draft of 2 stages, but there is no mtp\.\* tensor"):
        CheckpointReader(drafted.write(tmp_path / "b", plain.weights), drafted.config)
    # Libraries that do not know prediction layers drop them on saving and keep the key.
    assert not CheckpointReader(nextn.write(tmp_path / "c", plain.weights), nextn.config).has_draft
    partial = {name: array for name, array in drafted.weights.items() if "mtp.1.ffn.shared_experts" not in name}
    with pytest.raises(CheckpointError, match=r"3 tensors are missing and 0 are unused; mtp\.1\.ffn\.shared_experts"):
        CheckpointReader(drafted.write(tmp_path / "d", partial), drafted.config)
    with pytest.raises(CheckpointError, match=r"0 tensors are missing and \d+ are unused; mtp\.0"):
        CheckpointReader(plain.write(tmp_path / "e", drafted.weights), plain.config)


def test_copies_of_the_embedding(make_tiny, tmp_path):
    tiny = make_tiny(num_nextn_predict_layers=1, compress_ratios=[0, 4, 128, 0])
    tensors = {**tiny.weights, "mtp.0.embed.weight": tiny.weights["embed.weight"]}
    reader = CheckpointReader(tiny.write(tmp_path / "same", tensors), tiny.config)
    reader.check_copies()
    assert "mtp.0.embed.weight" not in reader.untaken("draft")
    tensors["mtp.0.embed.weight"] = tiny.weights["embed.weight"] + np.float32(1)
    reader = CheckpointReader(tiny.write(tmp_path / "other", tensors), tiny.config)
    with pytest.raises(CheckpointError, match=r"mtp\.0\.embed\.weight should repeat embed\.weight"):
        reader.check_copies()


def test_links_inside_the_hub_cache(tiny, tmp_path):
    blobs, snapshot = tmp_path / "model" / "blobs", tmp_path / "model" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(tiny.raw))
    (blobs / "0123").write_bytes(tiny.pack(tiny.weights))
    os.symlink("../../blobs/0123", snapshot / "model.safetensors")
    assert_same(take_all(snapshot), tiny.weights)


def test_inspection_lists_every_problem(tiny, tmp_path):
    tensors = {name: array for name, array in tiny.weights.items() if "w3" not in name} | {
        "extra": np.zeros(1, np.float32)
    }
    problems = inspect_checkpoint(tiny.write(tmp_path / "one", tensors), tiny.config).problems
    missing = [name for name in tiny.weights if "w3" in name]
    assert problems[0] == f"{len(missing)} tensors are missing and 1 are unused"
    assert set(problems[1:]) == {f"{name} is missing" for name in missing} | {"extra is not a tensor of this model"}
