"""Drafts that come as checkpoints of their own: which format a folder holds, and its tensors.

A draft cannot make a token wrong, since the target verifies it; so keys of its config that mean nothing here (how it
was trained) are not refused. Missing, unused and misshapen tensors are, as in any checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import torch

from ...layers.attention import AttentionSizes
from ...layers.attention.gqa import GQASizes
from ...layers.mlp import MLPSizes
from ...layers.params import OnDevice, ParamSource
from ..checkpoint.config_decoder import common_fields, read_decoder_rope
from ..checkpoint.config_file import or_default, read_config_files
from ..checkpoint.config_keys import ConfigKeys
from ..checkpoint.folder import read_checkpoint_headers
from ..checkpoint.names import canonical_name
from ..checkpoint.reader import CheckpointReader
from ..checkpoint.spec import TensorSpec
from ..model_config import Config, within
from ..models import MODELS
from ..models.base import Model
from ..models.decoder_config import DecoderConfig
from ..models.decoder_spec import Parts

MAX_DRAFT_LAYERS = 64


@dataclasses.dataclass(frozen=True)
class DraftFiles:
    """A draft's own ``folder`` for the model ``target``."""

    target: Config
    folder: pathlib.Path

    @functools.cached_property
    def keys(self) -> dict[str, Any]:
        """The parsed ``config.json``."""
        return read_config_files(self.folder)[0]

    @property
    def format(self) -> str:
        """The key of :data:`.DRAFTERS` that reads the folder. Raises ``ValueError`` for a format that is unknown."""
        keys, architectures = self.keys, self.keys.get("architectures")
        name = architectures[0] if isinstance(architectures, list) and architectures else ""
        if "draft_vocab_size" in keys or "eagle3" in str(name).lower():
            return "eagle3"
        if "markov_rank" in keys:
            return "dspark_dense"
        if "dflash_config" in keys:
            return "dflash2" if announces_dflash2(keys) else "dflash"
        if "eagle" in str(name).lower() or keys.get("model_type") == "eagle" or self._joins_features():
            return "eagle"
        if keys.get("model_type") in MODELS:
            return "model"
        raise ValueError(
            f"{self.folder}: no draft format that is known: neither draft_vocab_size (EAGLE-3), markov_rank (DSpark), "
            "dflash_config (DFlash), an architecture or fc.weight of EAGLE, nor the model_type of a model of its own "
            f"({', '.join(MODELS)}) is there"
        )

    def _joins_features(self) -> bool:
        """Whether a folder with the config of a model of one layer holds what joins embeddings and features: public
        EAGLE drafts announce themselves by nothing else."""
        if self.keys.get("num_hidden_layers") != 1 or not any(self.folder.glob("*.safetensors")):
            return False
        return "fc.weight" in map(canonical_name, read_checkpoint_headers(self.folder).tensors)


@dataclasses.dataclass(frozen=True)
class StoredDraft:
    """What :class:`..checkpoint.reader.CheckpointReader` asks of a config, for tensors that are no whole model."""

    specs: dict[str, TensorSpec]
    renamed: tuple[tuple[str, str], ...] = ()
    """Beginnings of canonical names, and what they become."""
    num_experts: int = 0
    """What the entries of integer tables stay below."""

    quantization = None
    num_draft_stages = 0
    dspark = None

    def tensors(self, with_draft: bool) -> dict[str, TensorSpec]:
        """All that the folder must hold."""
        return self.specs

    def rename(self, name: str) -> str:
        """See :meth:`..model_config.Config.rename`."""
        for begin, other in self.renamed:
            if name.startswith(begin):
                return other + name[len(begin) :]
        return name

    def routed_blocks(self, with_draft: bool) -> list[tuple[str, int]]:
        """None."""
        return []


def announces_dflash2(keys: dict[str, Any]) -> bool:
    """Whether a parsed ``config.json`` with a ``dflash_config`` has a selector or convolutions."""
    nested = keys["dflash_config"]
    both = keys | (nested if isinstance(nested, dict) else {})
    return any(both.get(name) for name in ("selector_rank", "conv_kernel_size"))


