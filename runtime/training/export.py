"""A trained draft as a checkpoint: a complete model folder that holds the target and its ``mtp.*`` tensors.

The target's files are linked where the file system can, else copied; the draft is a shard of its own. Whoever reads the
folder sees one checkpoint with an index. EAGLE-3 drafts, which no release bundles, are a folder of their own.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save

from ..checkpoint.folder import INDEX_NAME, read_checkpoint_headers
from ..checkpoint.names import canonical_name
from ..model_config import DSparkConfig

COPIED_SUFFIXES = (".json", ".jinja", ".txt", ".model")
NOT_COPIED = ("config.json", INDEX_NAME, "draft_training.json")
MAX_COPIED_BYTES = 64 << 20
PT = {"format": "pt"}  # what other libraries expect of weights for torch
DRAFT_KEYS = (
    "num_nextn_predict_layers",
    "n_mtp_layers",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "sample_from_anchor",
)


def dspark_keys(draft: DSparkConfig) -> dict[str, Any]:
    """The keys of ``config.json`` that announce ``draft``."""
    return {
        "dspark_block_size": draft.block_size,
        "dspark_noise_token_id": draft.noise_token_id,
        "dspark_markov_rank": draft.markov_rank,
        "dspark_markov_head_type": draft.markov_head_type,
        "dspark_target_layer_ids": list(draft.target_layer_ids),
        "dspark_n_routed_experts": draft.num_routed_experts,
        "dspark_num_experts_per_tok": draft.num_experts_per_tok,
        "enable_confidence_head": draft.enable_confidence_head,
        "confidence_head_with_markov": draft.confidence_head_with_markov,
        "sample_from_anchor": draft.sample_from_anchor,
        "num_nextn_predict_layers": 0,
    }


def without_draft(config: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed ``config.json`` without the keys, and per-layer entries, of a draft that the checkpoint already has."""
    kept = {key: value for key, value in config.items() if not key.startswith("dspark_") and key not in DRAFT_KEYS}
    if isinstance(kept.get("compress_ratios"), list):
        num_layers = kept.get("num_hidden_layers", kept.get("n_layers"))
        kept["compress_ratios"] = kept["compress_ratios"][:num_layers]
    return kept


def write_bundled(
    target: pathlib.Path,
    output: pathlib.Path,
    tensors: Mapping[str, torch.Tensor],
    config_keys: Mapping[str, Any],
    record: Mapping[str, Any],
) -> None:
    """Write the target of folder ``target`` and the draft ``tensors`` (canonical names) to ``output``.

    ``config_keys`` are set in ``config.json``; ``record`` becomes ``draft_training.json``. Files that may not be mixed
    with an earlier export are replaced. Raises ``ValueError`` when ``output`` is ``target``.
    """
    if output.resolve() == target.resolve():
        raise ValueError(f"--output {output} is the target's own folder")
    output.mkdir(parents=True, exist_ok=True)
    stored = read_checkpoint_headers(target)
    kept: list[tuple[pathlib.Path, list[str], bool]] = []
    for index, path in enumerate(stored.files):
        names = [name for name, tensor in stored.tensors.items() if tensor.file == index]
        ours = [name for name in names if not canonical_name(name).startswith("mtp.")]
        if ours:
            kept.append((path, ours, len(ours) == len(names)))
    for stale in output.glob("model*.safetensors"):
        stale.unlink()
    weight_map: dict[str, str] = {}
    total = len(kept) + 1
    for number, (path, names, whole) in enumerate(kept, start=1):
        name = f"model-{number:05d}-of-{total:05d}.safetensors"
        _place(path, output / name, names, whole)
        weight_map |= dict.fromkeys(names, name)
    name = f"model-{total:05d}-of-{total:05d}.safetensors"
    _write_tensors(output / name, tensors)
    weight_map |= dict.fromkeys(tensors, name)
    size = sum((output / shard).stat().st_size for shard in set(weight_map.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(output / INDEX_NAME, index)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    _write_json(output / "config.json", without_draft(config) | dict(config_keys))
    _write_json(output / "draft_training.json", record)
    _copy_small_files(target, output)


def write_standalone(
    output: pathlib.Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], record: Mapping[str, Any]
) -> None:
    """Write a draft alone: ``model.safetensors`` and its own ``config.json``."""
    output.mkdir(parents=True, exist_ok=True)
    _write_tensors(output / "model.safetensors", tensors)
    _write_json(output / "config.json", config)
    _write_json(output / "draft_training.json", record)


def _place(source: pathlib.Path, destination: pathlib.Path, names: list[str], whole: bool) -> None:
    """``source`` at ``destination``, with only the tensors ``names`` unless it is taken ``whole``."""
    if not whole:
        with safe_open(source, "pt") as stream:
            _write_tensors(destination, {name: stream.get_tensor(name) for name in names})
        return
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)


def _write_tensors(path: pathlib.Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Written as bytes, because the library's own files are readable by their owner alone."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, PT))
    os.replace(partial, path)


def _copy_small_files(target: pathlib.Path, output: pathlib.Path) -> None:
    for path in sorted(target.iterdir()):
        if path.is_file() and path.suffix in COPIED_SUFFIXES and path.name not in NOT_COPIED:
            if path.stat().st_size <= MAX_COPIED_BYTES:
                shutil.copyfile(path, output / path.name)


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
