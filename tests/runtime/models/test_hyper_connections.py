"""V4 with unconstrained hyper-connections: the bundled model read as one, over layouts, kernels, chunks and drafts."""

import json
import shutil

import pytest
import torch
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.draft import own_draft
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import load_engine
from dspark.runtime.model_config import load_model_config
from dspark.runtime.request import Request, SamplingParams
from dspark.runtime.training.methods import Recipe
from dspark.runtime.training.run import check_recipe

PROMPTS = [[3, 41, 59, 26, 53, 58], list(range(100, 190)), [7]]
LAYOUTS = {"tp 2": {"tp": 2}, "dp 2, ep 2": {"tp": 2, "dp": 2, "ep": 2}, "pp 2": {"pp": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("hc") / "model"
    shutil.copytree(bundled_model(), made)
    return changed(made, "hc")


def changed(folder, kind):
    keys = json.loads((folder / "config.json").read_text()) | {"hc_kind": kind}
    (folder / "config.json").write_text(json.dumps(keys))
    return folder


def decode(rank, world, folder, layout=None, **options):
    config = resolve(
        EngineConfig(**{"max_context": 256, "max_running": 3, "chunk_size": 64, "draft": "none"} | options),
        model_dir=str(folder),
        device_type="cpu",
        max_positions=4096,
        own_draft=own_draft(load_model_config(folder)),
    )
    groups = Groups.build(Topology(**layout), rank) if layout else Groups.single()
    engine = load_engine(config, groups, torch.device("cpu"))
    for i, prompt in enumerate(PROMPTS):
        engine.add(Request(str(i), tuple(prompt), SamplingParams(max_new_tokens=10, ignore_eos=True)))
    tokens = {str(i): [] for i in range(len(PROMPTS))}
    while engine.has_work():
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    return list(tokens.values())


def test_same_tokens_however_it_runs(folder, run_ranks):
    expected = decode(0, 1, folder, kernels="torch")
    assert expected != decode(0, 1, bundled_model(), kernels="torch")
    for options in ({}, {"chunk_size": 7, "max_running": 1}, {"draft": "dspark"}, {"draft": "ngram", "gamma": 3}):
        assert decode(0, 1, folder, **options) == expected, options
    for name, layout in LAYOUTS.items():
        assert run_ranks(decode, 2, folder, layout)[0] == expected, name


def test_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="trained for mHC targets; this one has hc_kind 'hc'"):
        check_recipe(Recipe(7, (1,), 2, num_experts=4, top_k=2), "dspark", load_model_config(folder))
    shutil.copytree(folder, tmp_path / "model")
    with pytest.raises(ValueError, match="hc_kind is 'plain', not one of"):
        load_model_config(changed(tmp_path / "model", "plain"))
