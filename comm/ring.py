"""Keys and values between context-parallel ranks: every rank sees the rows of all ranks, one rank's at a time.

Two ways, with the same result in the same order. A ring passes shards on from rank to rank: each rank holds two shards
at a time, its present one and the one that is coming in. A gather brings all shards at once. Both transfer while the
shard that is there is being used.

Legend: R ranks, N_r rows of rank r.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from ..parallel.groups import Group
from .collectives import start_all_gather_v
from .wire import from_wire, to_wire

Shards = tuple[torch.Tensor, ...]
"""Tensors [N_r, ...] that travel together."""


def ring(shards: Shards, group: Group, sizes: Sequence[int]) -> Iterator[tuple[int, Shards]]:
    """Yield (r, shards of rank r) for r = rank, rank - 1, ... around the ring, own shards first.

    ``sizes``: the rows N_r of each rank, the same on all ranks. Collective: every rank must draw all R items. While an
    item is used, it is on its way to the next rank, so it must not be changed, and the following one is coming in.
    Bytes sent are counted as ``ring``: R - 1 shards.
    """
    assert all(x.shape[0] == sizes[group.rank] for x in shards), (sizes, [x.shape for x in shards])
    dtypes, here = [x.dtype for x in shards], tuple(to_wire(x) for x in shards)
    for step in range(group.size):
        source = (group.rank - step) % group.size
        coming, works = here, []
        if step < group.size - 1:
            coming, works = _pass_on(here, group, sizes[(source - 1) % group.size])
        yield source, tuple(from_wire(x, dtype) for x, dtype in zip(here, dtypes))
        for work in works:
            work.wait()
        here = coming


def _pass_on(here: Shards, group: Group, num_coming: int) -> tuple[Shards, list[dist.Work]]:
    """Send ``here`` to the next rank and receive as many tensors of ``num_coming`` rows from the one before; without
    rows nothing is sent."""
    after, before = ((group.rank + step) % group.size for step in (1, -1))
    coming = tuple(x.new_empty((num_coming, *x.shape[1:])) for x in here)
    num_bytes = sum(x.nbytes for x in here)
    group.traffic.add("ring", num_bytes, num_bytes, num_bytes if after in group.remote_peers else 0)
    sends = [dist.P2POp(dist.isend, x, group.ranks[after], group.pg) for x in here if x.shape[0]]
    receives = [dist.P2POp(dist.irecv, x, group.ranks[before], group.pg) for x in coming if num_coming]
    return coming, dist.batch_isend_irecv(sends + receives) if sends or receives else []


def gathered(shards: Shards, group: Group, sizes: Sequence[int]) -> Iterator[tuple[int, Shards]]:
    """The items of :func:`ring` in the same order, from one all-gather that is under way while the first is used."""
    pending = [start_all_gather_v(x, group, sizes) for x in shards]
    yield group.rank, shards
    everyone = [one.wait().split(list(sizes)) for one in pending]
    for step in range(1, group.size):
        source = (group.rank - step) % group.size
        yield source, tuple(pieces[source] for pieces in everyone)


TRANSFERS: dict[str, Callable[[Shards, Group, Sequence[int]], Iterator[tuple[int, Shards]]]] = {
    "ring": ring,
    "all_gather": gathered,
}
