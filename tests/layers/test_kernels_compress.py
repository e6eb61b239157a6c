"""Compressor pooling and ring writes, plain and compiled, against the formulas of one window at a time in float64."""

import pytest
import torch

SPANS = {
    "no rows": ((5, 0),),
    "first token": ((0, 1),),
    "nothing closes": ((4, 2), (17, 1)),
    "one token closes": ((3, 1), (7, 1), (31, 1)),
    "a prompt": ((0, 35),),
    "a chunk longer than its ring": ((6, 50),),
    "a chunk over pages": ((14, 40),),
    "a window that began before": ((13, 4), (30, 3), (2, 2)),
    "several requests": ((0, 9), (31, 1), (20, 13), (0, 3), (47, 9)),
}
# ratio, overlap: HCA, and CSA with both halves of a row
KINDS = {"hca 4": (4, False), "hca 16": (16, False), "csa 4": (4, True), "csa 2": (2, True), "hca 1": (1, False)}


def dense_entry(turned, raw, t, ratio, overlap, columns, ape, norm_weight, eps, rope):
    """Entry ``t`` from all raw rows of its request."""
    rows = raw[:, columns].double()
    c, z = rows.chunk(2, dim=1)
    d = c.shape[1] // 2 if overlap else c.shape[1]
    current = range(t * ratio, (t + 1) * ratio)
    slots = [(c[p, -d:], z[p, -d:] + ape[p % ratio, -d:]) for p in current]
    if overlap and t > 0:
        before = range((t - 1) * ratio, t * ratio)
        slots += [(c[p, :d], z[p, :d] + ape[p % ratio, :d]) for p in before]
    values, gates = (torch.stack(part) for part in zip(*slots))
    pooled = (gates.softmax(dim=0) * values).sum(dim=0)
    normed = pooled / (pooled.square().mean() + eps).sqrt() * norm_weight
    return turned(normed, rope.cos[t * ratio], rope.sin[t * ratio])


def check_pool(twins, turned, scene, spans, sizes, ratio, overlap, indexer, rope, ape, norm_weight, bound):
    d, raw_width, per_page = sizes
    width = 2 * ape.shape[1]
    columns = slice(raw_width - width, raw_width) if indexer else slice(0, width)
    weights = {"ape": ape, "norm_weight": norm_weight, "rope": rope, "eps": 1e-5, "ratio": ratio}
    expected = torch.full((scene.cache.entries.shape[0], per_page, d), float("nan"), dtype=torch.float64)
    for history, (start, length) in zip(scene.histories, spans):
        for t in range(start // ratio, (start + length) // ratio):
            slot = scene.plan.keys.slots[history.rows.start]
            page = scene.plan.page_table[slot, t // per_page]
            entry = dense_entry(
                turned, history.raw, t, ratio, overlap, columns, ape.double(), norm_weight.double(), 1e-5, rope
            )
            expected[page, t % per_page] = entry
    for kernels in twins:
        cache = scene.fresh()
        pool = kernels.bind("pool_windows", **weights, overlap=overlap, indexer=indexer)
        assert pool(scene.raw, cache, scene.plan) is None
        made = cache.index_entries if indexer else cache.entries
        torch.testing.assert_close(made.double(), expected, rtol=bound, atol=bound, equal_nan=True)
        untouched = (cache.entries if indexer else cache.index_entries, cache.window, cache.raw)
        known = (scene.cache.entries if indexer else scene.cache.index_entries, scene.cache.window, scene.cache.raw)
        for buffer, before in zip(untouched, known):
            torch.testing.assert_close(buffer, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("indexer", [False, True], ids=["main", "indexer"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_pool_windows(twins, scenes, turned, tables, spans, kind, indexer):
    ratio, overlap = kind
    d, d_index = 10, 6
    halves = 2 if overlap else 1
    raw_width = 2 * halves * (d + d_index)
    # As few ring rows as reading needs: all of the window, or of the two windows, but the closing row itself.
    ring = max(halves * ratio - 1, 1)
    scene = scenes(
        seed=ratio,
        entries_known=False,
        spans=spans,
        d=d,
        d_index=d_index,
        ratio=ratio,
        raw_width=raw_width,
        raw_ring=ring,
    )
    made = torch.Generator().manual_seed(ratio)
    own = d_index if indexer else d
    ape = torch.randn(ratio, halves * own, generator=made)
    norm_weight, rope = torch.randn(own, generator=made), tables(4, 64)
    sizes = (own, raw_width, 2)
    check_pool(twins, turned, scene, spans, sizes, ratio, overlap, indexer, rope, ape, norm_weight, 2e-5)


@pytest.mark.parametrize("size", [0.0, 1e-4, 80.0, 1e6])
def test_pool_windows_extreme_gates(twins, scenes, turned, tables, size):
    """Equal gates average, huge ones choose; neither overflows."""
    spans = ((5, 20), (3, 1))
    scene = scenes(seed=5, entries_known=False, spans=spans, d=6, raw_width=24, raw_ring=7)
    scene.raw[:, 12:].mul_(size)
    scene.cache.raw[:, :, 12:].mul_(size)
    for history in scene.histories:
        history.raw[:, 12:].mul_(size)
    # The gates of 80 are sums with ``ape``, exact to 1e-5, which their exponentials keep.
    ape = torch.rand(4, 12, generator=torch.Generator().manual_seed(6))
    check_pool(twins, turned, scene, spans, (6, 24, 2), 4, True, False, tables(2, 32), ape, torch.ones(6), 1e-4)


@pytest.mark.parametrize("with_raw", [False, True])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_store_rows(twins, scenes, spans, with_raw):
    scene = scenes(seed=1, spans=spans, ring=7, raw_ring=5, raw_width=3)
    for kernels in twins:
        cache = scene.fresh()
        kernels.bind("store_rows")(scene.keys, scene.raw if with_raw else None, cache, scene.plan)
        for name, ring, rows in (("window", 7, "keys"), ("raw", 5, "raw")):
            expected = getattr(scene.cache, name).clone()
            for history, (start, length) in zip(scene.histories, spans):
                if length == 0 or (name == "raw" and not with_raw):
                    continue
                slot = scene.plan.keys.slots[history.rows.start]
                for p in range(max(0, start + length - ring), start + length):
                    expected[slot, p % ring] = getattr(history, rows)[p]
            torch.testing.assert_close(getattr(cache, name), expected, rtol=0, atol=0, equal_nan=True)
