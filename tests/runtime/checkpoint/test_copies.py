"""A checkpoint may repeat the target's embedding for its draft; a copy that differs must not be ignored."""

import json
import shutil

import pytest
from dspark.runtime import LLM
from dspark.runtime.checkpoint import bundled_model
from safetensors.torch import load_file, save_file


def with_embedding(folder, change):
    """The bundled model in ``folder``, with an embedding for its draft that is ``change`` above the target's."""
    shutil.copytree(bundled_model(), folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    embedding = load_file(folder / index["weight_map"]["model.embed_tokens.weight"])["model.embed_tokens.weight"]
    save_file({"mtp.0.embed.weight": embedding + change}, folder / "copy.safetensors")
    index["weight_map"]["mtp.0.embed.weight"] = "copy.safetensors"
    path.write_text(json.dumps(index))
    return str(folder)


def test_a_copy_that_differs_is_refused_where_there_is_a_draft(tmp_path):
    other = with_embedding(tmp_path / "other", 1.0)
    with pytest.raises(ValueError, match=r"mtp\.0\.embed\.weight should repeat embed\.weight"):
        LLM(other, max_running=1)
    LLM(other, max_running=1, draft="none").close()
    LLM(with_embedding(tmp_path / "same", 0.0), max_running=1).close()