def stored_draft(
    parts: Parts, optional: dict[str, str], renamed: tuple[tuple[str, str], ...] = (), table_limit: int = 0
) -> StoredDraft:
    """The tensors ``parts``; those of the names in ``optional`` may be absent (their target's names are the values).
    Entries of integer tables stay below ``table_limit``."""
    specs = {
        name: TensorSpec(shape, "draft", kind, copy_of=optional.get(name)) for name, (shape, kind) in parts.items()
    }
    return StoredDraft(specs, renamed, table_limit)


def open_draft(files: DraftFiles, stored: StoredDraft | DecoderConfig, dtype: torch.dtype, device: torch.device):
    """The folder's tensors in ``dtype`` on ``device``, and its reader. Raises ``CheckpointError`` if one is wrong."""
    reader = CheckpointReader(files.folder, stored, dtype)
    return OnDevice(reader, device), reader


def read_layers(keys: ConfigKeys, default_layers: int | None = None) -> DecoderConfig:
    """The plain layers of a draft that is built like a small decoder, without experts."""
    fields = common_fields(keys, None)
    num_layers = or_default(keys.optional_int("num_hidden_layers"), default_layers)
    within("num_hidden_layers of the draft", num_layers, 1, MAX_DRAFT_LAYERS)
    rope, _ = read_decoder_rope(keys)
    num_heads = keys.required_int("num_attention_heads")
    window = keys.optional_int("sliding_window")
    types = keys.optional_list("layer_types", str, MAX_DRAFT_LAYERS) or ["full_attention"] * num_layers
    full = GQASizes(
        hidden_size=fields["hidden_size"],
        num_heads=num_heads,
        num_kv_heads=or_default(keys.optional_int("num_key_value_heads"), num_heads),
        head_dim=or_default(keys.optional_int("head_dim"), fields["hidden_size"] // max(num_heads, 1)),
        norm_eps=fields["rms_norm_eps"],
        qk_norm=keys.optional_str("model_type") == "qwen3",
    )
    if len(types) != num_layers:
        raise keys.error(f"layer_types has {len(types)} entries but num_hidden_layers is {num_layers}")
    attention: list[AttentionSizes] = []
    for name in types:
        if name == "sliding_attention" and not window:
            raise keys.error("layer_types has sliding layers, but there is no sliding_window")
        attention.append(full._replace(window=window) if name == "sliding_attention" else full)
    mlp = MLPSizes(fields["hidden_size"], keys.required_int("intermediate_size"))
    fields |= {"tied": False, "bos_token_id": None, "pad_token_id": None, "eos_token_ids": ()}
    layers = {"attention": tuple(attention), "ffn": (mlp,) * num_layers}
    return DecoderConfig(model_type="draft", rope=rope, **layers, **fields)


def check_target(keys: ConfigKeys, layers: DecoderConfig, target: Config) -> None:
    """Raise ``ValueError`` naming both numbers if the draft was made for another target."""
    pairs = [(name, getattr(layers, name), getattr(target, name)) for name in ("hidden_size", "vocab_size")]
    num_layers = keys.optional_int("num_target_layers")
    if num_layers is not None:
        pairs.append(("num_target_layers", num_layers, target.num_layers))
    for name, mine, theirs in pairs:
        if mine != theirs:
            raise ValueError(f"the draft is for a target with {name} {mine}, but this one has {theirs}")


def check_copies(reader: CheckpointReader, source: ParamSource, target: Model, names: Sequence[str]) -> None:
    """Raise ``ValueError`` if a folder's copy of the target's embedding or head, as far as it has those of ``names``,
    differs on this rank."""
    embed, head = target.embed, target.head
    own = {"embed.weight": (embed.shard, embed.weight), "head.weight": (head.shard, head.weight.t())}
    for name in names:
        part, rows = own[name]
        count = part.stop - part.start
        if name in reader and not torch.equal(source.take(name, start=part.start, stop=part.stop), rows[:count]):
            raise ValueError(f"{name} of the draft differs from the target's, which it was trained to share")


def target_layers(keys: ConfigKeys, ids: list[int] | None, target: Config) -> tuple[int, ...]:
    """``ids`` of target layers whose outputs are read, checked."""
    if not ids or list(ids) != sorted(set(ids)):
        raise keys.error(f"target_layer_ids must rise strictly, got {ids}")
    for index, layer in enumerate(ids):
        within(f"target_layer_ids[{index}]", layer, 0, target.num_layers - 1)
    return tuple(ids)
