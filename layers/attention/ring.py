"""Dense attention under context parallelism: ring, striped ring and zigzag ring attention, and an all-gather variant.

Every rank holds some tokens of a step, as queries and as keys and values. Key shards pass by one at a time; attention
over each is merged into what came before, by the logarithms of the softmax sums. Which tokens a rank holds is a
split of ``parallel/context.py``: ``contiguous`` is ring attention, ``striped`` and ``interleave`` are striped
attention, ``zigzag`` is zigzag ring attention. The transfer is one of ``comm/ring.py``.

What a rank has to compute is laid out once per step (:func:`build_ring_plan`) and used in every layer.

Legend: R ranks, T query rows here, H query heads, G key heads, d key width, e value width, P tokens of a sequence that
came in earlier steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...comm.ring import Shards, ring
from ...parallel.groups import Group
from ..kernels import Kernels
from ..kernels.block_attention import Attended


class Blocks(NamedTuple):
    """The bound kernels ``attend_block`` and ``merge``."""

    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], Attended]
    merge: Callable[[Attended, Attended], Attended]

    @classmethod
    def bind(cls, kernels: Kernels, scale: float) -> Blocks:
        """``scale``: what scores are multiplied by."""
        return cls(kernels.bind("attend_block", scale=scale), kernels.bind("merge"))


class Piece(NamedTuple):
    """Query rows of one sequence and the keys of one shard that they see: row ``queries[i]`` the first ``visible[i]``
    of ``keys``, or all if None. ``pairs``: query-key pairs among them. Rows are slices where they are runs."""

    queries: slice | torch.Tensor
    keys: slice | torch.Tensor
    visible: torch.Tensor | None
    pairs: int


class RingPlan(NamedTuple):
    """``sizes``: rows of each rank. ``pieces[r]``: what this rank computes with the shard of rank r. ``past[s]``: what
    it computes with the earlier tokens of sequence s, None for nothing."""

    sizes: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    past: tuple[Piece | None, ...]

    @property
    def pairs(self) -> tuple[int, ...]:
        """Query-key pairs with the shard of each rank; without earlier tokens."""
        return tuple(sum(piece.pairs for piece in pieces) for pieces in self.pieces)


def build_ring_plan(
    owned: Sequence[np.ndarray],
    rank: int,
    lengths: Sequence[int],
    device: torch.device,
    causal: bool = True,
    past_lengths: Sequence[int] = (),
) -> RingPlan:
    """The plan of ``rank`` for a step of sequences with ``lengths`` tokens each, back to back; rank r has the tokens
    ``owned[r]``, in its order.

    Tokens see tokens of their own sequence only: with ``causal`` those up to themselves, else all. ``past_lengths``: P
    of each sequence, which all its tokens see; none if empty. Raises ``ValueError`` when the ranks own another number
    of tokens than the sequences have.
    """
    sizes = tuple(map(len, owned))
    if sum(sizes) != sum(lengths):
        raise ValueError(f"the split holds {sum(sizes)} tokens, but the sequences have {sum(lengths)}")
    own = _by_sequence(owned[rank], lengths)
    pieces = tuple(tuple(_pieces(own, _by_sequence(tokens, lengths), causal, device)) for tokens in owned)
    past: list[Piece | None] = []
    for num_past, (rows, _) in zip(past_lengths, own):
        some = num_past and len(rows)
        past.append(Piece(_run(rows, device), slice(0, num_past), None, len(rows) * num_past) if some else None)
    return RingPlan(sizes, pieces, tuple(past))


def _by_sequence(tokens: np.ndarray, lengths: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each sequence the rows of a rank that belong to it, and their tokens, in rising order."""
    sequence = np.searchsorted(np.cumsum(lengths), tokens, side="right")
    found = []
    for index in range(len(lengths)):
        rows = np.flatnonzero(sequence == index)
        rows = rows[np.argsort(tokens[rows], kind="stable")]
        found.append((rows, tokens[rows]))
    return found


def _pieces(
    own: list[tuple[np.ndarray, np.ndarray]],
    shard: list[tuple[np.ndarray, np.ndarray]],
    causal: bool,
    device: torch.device,
) -> Iterator[Piece]:
    for (queries, at), (keys, key_at) in zip(own, shard):
        visible = np.searchsorted(key_at, at, side="right") if causal else np.full(len(at), len(key_at))
        queries, visible = queries[visible > 0], visible[visible > 0]
        if not len(queries):
            continue
        keys = keys[: visible.max()]
        seen = None if visible.min() == len(keys) else torch.from_numpy(visible).to(device)
        yield Piece(_run(queries, device), _run(keys, device), seen, int(visible.sum()))


def _run(rows: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    """``rows`` as a slice where they follow each other: a view then needs no copy."""
    if rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    plan: RingPlan,
    group: Group,
    blocks: Blocks,
    *,
    value_dim: int = 0,
    past: Sequence[Shards] = (),
    transfer: Callable[[Shards, Group, Sequence[int]], Iterator[tuple[int, Shards]]] = ring,
    keep: Callable[[int, Shards], None] | None = None,
) -> torch.Tensor:
    """Attention of this rank's rows over the keys of all ranks; [T, H, e] in the dtype of ``q``. Collective.

    ``q`` [T, H, d], ``k`` [T, G, d] and ``v`` [T, G, e]: this rank's tokens in the order of ``split.owned[rank]``, keys
    and queries already rotated to their absolute positions. H is a multiple of G, so MHA, GQA and MQA are the same
    call; e may differ from d. ``v`` None: the values are the first ``value_dim`` columns of the keys, which then travel
    once (latent attention with absorbed projections, G = 1).

    ``plan``: :func:`build_ring_plan`, made once per step. ``group``: the context-parallel ranks (``groups.attn_cp``);
    in a group of one this is plain dense attention. ``blocks``: the kernels.
    ``past[s]``: the keys [P, G, d] (and values [P, G, e], if ``v`` is given) of sequence s from earlier steps, which
    every rank has; needed where the plan has ``past_lengths``. ``transfer``: how shards travel, see ``comm/ring.py``.
    ``keep(r, shards)`` is called with the shards of every rank r as they pass (their rows are the tokens
    ``split.owned[r]``), so that all of them can be written to a cache on every rank.

    A row that sees nothing gives 0. Sums run in float32; bytes sent are R - 1 shards on this rank.
    """
    width = value_dim if v is None else v.shape[2]
    total = Attended(
        q.new_zeros((*q.shape[:2], width), dtype=torch.float32),
        q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32),
    )

    def add(piece: Piece, shards: Shards) -> None:
        keys = shards[0][piece.keys]
        values = keys[..., :width] if v is None else shards[1][piece.keys]
        rows = piece.queries
        block = blocks.attend(q[rows], keys, values, piece.visible)
        merged = blocks.merge(Attended(total.out[rows], total.lse[rows]), block)
        total.out[rows], total.lse[rows] = merged

    for source, shards in transfer((k,) if v is None else (k, v), group, plan.sizes):
        if keep is not None:
            keep(source, shards)
        for piece in plan.pieces[source]:
            add(piece, shards)
        if source == group.rank:
            for index, piece in enumerate(plan.past):
                if piece is not None:
                    add(piece, past[index])
    return total.out.to(q.dtype)
