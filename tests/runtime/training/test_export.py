"""Checkpoints that training writes: read strictly, with the weights that were trained."""

import json

import pytest
import torch
from dspark.runtime.checkpoint import CheckpointReader, bundled_model
from dspark.runtime.model_config import load_model_config
from dspark.runtime.training.export import without_draft
from dspark.runtime.training.methods import METHODS, Recipe
from safetensors import safe_open
from safetensors.torch import load_file

RECIPE = Recipe(gamma=7, target_layer_ids=(3,), noise_token_id=2, num_experts=4, top_k=2, markov_rank=8)


def build(method, model, **changes):
    import dataclasses

    config = load_model_config(model)
    plain = dataclasses.replace(config, dspark=None, num_nextn_predict_layers=0)
    recipe = dataclasses.replace(RECIPE, **changes)
    reader = CheckpointReader(model, config)
    return METHODS[method].build(recipe, plain, reader, torch.Generator().manual_seed(0), torch.device("cpu"))


def check(folder, draft, target):
    """Every trained tensor and every tensor of the target is there, and nothing else."""
    config = load_model_config(folder)
    reader = CheckpointReader(folder, config)
    assert sorted(reader.names("draft")) == sorted(draft.weights)
    for name, weight in draft.weights.items():
        assert torch.equal(reader.take(name), weight), name
    original = CheckpointReader(target, load_model_config(target))
    names = original.names("target")
    assert sorted(reader.names("target")) == sorted(names)
    for name in names[:: max(len(names) // 20, 1)]:
        assert torch.equal(reader.take(name), original.take(name)), name
    return config


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_dspark(tmp_path, kind):
    draft = build("dspark", bundled_model(), markov_head=kind)
    draft.write(bundled_model(), tmp_path / "out", {"steps": 3})
    announced = check(tmp_path / "out", draft, bundled_model()).dspark
    assert announced == draft.model.draft and announced.markov_head_type == kind
    assert json.loads((tmp_path / "out" / "draft_training.json").read_text()) == {"steps": 3}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (bundled_model() / "tokenizer.json").read_bytes()


def test_dflash(tmp_path):
    draft = build("dflash", bundled_model())
    draft.write(bundled_model(), tmp_path / "out", {})
    announced = check(tmp_path / "out", draft, bundled_model()).dspark
    assert announced.markov_rank == 0 and not announced.enable_confidence_head and announced.block_size == 7


def test_mtp(tmp_path):
    draft = build("mtp", bundled_model())
    draft.write(bundled_model(), tmp_path / "out", {})
    config = check(tmp_path / "out", draft, bundled_model())
    assert config.dspark is None and config.num_nextn_predict_layers == 1


def test_writing_again_replaces_and_a_trained_folder_can_be_the_target(tmp_path):
    first = build("dspark", bundled_model())
    first.write(bundled_model(), tmp_path / "a", {})
    second = build("dspark", tmp_path / "a", markov_rank=16, gamma=5)
    second.write(tmp_path / "a", tmp_path / "b", {})
    config = check(tmp_path / "b", second, bundled_model())
    assert config.dspark.markov_rank == 16 and config.dspark.block_size == 5
    third = build("mtp", tmp_path / "b")
    third.write(tmp_path / "b", tmp_path / "a", {})
    assert check(tmp_path / "a", third, bundled_model()).dspark is None


def test_a_draft_inside_the_target_file_is_taken_out(tmp_path):
    from safetensors.torch import save_file

    first = build("dspark", bundled_model())
    first.write(bundled_model(), tmp_path / "a", {})
    shards = sorted((tmp_path / "a").glob("model-*.safetensors"))
    merged = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    for path in (*shards, tmp_path / "a" / "model.safetensors.index.json"):
        path.unlink()
    save_file(merged, tmp_path / "a" / "model.safetensors")
    second = build("dflash", tmp_path / "a")
    second.write(tmp_path / "a", tmp_path / "b", {})
    check(tmp_path / "b", second, bundled_model())


def test_the_target_is_not_overwritten(tmp_path):
    draft = build("dspark", bundled_model())
    draft.write(bundled_model(), tmp_path / "a", {})
    with pytest.raises(ValueError, match="own folder"):
        draft.write(tmp_path / "a", tmp_path / "a", {})


def test_eagle3_is_a_folder_of_its_own(tmp_path):
    draft = build("eagle3", bundled_model(), target_layer_ids=(1, 2, 3))
    draft.write(bundled_model(), tmp_path / "out", {"steps": 1})
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as stream:
        assert sorted(stream.keys()) == sorted(draft.weights)
        assert all(torch.equal(stream.get_tensor(name), weight) for name, weight in draft.weights.items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle3_target_layer_ids"] == [1, 2, 3] and config["model_type"] == "dspark_eagle3_v4"


def test_flat_configs_lose_the_entries_of_their_draft():
    flat = {"num_hidden_layers": 2, "compress_ratios": [0, 4, 0], "num_nextn_predict_layers": 1, "dspark_block_size": 5}
    assert without_draft(flat) == {"num_hidden_layers": 2, "compress_ratios": [0, 4]}
