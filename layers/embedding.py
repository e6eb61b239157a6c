"""Embedding and language-model head with the vocabulary cut over a group.

The vocabulary is padded so that every rank owns the same number of rows; the last ranks may own fewer real rows, or
none. Padded rows never reach a result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..comm.collectives import all_gather, all_reduce
from ..parallel.groups import Group
from .kernels import Bound, Kernels
from .params import Scope

PAD_MULTIPLE = 64


class VocabShard(NamedTuple):
    """Rank r owns ids ``[start, stop)`` of ``size`` rows (padding included) out of ``padded``."""

    start: int
    stop: int
    size: int
    padded: int


def vocab_shard(vocab_size: int, num_ranks: int, rank: int) -> VocabShard:
    """This rank's part of a vocabulary padded to a multiple of 64, or of 64 * ranks where that does not divide."""
    unit = PAD_MULTIPLE if -(-vocab_size // PAD_MULTIPLE) * PAD_MULTIPLE % num_ranks == 0 else PAD_MULTIPLE * num_ranks
    padded = -(-vocab_size // unit) * unit
    size = padded // num_ranks
    start = min(rank * size, vocab_size)
    return VocabShard(start, min((rank + 1) * size, vocab_size), size, padded)


class VocabParallelEmbedding:
    """ids int64 [T] -> [T, D], summed over ``group`` (collective). Ids must lie in ``[0, vocab_size)``."""

    def __init__(self, source: Scope, name: str, vocab_size: int, group: Group) -> None:
        self.shard = vocab_shard(vocab_size, group.size, group.rank)
        self._group = group
        rows = source.take(name, start=self.shard.start, stop=self.shard.stop)
        # One more row, of zeros, is what ids of other ranks read.
        self.weight = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self._group.size == 1:
            return torch.nn.functional.embedding(ids, self.weight)
        num_rows = self.weight.shape[0] - 1
        local = ids - self.shard.start
        local = torch.where((local >= 0) & (local < num_rows), local, num_rows)
        return all_reduce(torch.nn.functional.embedding(local, self.weight), self._group)


class ParallelLMHead:
    """[N, D] -> float32 logits [N, vocab_size] on every rank of ``group`` (collective)."""

    def __init__(self, source: Scope, name: str, vocab_size: int, group: Group, kernels: Kernels) -> None:
        self.shard = vocab_shard(vocab_size, group.size, group.rank)
        self._vocab_size, self._group = vocab_size, group
        rows = source.take(name, start=self.shard.start, stop=self.shard.stop)
        padding = rows.new_zeros(self.shard.size - rows.shape[0], rows.shape[1])
        self.weight = torch.cat((rows, padding)).t().contiguous()
        self._linear = kernels.bind("linear", weight=self.weight)

    @property
    def bound(self) -> Bound:
        """The operation of this rank's part, for :meth:`.Kernels.join`."""
        return self._linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits = all_gather(self._linear(x).float(), self._group, dim=-1)
        return logits[:, : self._vocab_size]
