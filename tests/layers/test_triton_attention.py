"""Triton's kernels that read or write a cache, against their plain twins: in the interpreter, or on a GPU.

Rows and entries that must not be read hold NaN. The plain twins are held to dense float64 formulas elsewhere.
"""

import pytest
import torch

SPANS = {
    "no rows": (),
    "first token": ((0, 1),),
    "chunk longer than its ring": ((5, 7),),
    "prompt, decode, nothing, verify": ((0, 2), (17, 1), (9, 0), (30, 3)),
}
# Absolute and relative, of values of order one. bfloat16: a few units in its last place.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
CASES = [(spans, torch.float32) for spans in SPANS.values()] + [(list(SPANS.values())[-1], torch.bfloat16)]
CASE_NAMES = [*SPANS, "bfloat16"]


def near(actual, expected, bound, equal_nan=False):
    actual, expected = actual.cpu().double(), expected.cpu().double()
    torch.testing.assert_close(actual, expected, rtol=bound, atol=bound, equal_nan=equal_nan)


def in_dtype(scene, dtype):
    cache = type(scene.cache)(*(buffer.to(dtype) for buffer in scene.cache[:4]), None)
    return scene._replace(cache=cache, keys=scene.keys.to(dtype), raw=scene.raw.to(dtype))


def random(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chosen_entries(scene, num_chosen, seed):
    """Different visible entries of every query in no order, -1 between them."""
    draws = torch.rand(scene.keys.shape[0], 12, generator=torch.Generator().manual_seed(seed)).argsort(1)
    visible = (scene.plan.queries.positions + 1) // 4
    return torch.where(draws < visible[:, None], draws, -1)[:, :num_chosen]


@pytest.mark.parametrize("kind", ["sliding", "all entries", "selected entries", "blocks"])
@pytest.mark.parametrize("spans,dtype", CASES, ids=CASE_NAMES)
def test_attend(triton_twins, scenes, tables, moved, spans, kind, dtype):
    scene = in_dtype(scenes(seed=3, spans=spans, d=18, ring=6, per_page=2), dtype)
    plan = scene.plan._replace(bidirectional=kind == "blocks")
    q = random(scene.keys.shape[0], 3, 18, seed=1, dtype=dtype)
    selected = chosen_entries(scene, 5, seed=2) if kind == "selected entries" else None
    ratio = 0 if kind == "sliding" else 4
    weights = {"sinks": random(3, seed=4), "window": 6, "ratio": ratio, "rope": tables(4, 64), "scale": 0.4}
    plain, compiled = triton_twins
    expected = plain.bind("attend", **weights)(q, scene.keys, scene.cache, selected, plan)
    run = compiled.bind("attend", **moved(weights))
    near(run(*moved((q, scene.keys, scene.cache, selected, plan))), expected, BOUNDS[dtype])


@pytest.mark.parametrize("heads,d,rope_dim,num_rows", [(1, 2, 2, 3), (33, 7, 2, 1), (2, 35, 6, 3), (1, 16, 4, 6)])
def test_attend_odd_shapes(triton_twins, scenes, tables, moved, heads, d, rope_dim, num_rows):
    """Heads in several tiles, odd widths, more keys than a tile; keys cut into slices for few rows only."""
    scene = scenes(seed=d, spans=((110 - num_rows, num_rows),), d=d, ring=80)
    q = random(num_rows, heads, d, seed=1)
    weights = {"sinks": random(heads, seed=2), "window": 70, "ratio": 4, "rope": tables(rope_dim, 160), "scale": 0.5}
    plain, compiled = triton_twins
    expected = plain.bind("attend", **weights)(q, scene.keys, scene.cache, None, scene.plan)
    run = compiled.bind("attend", **moved(weights))
    near(run(*moved((q, scene.keys, scene.cache, None, scene.plan))), expected, 2e-5)


@pytest.mark.parametrize("sink", [-1e4, 1e4])
@pytest.mark.parametrize("size", [1e-4, 3e3])
def test_attend_extreme_logits(triton_twins, scenes, tables, moved, size, sink):
    scene = scenes(seed=3, spans=((9, 7), (0, 1)), ring=11)
    q = size * random(8, 2, 8, seed=4)
    weights = {"sinks": torch.full((2,), sink), "window": 12, "ratio": 4, "rope": tables(4, 16), "scale": 1.0}
    plain, compiled = triton_twins
    expected = plain.bind("attend", **weights)(q, scene.keys, scene.cache, None, scene.plan)
    out = compiled.bind("attend", **moved(weights))(*moved((q, scene.keys, scene.cache, None, scene.plan)))
    near(out, expected, max(2e-5, size * 1e-5))


def test_rows_of_attention_do_not_know_each_other(scenes, tables, moved):
    """Bound deterministically, a row's result has the same bits in any company."""
    pytest.importorskip("triton")
    from dspark.layers.kernels import Kernels

    scene = scenes(seed=1, spans=((21, 5), (2, 4)), d=8, ring=30)
    weights = {"sinks": torch.zeros(2), "window": 7, "ratio": 4, "rope": tables(4, 64), "scale": 0.4}
    attend = Kernels("triton", deterministic=True).bind("attend", **moved(weights))
    q = moved(random(9, 2, 8, seed=2))
    keys, cache, plan = moved((scene.keys, scene.cache, scene.plan))
    whole = attend(q, keys, cache, None, plan)
    for part in (slice(0, 1), slice(4, 7)):
        queries = type(plan.queries)(*(field[part] for field in plan.queries))
        assert torch.equal(attend(q[part], keys, cache, None, plan._replace(queries=queries)), whole[part])


@pytest.mark.parametrize("top_k", [2, 100])
@pytest.mark.parametrize("spans,dtype", CASES, ids=CASE_NAMES)
def test_select_entries(triton_twins, scenes, moved, spans, top_k, dtype):
    scene = in_dtype(scenes(seed=7, spans=spans, d_index=7), dtype)
    num_rows = scene.keys.shape[0]
    q, weights = random(num_rows, 3, 7, seed=1, dtype=dtype), random(num_rows, 3, seed=2, dtype=dtype)
    found = []
    for kernels in triton_twins:
        select = kernels.bind("select_entries", ratio=4, top_k=top_k, scale=0.3)
        found.append(select(*moved((q, weights, scene.cache, scene.plan))).sort(dim=1).values)
    assert torch.equal(*found) and found[1].dtype == torch.int64


@pytest.mark.parametrize("values", ["few values", "all zero", "all equal"])
def test_select_entries_of_equal_scores(triton_twins, scenes, moved, values):
    """Small integers make sums exact in any order, so most scores tie; the earlier entries win."""
    scene = scenes(seed=11, spans=((4, 5), (50, 2), (39, 1)), d_index=4)
    made = torch.Generator().manual_seed(3)
    entries = torch.randint(-1, 2, scene.cache.index_entries.shape, generator=made).float()
    scene.cache.index_entries.copy_(entries.fill_(1.0) if values == "all equal" else entries)
    q = torch.randint(-1, 2, (8, 2, 4), generator=made).float()
    weights = torch.randint(-2, 2, (8, 2), generator=made).float() * (values != "all zero")
    for top_k in (2, 5):
        found = []
        for kernels in triton_twins:
            select = kernels.bind("select_entries", ratio=4, top_k=top_k, scale=0.5)
            found.append(select(*moved((q, weights, scene.cache, scene.plan))).sort(dim=1).values)
        assert torch.equal(*found)


def test_select_entries_with_scores_in_turns(triton_twins, scenes, moved, monkeypatch):
    from dspark.layers.kernels.triton import select_entries

    monkeypatch.setattr(select_entries, "MOST_SCORES", 40)
    scene = scenes(seed=2, spans=((30, 5),))
    arguments = moved((random(5, 2, 6, seed=1), random(5, 2, seed=2), scene.cache, scene.plan))
    found = [k.bind("select_entries", ratio=4, top_k=2, scale=1.0)(*arguments) for k in triton_twins]
    assert torch.equal(*(one.sort(dim=1).values for one in found))


KINDS = {"hca 4": (4, False), "hca 16": (16, False), "csa 4": (4, True), "csa 2": (2, True)}


@pytest.mark.parametrize("indexer", [False, True], ids=["main", "indexer"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("spans,dtype", CASES[1:], ids=CASE_NAMES[1:])
def test_pool_windows(triton_twins, scenes, tables, moved, spans, kind, indexer, dtype):
    (ratio, overlap), (d, d_index) = kind, (9, 6)
    halves, own = 1 + overlap, d_index if indexer else d
    sizes = {"d": d, "d_index": d_index, "ratio": ratio, "raw_width": 2 * halves * (d + d_index)}
    scene = scenes(seed=ratio, entries_known=False, spans=spans, raw_ring=halves * ratio - 1, **sizes)
    scene = in_dtype(scene, dtype)
    weights = {"ape": random(ratio, halves * own, seed=1), "norm_weight": random(own, seed=2), "rope": tables(4, 64)}
    weights |= {"eps": 1e-5, "ratio": ratio, "overlap": overlap, "indexer": indexer}
    made = []
    for kernels in triton_twins:
        cache = moved(type(scene.cache)(*(buffer.clone() for buffer in scene.cache[:4]), None))
        kernels.bind("pool_windows", **moved(weights))(*moved((scene.raw, cache, scene.plan)))
        made.append(cache)
    for before, after in zip(made[0][:4], made[1][:4]):
        near(after, before, BOUNDS[dtype], equal_nan=True)


@pytest.mark.parametrize("size", [0.0, 80.0, 1e6])
def test_pool_windows_extreme_gates_and_padding(triton_twins, scenes, tables, moved, size):
    """Huge gates choose and do not overflow; a closing row of -1 writes nothing."""
    scene = scenes(seed=5, entries_known=False, spans=((5, 20), (3, 1)), d=6, raw_width=24, raw_ring=7)
    for rows in (scene.raw, scene.cache.raw):
        rows[..., 12:] *= size
    weights = {"ape": random(4, 12, seed=6), "norm_weight": torch.ones(6), "rope": tables(2, 32), "eps": 1e-5}
    weights |= {"ratio": 4, "overlap": True, "indexer": False}
    padded = torch.cat((torch.tensor([-1]), scene.plan.closing[4], torch.tensor([-1, -1])))
    made = []
    for kernels, closing in zip(triton_twins, (scene.plan.closing[4], padded)):
        cache, plan = moved(scene.fresh()._replace(host=None)), scene.plan._replace(closing={4: closing})
        kernels.bind("pool_windows", **moved(weights))(*moved((scene.raw, cache, plan)))
        made.append(cache.entries)
    near(made[1], made[0], 1e-4, equal_nan=True)


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_store_rows(triton_twins, scenes, moved, spans):
    scene = scenes(seed=1, spans=spans, ring=7, raw_ring=5, raw_width=3)
    made = []
    for kernels in triton_twins:
        cache = moved(scene.fresh()._replace(host=None))
        kernels.bind("store_rows")(*moved((scene.keys, scene.raw, cache, scene.plan)))
        made.append(cache)
    for before, after in zip(made[0][:4], made[1][:4]):
        near(after, before, 0.0, equal_nan=True)
