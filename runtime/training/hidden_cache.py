"""The target's hidden states over the training sequences: computed once, kept on disk, shared by all drafts.

Legend: N tokens of all sequences one after the other, Q sequences, D hidden width, m target layers read.

A cache is a folder of safetensors shards, one per rank that wrote it, each holding whole sequences. Its name is a
digest of everything it depends on, so a cache is either the right one or not found.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .documents import TokenSequence
from .target import FrozenTarget


class HiddenData(NamedTuple):
    """Sequences with the target's states.

    ``ids`` int64 [N]; ``features`` [N, m D] and ``hidden`` [N, D], see :class:`TargetStates`; ``starts`` int64 [Q + 1],
    where sequence q begins; ``first_labels`` int64 [Q], counted from its start; ``sources`` and ``held_out`` [Q].
    """

    ids: torch.Tensor
    features: torch.Tensor
    hidden: torch.Tensor
    starts: torch.Tensor
    first_labels: torch.Tensor
    sources: tuple[str, ...]
    held_out: tuple[bool, ...]

    def select(self, sequences: Sequence[int]) -> HiddenData:
        """The given sequences only, in that order."""
        spans = [slice(int(self.starts[q]), int(self.starts[q + 1])) for q in sequences]
        lengths = torch.tensor([0] + [span.stop - span.start for span in spans])
        return HiddenData(
            torch.cat([self.ids[span] for span in spans]),
            torch.cat([self.features[span] for span in spans]),
            torch.cat([self.hidden[span] for span in spans]),
            lengths.cumsum(0),
            self.first_labels[list(sequences)],
            tuple(self.sources[q] for q in sequences),
            tuple(self.held_out[q] for q in sequences),
        )

    def learned(self) -> torch.Tensor:
        """Bool [N]: tokens that are labels."""
        lengths = self.starts.diff()
        index = torch.arange(len(self.ids)) - self.starts[:-1].repeat_interleave(lengths)
        return index >= self.first_labels.repeat_interleave(lengths)


def write_shard(
    folder: pathlib.Path,
    shard: int,
    num_shards: int,
    sequences: Sequence[TokenSequence],
    target: FrozenTarget,
    dtype: torch.dtype,
    progress: Callable[[int], None],
) -> None:
    """Run the target over ``sequences`` and write them as one shard, under its final name only when complete.

    Raises ``ValueError`` when states do not fit ``dtype``.
    """
    features, hidden = [], []
    for states, sequence in zip(target.states([s.ids for s in sequences]), sequences):
        features.append(states.features.to("cpu", dtype))
        hidden.append(states.hidden.to("cpu", dtype))
        progress(len(sequence.ids))
    tensors = {
        "ids": torch.from_numpy(np.concatenate([s.ids for s in sequences])).int(),
        "features": torch.cat(features),
        "hidden": torch.cat(hidden),
        "lengths": torch.tensor([len(s.ids) for s in sequences]),
        "first_labels": torch.tensor([s.first_label for s in sequences]),
        "held_out": torch.tensor([s.held_out for s in sequences]),
    }
    for name in ("features", "hidden"):
        if not torch.isfinite(tensors[name]).all():
            raise ValueError(f"the target's {name} exceed {dtype}; use --cache-dtype bfloat16 or float32")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _shard_name(shard, num_shards)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, {"sources": json.dumps([s.source for s in sequences])})
    os.replace(partial, path)


def find_shards(folder: pathlib.Path) -> int | None:
    """Of how many shards the cache in ``folder`` consists, if all are there."""
    for first in sorted(folder.glob("states-00001-of-*.safetensors")):
        num_shards = int(first.stem.rsplit("-", 1)[1])
        if all((folder / _shard_name(shard, num_shards)).is_file() for shard in range(num_shards)):
            return num_shards
    return None


def read_shards(folder: pathlib.Path, num_shards: int, dtype: torch.dtype | None = None) -> HiddenData:
    """All shards of a cache, as ``dtype`` or as stored."""
    parts, sources = [], []
    for shard in range(num_shards):
        with safe_open(folder / _shard_name(shard, num_shards), "pt") as stream:
            parts.append({name: stream.get_tensor(name) for name in stream.keys()})
            sources += json.loads(stream.metadata()["sources"])
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    lengths = joined["lengths"]
    return HiddenData(
        joined["ids"].long(),
        joined["features"] if dtype is None else joined["features"].to(dtype),
        joined["hidden"] if dtype is None else joined["hidden"].to(dtype),
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        joined["first_labels"],
        tuple(sources),
        tuple(joined["held_out"].tolist()),
    )


def _shard_name(shard: int, num_shards: int) -> str:
    return f"states-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
