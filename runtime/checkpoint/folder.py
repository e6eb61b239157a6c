"""The files of a checkpoint folder: ``model.safetensors``, or shards listed in ``model.safetensors.index.json``."""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

from .safetensors_file import CheckpointError, StoredTensor, read_header
from .strict_json import read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 64 * 2**20
MAX_SHARDS = 4096

_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


class StoredCheckpoint(NamedTuple):
    """``files`` and, by the names the files use, ``tensors`` (each with an index into ``files``)."""

    files: tuple[pathlib.Path, ...]
    tensors: dict[str, StoredTensor]


def bundled_model() -> pathlib.Path:
    """The folder of the small trained model that comes with the package."""
    return pathlib.Path(__file__).resolve().parent.parent / "bundled" / "v4-tiny"


def read_checkpoint_headers(folder: str | pathlib.Path) -> StoredCheckpoint:
    """Every tensor of the checkpoint in ``folder``, from the headers alone.

    Raises :class:`CheckpointError` when files are missing, lie outside the folder, break the format, or when index
    and files do not name exactly the same tensors, each once.
    """
    folder = pathlib.Path(folder)
    single, index = folder / SINGLE_NAME, folder / INDEX_NAME
    if index.is_file() and single.is_file():
        raise CheckpointError(f"{folder}: holds both {SINGLE_NAME} and {INDEX_NAME}; which one is meant is unclear")
    if index.is_file():
        return _read_shards(folder, index)
    if not single.is_file():
        raise CheckpointError(f"{folder}: holds neither {SINGLE_NAME} nor {INDEX_NAME}")
    path = _inside(folder, SINGLE_NAME)
    strays = _stray_shards(folder, set())
    if strays:
        raise CheckpointError(f"{folder}: holds {SINGLE_NAME} and also the shard {strays[0]}, but no {INDEX_NAME}")
    return StoredCheckpoint((path,), read_header(path))


def _read_shards(folder: pathlib.Path, index: pathlib.Path) -> StoredCheckpoint:
    weight_map = _weight_map(index)
    names = sorted(set(weight_map.values()))
    if len(names) > MAX_SHARDS:
        raise CheckpointError(f"{INDEX_NAME}: {len(names)} files, more than the limit of {MAX_SHARDS}")
    files = tuple(_inside(folder, name) for name in names)
    problems = [f"{name}: a shard that {INDEX_NAME} does not list" for name in _stray_shards(folder, set(names))]
    tensors: dict[str, StoredTensor] = {}
    for position, (name, path) in enumerate(zip(names, files)):
        for tensor_name, tensor in read_header(path, position).items():
            listed = weight_map.get(tensor_name)
            if tensor_name in tensors:
                problems.append(f"{tensor_name!r} is in {names[tensors[tensor_name].file]} and again in {name}")
            elif listed is None:
                problems.append(f"{tensor_name!r} is in {name} but not in {INDEX_NAME}")
            elif listed != name:
                problems.append(f"{tensor_name!r} is in {name} but {INDEX_NAME} says {listed}")
            tensors.setdefault(tensor_name, tensor)
    problems += [
        f"{tensor_name!r} is listed in {INDEX_NAME} but {name} does not hold it"
        for tensor_name, name in weight_map.items()
        if tensor_name not in tensors
    ]
    if problems:
        raise CheckpointError(problems)
    return StoredCheckpoint(files, tensors)


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    try:
        content = read_json_object(index, max_bytes=MAX_INDEX_BYTES)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    unknown = sorted(set(content) - {"metadata", "weight_map"})
    if unknown:
        raise CheckpointError(f"{INDEX_NAME}: unknown key {unknown[0]!r:.60}")
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{INDEX_NAME}: weight_map must be an object that names at least one tensor")
    for tensor_name, file_name in weight_map.items():
        if not isinstance(file_name, str):
            raise CheckpointError(f"{INDEX_NAME}: the file of {tensor_name!r:.80} must be a string")
    return weight_map


def _stray_shards(folder: pathlib.Path, listed: set[str]) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if _SHARD.fullmatch(path.name) and path.name not in listed)


def _inside(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The path of the file ``name`` of ``folder``, after symbolic links, if it is a file that stays in the folder.

    Links may leave it only in the download cache of the HuggingFace hub, whose ``snapshots/REVISION`` folders hold
    links to ``blobs`` beside them.
    """
    relative = pathlib.PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or relative.is_absolute() or ".." in relative.parts:
        raise CheckpointError(f"{INDEX_NAME}: {name!r:.120} does not stay inside the checkpoint's folder")
    root = folder.resolve()
    try:
        path = (root / relative).resolve(strict=True)
    except (OSError, RuntimeError):
        raise CheckpointError(f"{folder}: the file {name!r:.120} is missing") from None
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if not any(path.is_relative_to(allowed) for allowed in roots):
        raise CheckpointError(f"{name!r:.120} is a link that leaves the checkpoint's folder, to {path}")
    if not path.is_file():
        raise CheckpointError(f"{folder}: {name!r:.120} is not a file")
    return path
