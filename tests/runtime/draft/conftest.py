"""Checkpoints of the bundled target with made-up drafts, written once a session in the release naming."""

import dataclasses
import functools

import pytest
import torch
from dspark.parallel.groups import Groups
from dspark.runtime.checkpoint import RandomWeights, bundled_model
from dspark.runtime.draft import own_draft
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import load_engine
from dspark.runtime.model_config import DSparkConfig, load_model_config
from dspark.runtime.training.export import dspark_keys, write_bundled

BLOCK = 7
DSPARK = DSparkConfig(
    block_size=BLOCK,
    markov_rank=8,
    markov_head_type="vanilla",
    noise_token_id=2,
    target_layer_ids=(1, 3),
    num_routed_experts=4,
    num_experts_per_tok=2,
    enable_confidence_head=True,
    confidence_head_with_markov=True,
    sample_from_anchor=True,
)
HEADLESS = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
# kind of draft -> what config.json announces; None: a plain multi-token prediction layer
KINDS = {
    "dspark": DSPARK,
    "gated": dataclasses.replace(DSPARK, markov_head_type="gated", target_layer_ids=(3,)),
    "rnn": dataclasses.replace(DSPARK, markov_head_type="rnn", target_layer_ids=(2,), sample_from_anchor=False),
    "dflash": dataclasses.replace(DSPARK, target_layer_ids=(3,), **HEADLESS),
    "mtp": None,
}


@pytest.fixture(scope="session")
def made_up_draft(tmp_path_factory):
    """``made_up_draft(kind)``: the folder of the bundled target with a random draft of ``kind``, see ``KINDS``."""

    @functools.cache
    def make(kind):
        draft, target = KINDS[kind], load_model_config(bundled_model())
        keys = dspark_keys(draft) if draft else {"num_nextn_predict_layers": 1}
        config = dataclasses.replace(target, dspark=draft, num_nextn_predict_layers=0 if draft else 1)
        source = RandomWeights(config, seed=3)
        tensors = {name: source.take(name) for name in source.names("draft")}
        folder = tmp_path_factory.mktemp("drafts") / kind
        write_bundled(bundled_model(), folder, tensors, keys, {"method": kind})
        return folder

    return make


def load(folder, groups=None, **options):
    config = resolve(
        EngineConfig(**{"max_context": 512, "max_running": 3, "chunk_size": 64} | options),
        model_dir=str(folder),
        device_type="cpu",
        max_positions=4096,
        own_draft=own_draft(load_model_config(folder)),
    )
    return load_engine(config, groups or Groups.single(), torch.device("cpu"))


@pytest.fixture
def load_draft():
    """``load_draft(folder, groups, **options)``: an engine of a checkpoint with its own draft."""
    return load
