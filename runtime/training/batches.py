"""Batches of training sequences, chosen by counter: step s of seed k is the same batch in any run, on any rank.

Legend: N tokens of the batch's sequences one after the other, A anchors, γ places, D hidden width, m layers read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .blocks import block_geometry, sample_anchors
from .hidden_cache import HiddenData


class Batch(NamedTuple):
    """Sequences side by side, without padding. Nothing looks across ``begins``.

    ``ids`` [N], ``features`` [N, m D] and ``hidden`` [N, D] of the target, ``positions`` [N] in the own sequence,
    ``begins`` [N] the batch index of the sequence's first token, ``learned`` bool [N]. ``anchors`` [A] batch indices
    of the first tokens of blocks, ``valid`` bool [A, γ]: the place has a label (the token 1 + k behind the anchor).
    """

    ids: Tensor
    features: Tensor
    hidden: Tensor
    positions: Tensor
    begins: Tensor
    learned: Tensor
    anchors: Tensor
    valid: Tensor

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return Batch(*(tensor.to(device) for tensor in self))

    @property
    def rows(self) -> Tensor:
        """[A, γ] batch indices of anchor + k, clamped; the target's law there is that of place k's label."""
        places = torch.arange(self.valid.shape[1], device=self.anchors.device)
        return (self.anchors.unsqueeze(1) + places).clamp(max=len(self.ids) - 1)

    @property
    def labels(self) -> Tensor:
        """[A, γ] token ids of the labels, arbitrary where not ``valid``."""
        return self.ids[(self.rows + 1).clamp(max=len(self.ids) - 1)]


def counter_seed(*numbers: int) -> int:
    """One 63-bit seed of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def draw_sequences(lengths: Tensor, num_tokens: int, seed: int, step: int) -> list[int]:
    """Different sequences in random order, as few as give ``num_tokens`` tokens together."""
    order = np.random.default_rng([seed, step]).permutation(len(lengths))
    total = np.cumsum(lengths.numpy()[order])
    return order[: int(np.searchsorted(total, num_tokens)) + 1].tolist()


def build_batch(
    data: HiddenData, sequences: list[int], num_anchors: int, gamma: int, seed: int, rank: int = 0, num_ranks: int = 1
) -> Batch:
    """The batch of ``sequences`` of ``data``, or rank ``rank``'s share of its sequences.

    Anchors are drawn over the whole batch before it is shared out, so the union over the ranks does not depend on
    their number. Every rank gets about the same number of tokens.
    """
    whole = data.select(sequences)
    learned = whole.learned()
    generator = torch.Generator().manual_seed(seed)
    anchors, used = sample_anchors(learned.unsqueeze(0), num_anchors, generator)
    valid = block_geometry(anchors, used, learned.unsqueeze(0), gamma).valid[0]
    anchors, valid = anchors[0][used[0]], valid[used[0]]
    cuts = torch.arange(num_ranks + 1) * len(whole.ids) // num_ranks
    edges = torch.searchsorted(whole.starts, cuts)
    first, last = int(edges[rank]), int(edges[rank + 1])
    begin, end = int(whole.starts[first]), int(whole.starts[last])
    mine = (anchors >= begin) & (anchors < end)
    lengths = whole.starts.diff()[first:last]
    begins = (whole.starts[first:last] - begin).repeat_interleave(lengths)
    return Batch(
        whole.ids[begin:end],
        whole.features[begin:end].float(),
        whole.hidden[begin:end].float(),
        torch.arange(end - begin) - begins,
        begins,
        learned[begin:end],
        anchors[mine] - begin,
        valid[mine],
    )
