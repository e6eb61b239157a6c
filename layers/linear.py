"""Linear layers cut over a group, and their loaders.

Legend: T rows, W ranks in the group. Weights are stored [out, in] in checkpoints and kept [in, out] here. A layer reads
only its rank's slice. None has a bias, since no model here has one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..comm.collectives import all_gather, all_reduce
from ..parallel.groups import Group
from .kernels import Bound, Kernels
from .params import Scope


class Part(NamedTuple):
    """One named weight of a merged product and the rows ``[start, stop)`` of it that this rank holds."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of output features held here."""
        return self.stop - self.start


def divide(what: str, size: int, group: Group) -> int:
    """``size / group.size``; ``ValueError`` naming both numbers if it does not divide."""
    if size % group.size:
        raise ValueError(f"{what} is {size}, which does not divide over the {group.size} ranks of group {group.name}")
    return size // group.size


def shard(name: str, what: str, size: int, group: Group) -> Part:
    """This rank's equal share of the ``size`` output features of weight ``name``."""
    share = divide(what, size, group)
    return Part(name, group.rank * share, (group.rank + 1) * share)


def merged_weight(source: Scope, parts: Sequence[Part], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Several weights with the same input side by side, [in, sum of part sizes]."""
    return torch.cat([source.take(p.name, start=p.start, stop=p.stop, dtype=dtype) for p in parts]).t().contiguous()


class MergedLinear:
    """Several weights with the same input as one product: [T, in] -> [T, sum of part sizes], parts side by side.

    No communication. Each part may be whole or a slice of its weight, so this is the base of every column-parallel
    layer; use ``split`` to take the output apart.
    """

    operation = "linear"

    def __init__(
        self, source: Scope, parts: Sequence[Part], kernels: Kernels, dtype: torch.dtype | None = None
    ) -> None:
        self.sizes = [p.size for p in parts]
        self._linear = kernels.bind(self.operation, weight=merged_weight(source, parts, dtype))

    @property
    def bound(self) -> Bound:
        """The operation, for :meth:`.Kernels.join`."""
        return self._linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x)

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``y`` [T, sum] as one view per part."""
        return y.split(self.sizes, dim=-1)


class ColumnParallelLinear(MergedLinear):
    """Output features cut over ``group``: [T, in] -> [T, out / W], or [T, out] with ``gather`` (collective then)."""

    def __init__(
        self, source: Scope, name: str, num_out: int, group: Group, kernels: Kernels, gather: bool = False
    ) -> None:
        super().__init__(source, [shard(name, f"{name} output features", num_out, group)], kernels)
        self._group = group if gather else Group.alone()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return all_gather(super().__call__(x), self._group, dim=-1)


class MergedColumnParallelLinear(MergedLinear):
    """Weights with the same input, each cut over ``group`` on its own: local output [part0_r | part1_r | ...].

    The weights may be kept narrow, see :class:`.kernels.Kernels`.
    """

    operation = "block_linear"

    def __init__(self, source: Scope, outs: dict[str, int], group: Group, kernels: Kernels) -> None:
        super().__init__(
            source, [shard(name, f"{name} output features", n, group) for name, n in outs.items()], kernels
        )


class QKVParallelLinear(MergedLinear):
    """Query, key and value projections cut by heads: [T, in] -> [T, (q + k + v heads here) * head_dim].

    Query heads divide over the group. With fewer key heads than ranks each rank holds one and ``W / num_kv_heads``
    neighbouring ranks hold the same one; otherwise key heads divide too.
    """

    def __init__(
        self,
        source: Scope,
        names: tuple[str, str, str],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        group: Group,
        kernels: Kernels,
        v_head_dim: int | None = None,
    ) -> None:
        self.num_heads = divide("number of query heads", num_heads, group)
        if group.size >= num_kv_heads:
            if group.size % num_kv_heads:
                raise ValueError(
                    f"{num_kv_heads} key heads cannot be repeated evenly over the {group.size} ranks of {group.name}"
                )
            self.num_kv_heads, first = 1, group.rank // (group.size // num_kv_heads)
        else:
            self.num_kv_heads = divide("number of key heads", num_kv_heads, group)
            first = group.rank * self.num_kv_heads
        widths = (head_dim, head_dim, head_dim if v_head_dim is None else v_head_dim)
        starts = (group.rank * self.num_heads, first, first)
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        self.parts = [Part(n, s * w, (s + c) * w) for n, s, c, w in zip(names, starts, counts, widths)]
        super().__init__(source, self.parts, kernels)


class RowParallelLinear:
    """Input features cut over ``group``: [T, in / W] -> [T, out], summed over the group (collective).

    ``partial`` gives this rank's summand instead; whoever takes it must finish the sum exactly once. Where the kernels
    keep sums whole, see :func:`whole_columns`. The weight may be kept narrow, see :class:`.kernels.Kernels`.
    """

    def __init__(self, source: Scope, name: str, num_in: int, group: Group, kernels: Kernels) -> None:
        part = shard(name, f"{name} input features", num_in, group)
        self._group = group
        if kernels.whole_sums and group.size > 1:
            self.partial = whole_columns(source.take(name), group, kernels)
        else:
            weight = source.take(name, dim=1, start=part.start, stop=part.stop).t().contiguous()
            self.partial = kernels.bind("block_linear", weight=weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(self.partial(x), self._group)


def columns_of(num_out: int, group: Group) -> slice:
    """The output columns of this rank where a product is cut by them; they need not divide."""
    return slice(num_out * group.rank // group.size, num_out * (group.rank + 1) // group.size)


def whole_columns(weight: torch.Tensor, group: Group, kernels: Kernels) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product of shared-out inputs with ``weight`` [out, in], with no sum rounded otherwise than on one rank.

    The inputs [T, in / W] are gathered (collective), and each rank computes some columns whole: its summand [T, out]
    has those, and zeros, which are added without rounding in any order.
    """
    num_out, here = weight.shape[0], columns_of(weight.shape[0], group)
    linear = kernels.bind("linear", weight=weight[here].t().contiguous())

    def partial(x: torch.Tensor) -> torch.Tensor:
        y = linear(all_gather(x, group, dim=-1))
        return torch.nn.functional.pad(y, (here.start, num_out - here.stop))

    return partial


class GroupedColumnParallelLinear:
    """V4's first output projection: contiguous groups of heads, each with its own block; groups cut over ``group``.

    [T, G/W, in] -> [T, G/W * rank]. The weight ``name`` is [G * rank, in], rows grouped by block.
    """

    def __init__(self, source: Scope, name: str, num_groups: int, rank: int, group: Group, kernels: Kernels) -> None:
        self.num_groups = divide("number of output groups", num_groups, group)
        first = group.rank * self.num_groups
        rows = source.take(name, start=first * rank, stop=(first + self.num_groups) * rank)
        self.weight = rows.unflatten(0, (self.num_groups, rank)).transpose(1, 2).contiguous()
        self._linear = kernels.bind("grouped_linear", weight=self.weight)

    @property
    def bound(self) -> Bound:
        """The operation, for :meth:`.Kernels.join`."""
        return self._linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x)
