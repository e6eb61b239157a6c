"""Headers against the config: every tensor accounted for, once, in the right shape and a readable format."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

from ..model_config import Config
from .encoding import Encoding, encoding_of
from .folder import read_checkpoint_headers
from .names import canonical_name, unstack_experts
from .safetensors_file import CheckpointError, StoredTensor
from .spec import TensorSpec, expected_tensors


class Inspection(NamedTuple):
    """What the headers of a checkpoint say.

    ``encodings`` and ``specs`` have the same canonical names: every tensor of the model that was found. ``has_draft``
    is false when the config announces no draft, or plain multi-token prediction layers that the files leave out
    altogether (as files saved by other libraries do). ``problems`` is empty for a usable checkpoint.
    """

    files: tuple[pathlib.Path, ...]
    specs: dict[str, TensorSpec]
    encodings: dict[str, Encoding]
    has_draft: bool
    problems: tuple[str, ...]


def inspect_checkpoint(folder: str | pathlib.Path, config: Config) -> Inspection:
    """Match the checkpoint in ``folder`` with ``config``; reads headers only.

    Raises :class:`CheckpointError` when the files themselves are broken; whatever is wrong with single tensors
    (missing, unused, duplicate, misshapen, an unreadable format) is listed in ``problems``.
    """
    stored = read_checkpoint_headers(folder)
    problems: list[str] = []
    found = _canonical(stored.tensors, config, problems)
    has_draft = config.num_draft_stages > 0 and any(name.startswith("mtp.") for name in found)
    if config.dspark is not None and not has_draft:
        problems.append(
            f"the config announces a DSpark draft of {config.num_draft_stages} stages, but there is no mtp.* tensor"
        )
    _refuse_far_smaller(found, config, has_draft)
    specs = expected_tensors(config, with_draft=has_draft)
    encodings: dict[str, Encoding] = {}
    claimed = config.quantization.block_shape if config.quantization is not None else None
    missing = []
    for name, spec in specs.items():
        weight = found.pop(name, None)
        scale = found.pop(name.removesuffix("weight") + "scale", None) if name.endswith(".weight") else None
        if weight is None:
            if scale is not None:
                problems.append(f"{name} is missing, but its scale is there")
            elif spec.copy_of is None:
                missing.append(name)
            continue
        try:
            encodings[name] = encoding_of(name, spec, weight[1], scale[1] if scale is not None else None, claimed)
        except ValueError as error:
            problems.append(str(error))
    problems += [f"{name} is missing" for name in missing]
    problems += [f"{original} is not a tensor of this model" for original, _ in found.values()]
    if missing or found:
        problems.insert(0, f"{len(missing)} tensors are missing and {len(found)} are unused")
    specs = {name: spec for name, spec in specs.items() if name in encodings}
    return Inspection(stored.files, specs, encodings, has_draft, tuple(problems))


def _refuse_far_smaller(found: dict[str, tuple[str, StoredTensor]], config: Config, has_draft: bool) -> None:
    """Refuse a config that asks for over twice as many tensors as there are, before listing all that it asks for."""
    blocks = config.routed_blocks(has_draft)
    wanted = 3 * sum(num_experts for _, num_experts in blocks)
    if 2 * len(found) >= wanted:
        return
    names = (
        f"{block}.ffn.experts.{expert}.{matrix}.weight"
        for block, num_experts in blocks
        for expert in range(num_experts)
        for matrix in ("w1", "w2", "w3")
    )
    first = next(name for name in names if name not in found)
    raise CheckpointError(
        f"{first} is missing; the experts of {len(blocks)} layers and draft stages alone are {wanted} tensors, but the "
        f"files hold {len(found)}"
    )


def _canonical(
    tensors: dict[str, StoredTensor], config: Config, problems: list[str]
) -> dict[str, tuple[str, StoredTensor]]:
    """Canonical name -> (name in the file, tensor); duplicates go to ``problems``."""
    found: dict[str, tuple[str, StoredTensor]] = {}
    for original, tensor in tensors.items():
        try:
            parts = unstack_experts(original, tensor)
        except ValueError as error:
            problems.append(str(error))
            continue
        for name, part in parts or [(canonical_name(original, config.num_draft_stages), tensor)]:
            name = config.rename(name)
            if name in found:
                problems.append(f"{name} is there twice: as {found[name][0]!r} and as {original!r}")
            else:
                found[name] = (original, part)
    return found


def require_sound(inspection: Inspection) -> Inspection:
    """The same inspection; raises :class:`CheckpointError` listing the problems if there are any."""
    if inspection.problems:
        raise CheckpointError(list(inspection.problems))
    return inspection
