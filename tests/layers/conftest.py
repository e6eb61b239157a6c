"""Random weights by name, both sets of kernels, and steps whose past is known as plain rows.

A scene is one step of several requests. Whatever a kernel has to find in a ring, in a page or among the step's own rows
is also kept as ``histories``: every row of a request from position 0 on, so that a dense formula needs no cache at all.
Rows and entries that must not be read hold NaN.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from dspark.layers.attention.plan import AttentionPlan, HostLayerCache, LayerCache, build_plan
from dspark.layers.kernels import Kernels
from dspark.layers.rope import RopeTable


class Named:
    """Named tensors as a source of parameters that gives nothing but the slice that was asked for."""

    def __init__(self, tensors):
        self.tensors = tensors

    def take(self, name, *, dim=0, start=0, stop=None, dtype=None):
        tensor = self.tensors[name]
        stop = tensor.shape[dim] if stop is None else stop
        assert 0 <= start <= stop <= tensor.shape[dim], (name, dim, start, stop)
        part = tensor.narrow(dim, start, stop - start).clone()
        return part if dtype is None or not part.is_floating_point() else part.to(dtype)


class History(NamedTuple):
    """All rows of one request up to the end of the step: ``keys`` [L, d], ``raw`` [L, width], ``entries`` and
    ``index_entries`` [L // m, ..]; its own rows in the step are ``rows``."""

    keys: torch.Tensor
    raw: torch.Tensor
    entries: torch.Tensor
    index_entries: torch.Tensor
    rows: slice


class Scene(NamedTuple):
    plan: AttentionPlan
    cache: LayerCache
    keys: torch.Tensor
    raw: torch.Tensor
    histories: list[History]

    def fresh(self):
        """The cache as it was before the step, in buffers of its own."""
        buffers = [buffer.clone() for buffer in self.cache[:4]]
        return LayerCache(*buffers, HostLayerCache(*(buffer.numpy() for buffer in buffers)))


class Sizes(NamedTuple):
    """``spans``: (start, length) of each request in the step."""

    spans: tuple[tuple[int, int], ...]
    d: int = 8
    ring: int = 12
    ratio: int = 4
    raw_width: int = 16
    raw_ring: int = 12
    per_page: int = 2
    d_index: int = 6


def random_scene(sizes, seed, entries_known=True):
    """``entries_known``: the pools already hold every entry that the step's last rows see."""
    made = torch.Generator().manual_seed(seed)
    num_slots = len(sizes.spans) + 2
    slots = torch.randperm(num_slots, generator=made)[: len(sizes.spans)].tolist()
    lengths = [start + length for start, length in sizes.spans]
    pages = [-(-length // (sizes.ratio * sizes.per_page)) for length in lengths]
    page_table = torch.zeros((num_slots, max(pages, default=0) + 1), dtype=torch.int32)
    free = torch.randperm(sum(pages) + 1, generator=made)[: sum(pages)].to(torch.int32).split(pages)
    shapes = (
        (num_slots, sizes.ring, sizes.d),
        (num_slots, sizes.raw_ring, sizes.raw_width),
        (sum(pages) + 1, sizes.per_page, sizes.d),
        (sum(pages) + 1, sizes.per_page, sizes.d_index),
    )
    buffers = [torch.full(shape, float("nan")) for shape in shapes]
    histories, rows, at = [], np.empty((5, sum(length for _, length in sizes.spans)), np.int64), 0
    for (start, length), slot, own, total in zip(sizes.spans, slots, free, lengths):
        page_table[slot, : len(own)] = own
        history = History(
            torch.randn(total, sizes.d, generator=made),
            torch.randn(total, sizes.raw_width, generator=made),
            torch.randn(total // sizes.ratio, sizes.d, generator=made),
            torch.randn(total // sizes.ratio, sizes.d_index, generator=made),
            slice(at, at + length),
        )
        histories.append(history)
        for p in range(start):
            buffers[0][slot, p % sizes.ring] = history.keys[p]
            buffers[1][slot, p % sizes.raw_ring] = history.raw[p]
        for t in range(total // sizes.ratio if entries_known else 0):
            buffers[2][own[t // sizes.per_page], t % sizes.per_page] = history.entries[t]
            buffers[3][own[t // sizes.per_page], t % sizes.per_page] = history.index_entries[t]
        rows[0, at : at + length] = np.arange(start, start + length)
        rows[1:4, at : at + length] = np.array([[slot], [start], [start + length]])
        at += length
    rows[4] = np.arange(at)
    cache = LayerCache(*buffers, HostLayerCache(*(buffer.numpy() for buffer in buffers)))

    def in_step(name):
        parts = [getattr(h, name)[start:] for h, (start, _) in zip(histories, sizes.spans)]
        return torch.cat(parts) if parts else torch.empty(0, sizes.d if name == "keys" else sizes.raw_width)

    plan = build_plan(rows, page_table, (sizes.ratio,))
    return Scene(plan, cache, in_step("keys"), in_step("raw"), histories)


def turn(x, angle_cos, angle_sin, sign=1):
    """``x`` [..., d] float64 with its tail pairs (2i, 2i + 1) multiplied by e^{i angle}, or its conjugate."""
    r = 2 * angle_cos.shape[-1]
    tail = x[..., x.shape[-1] - r :]
    pairs = torch.complex(tail[..., 0::2], tail[..., 1::2])
    factor = torch.complex(angle_cos.double(), sign * angle_sin.double())
    turned = torch.view_as_real(pairs * factor).reshape(*x.shape[:-1], r)
    return torch.cat((x[..., :-r], turned), dim=-1)


@pytest.fixture(scope="session")
def twins():
    """The plain and the compiled kernels."""
    pytest.importorskip("numba", reason="without numba there are no compiled kernels to compare")
    return Kernels("torch"), Kernels("numba")


@pytest.fixture(scope="session")
def device():
    """Where Triton's kernels run: the GPU, or the CPU under Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def triton_twins(device):
    """The plain kernels and Triton's."""
    pytest.importorskip("triton", reason="without triton there are no GPU kernels to compare")
    return Kernels("torch"), Kernels("triton")


@pytest.fixture(scope="session")
def moved(device):
    """``moved(thing)``: every tensor in a nest of tuples, lists and dicts on the kernels' device."""

    def move(thing):
        if isinstance(thing, torch.Tensor):
            return thing.to(device)
        if isinstance(thing, dict):
            return {name: move(value) for name, value in thing.items()}
        if isinstance(thing, tuple) and hasattr(thing, "_fields"):
            return type(thing)(*map(move, thing))
        return [move(value) for value in thing] if isinstance(thing, list) else thing

    return move


@pytest.fixture(scope="session")
def named():
    return Named


@pytest.fixture(scope="session")
def scenes():
    """``scenes(seed=.., spans=.., ...) -> Scene``; the other names are those of :class:`Sizes`."""
    return lambda seed, entries_known=True, **sizes: random_scene(Sizes(**sizes), seed, entries_known)


@pytest.fixture(scope="session")
def turned():
    """:func:`turn`."""
    return turn


@pytest.fixture(scope="session")
def tables():
    """``tables(rope_dim, num_positions) -> RopeTable`` of random angles: nothing may depend on what they are."""

    def make(rope_dim, num_positions, seed=0):
        angles = torch.rand(num_positions, rope_dim // 2, generator=torch.Generator().manual_seed(seed)) * 6.28
        return RopeTable(angles.cos(), angles.sin())

    return make
