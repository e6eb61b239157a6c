"""Attention and entry selection, plain and compiled, against dense float64 formulas that know no ring and no page."""

import numpy as np
import pytest
import torch
from dspark.layers.attention.plan import build_plan
from dspark.layers.kernels import sparse_attention

SPANS = {
    "no rows": (),
    "first token": ((0, 1),),
    "one decoding": ((37, 1),),
    "a prompt": ((0, 30),),
    "a chunk longer than its ring": ((5, 40),),
    "a chunk over pages": ((6, 21),),
    "windows that close": ((3, 1), (7, 1), (15, 1), (11, 2)),
    "prompt, chunk, decode and verify": ((0, 3), (17, 1), (8, 9), (15, 1), (30, 5)),
    "a request without rows": ((4, 2), (9, 0), (0, 1)),
}
BOUND = 2e-5  # absolute, of values of order one


def near(actual, expected, bound=BOUND):
    torch.testing.assert_close(actual.double(), expected, rtol=bound, atol=bound)


def dense_attend(turned, scene, sizes, q, selected, sinks, window, ratio, rope, scale, block=False):
    """Every query by itself: a softmax over the window's keys, the entries it may see, and the sink.

    In a ``block`` it sees the window before the step's first row, and all rows of the step.
    """
    out = torch.zeros(q.shape, dtype=torch.float64)
    for history, (start, length) in zip(scene.histories, sizes):
        for i, p in enumerate(range(start, start + length)):
            row = history.rows.start + i
            visible = (p + 1) // ratio if ratio else 0
            picked = range(visible) if selected is None else [t for t in selected[row].tolist() if t >= 0]
            first, stop = (start - window, start + length) if block else (p - window + 1, p + 1)
            seen = torch.cat((history.keys[max(0, first) : stop], history.entries[list(picked)])).double()
            logits = torch.cat((q[row].double() @ seen.T * scale, sinks.double()[:, None]), dim=1)
            mixed = logits.softmax(dim=1)[:, :-1] @ seen
            out[row] = turned(mixed, rope.cos[p], rope.sin[p], -1)
    return out


@pytest.mark.parametrize("window, num_heads", [(1, 3), (5, 3), (5, 12), (12, 3), (12, 8)])
@pytest.mark.parametrize("kind", ["sliding", "all entries", "selected entries"])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_attend(twins, scenes, turned, tables, spans, kind, window, num_heads):
    made = torch.Generator().manual_seed(window)
    ratio = 0 if kind == "sliding" else 4
    # As few ring rows as reading needs: the step itself brings the last key.
    scene = scenes(seed=window, spans=spans, d=10, ring=max(window - 1, 1), per_page=2)
    q = torch.randn(scene.keys.shape[0], num_heads, 10, generator=made)
    selected = None
    if kind == "selected entries":
        visible = (scene.plan.queries.positions + 1) // 4
        draws = torch.randint(-1, 12, (q.shape[0], 3), generator=made)
        selected = torch.where(draws < visible[:, None], draws, -1)
        # The same entry twice would count twice.
        selected[:, 1] = torch.where(selected[:, 1] == selected[:, 0], -1, selected[:, 1])
        selected[:, 2] = -1
    sinks, rope = torch.randn(num_heads, generator=made), tables(4, 64)
    weights = {"sinks": sinks, "window": window, "ratio": ratio, "rope": rope, "scale": 0.4}
    expected = dense_attend(turned, scene, spans, q, selected, **weights)
    for kernels in twins:
        near(kernels.bind("attend", **weights)(q, scene.keys, scene.cache, selected, scene.plan), expected)


@pytest.mark.parametrize("ratio", [0, 4])
@pytest.mark.parametrize("window", [1, 6])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_attend_over_whole_blocks(twins, scenes, turned, tables, spans, window, ratio):
    """Rows of a draft's block see each other in both directions, and all of them the same rows before the block."""
    scene = scenes(seed=window, spans=spans, d=10, ring=window)
    plan = scene.plan._replace(bidirectional=True)
    q = torch.randn(scene.keys.shape[0], 3, 10, generator=torch.Generator().manual_seed(window))
    weights = {"sinks": torch.ones(3), "window": window, "ratio": ratio, "rope": tables(4, 64), "scale": 0.4}
    expected = dense_attend(turned, scene, spans, q, None, **weights, block=True)
    for kernels in twins:
        near(kernels.bind("attend", **weights)(q, scene.keys, scene.cache, None, plan), expected)


@pytest.mark.parametrize("kind", ["all entries", "selected entries"])
def test_attend_of_some_of_the_rows(twins, scenes, turned, tables, kind):
    """Queries may be any of the step's rows, in any order; the keys are still all of them."""
    spans = ((0, 5), (17, 1), (0, 9), (30, 5))
    scene = scenes(seed=8, spans=spans, ring=5)
    # Rows 3 and 10 look like neighbours: positions 3 and 4 of requests that both start at 0.
    owned = torch.tensor([17, 3, 10, 4, 5, 14, 16])
    rows = torch.stack(tuple(scene.plan.keys)).numpy()
    plan = build_plan(rows, scene.plan.page_table, (4,), owned=owned.numpy())
    q = torch.randn(20, 2, 8, generator=torch.Generator().manual_seed(5))
    weights = {"sinks": torch.zeros(2), "window": 6, "ratio": 4, "rope": tables(4, 64), "scale": 0.4}
    index_q, index_weights = q[..., :6].contiguous(), q[..., 0].contiguous()
    chosen = None
    for kernels in twins:
        if kind == "selected entries":
            select = kernels.bind("select_entries", ratio=4, top_k=2, scale=1.0)
            chosen = select(index_q[owned], index_weights[owned], scene.cache, plan)
            whole = torch.full((20, chosen.shape[1]), -1)
            whole[owned] = chosen
            for row, scores in dense_scores(scene, spans, index_q, index_weights, 1.0):
                if row in owned.tolist():
                    best = sorted(scores.argsort(descending=True)[:2].tolist())
                    assert sorted(t for t in whole[row].tolist() if t >= 0) == best
        expected = dense_attend(turned, scene, spans, q, None if chosen is None else whole, **weights)
        out = kernels.bind("attend", **weights)(q[owned], scene.keys, scene.cache, chosen, plan)
        near(out, expected[owned])


@pytest.mark.parametrize("heads,d,rope_dim", [(1, 2, 2), (2, 7, 2), (5, 33, 6)])
def test_attend_odd_shapes(twins, scenes, turned, tables, heads, d, rope_dim):
    spans = ((0, 6), (9, 4))
    scene = scenes(seed=d, spans=spans, d=d, ring=6)
    q = torch.randn(10, heads, d, generator=torch.Generator().manual_seed(d))
    weights = {"sinks": torch.zeros(heads), "window": 7, "ratio": 4, "rope": tables(rope_dim, 16), "scale": d**-0.5}
    expected = dense_attend(turned, scene, spans, q, None, **weights)
    for kernels in twins:
        near(kernels.bind("attend", **weights)(q, scene.keys, scene.cache, None, scene.plan), expected)


@pytest.mark.parametrize("sink", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize("size", [1e-4, 30.0, 3e3])
def test_attend_extreme_logits(twins, scenes, turned, tables, size, sink):
    spans = ((9, 7), (0, 1))
    scene = scenes(seed=3, spans=spans, ring=11)
    q = size * torch.randn(8, 2, 8, generator=torch.Generator().manual_seed(4))
    weights = {"sinks": torch.full((2,), sink), "window": 12, "ratio": 4, "rope": tables(4, 16), "scale": 1.0}
    expected = dense_attend(turned, scene, spans, q, None, **weights)
    for kernels in twins:
        out = kernels.bind("attend", **weights)(q, scene.keys, scene.cache, None, scene.plan)
        assert out.isfinite().all()
        # A logit of size 1e4 is itself known to 1e-3 only; its softmax is as uncertain.
        near(out, expected, max(BOUND, size * 1e-5))


def test_softmax_of_lanes_is_the_exponential_function_bit_by_bit():
    """Two stretches of keys of 8 heads; what is not a number, or minus infinity, stays in its lane."""
    pytest.importorskip("numba")
    from dspark.layers.kernels.cpu.exp import exp_below
    from dspark.layers.kernels.cpu.product import LANES, spot
    from dspark.layers.kernels.cpu.softmax import softmax_lanes

    numbers = np.random.default_rng(0)
    for first, second in ((5, 3), (0, 4), (1, 0), (0, 0)):
        logits = numbers.normal(0, 30, (10, 2 * LANES)).astype(np.float32)
        sinks, inverse = numbers.normal(0, 30, (1, LANES)).astype(np.float32), np.empty((1, LANES), np.float32)
        logits[0, LANES + 2], logits[0, LANES + 3] = np.nan, -np.inf
        given, rows = logits.copy(), [*range(first), *range(6, 6 + second)]
        softmax_lanes(
            logits.strides[0], spot(logits, 0, LANES), first, spot(logits, 6, LANES), second, spot(sinks, 0, 0),
            spot(inverse, 0, 0),
        )  # fmt: skip
        for lane in range(LANES):
            keys, broken = given[rows, LANES + lane], lane == 2 and first > 0
            assert np.isnan(inverse[0, lane]) == broken
            if broken:
                continue
            top = max(sinks[0, lane], keys.max(initial=-np.inf))
            shares = np.array([exp_below(key - top) for key in keys], np.float32)
            assert (logits[rows, LANES + lane] == shares).all()
            total = np.float64(exp_below(sinks[0, lane] - top)) + shares.sum(dtype=np.float64)
            assert abs(inverse[0, lane] * total - 1) < 1e-6
        rest = [row for row in range(10) if row not in rows]
        assert np.array_equal(logits[rest], given[rest], equal_nan=True)
        assert np.array_equal(logits[:, :LANES], given[:, :LANES])


def dense_scores(scene, spans, q, weights, scale):
    """(row, float64 scores of the visible entries) of every query."""
    for history, (start, length) in zip(scene.histories, spans):
        for i, p in enumerate(range(start, start + length)):
            row = history.rows.start + i
            entries = history.index_entries[: (p + 1) // 4].double()
            dots = (q[row].double() @ entries.T).clamp(min=0)
            yield row, weights[row].double() @ dots * scale


def check_selection(chosen, scene, spans, q, weights, top_k, scale):
    """Exactly the best ``top_k`` visible entries, of equal scores the earlier ones; filled up with -1."""
    most = (scene.plan.max_position + 1) // 4
    assert chosen.shape == (q.shape[0], min(top_k, most)) and chosen.dtype == torch.int64
    for row, scores in dense_scores(scene, spans, q, weights, scale):
        ranked = sorted(range(len(scores)), key=lambda t: (-scores[t].item(), t))
        expected = sorted(ranked[:top_k])
        assert sorted(chosen[row].tolist()) == [-1] * (chosen.shape[1] - len(expected)) + expected, (row, scores)


@pytest.mark.parametrize("top_k, num_heads", [(1, 3), (3, 3), (3, 9), (100, 3)])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_select_entries(twins, scenes, spans, top_k, num_heads):
    made = torch.Generator().manual_seed(top_k)
    scene = scenes(seed=7, spans=spans, d_index=7)
    q = torch.randn(scene.keys.shape[0], num_heads, 7, generator=made)
    weights = torch.randn(q.shape[0], num_heads, generator=made)
    for kernels in twins:
        chosen = kernels.bind("select_entries", ratio=4, top_k=top_k, scale=0.3)(q, weights, scene.cache, scene.plan)
        check_selection(chosen, scene, spans, q, weights, top_k, 0.3)


@pytest.mark.parametrize("top_k", [1, 2, 5, 9])
@pytest.mark.parametrize("values", ["few values", "all zero", "all equal"])
def test_select_entries_of_equal_scores(twins, scenes, values, top_k):
    """Small integers make sums exact in any order, so most scores tie, many of them at zero or below."""
    spans = ((0, 60), (50, 3), (39, 1))
    scene = scenes(seed=11, spans=spans, d_index=4)
    made = torch.Generator().manual_seed(top_k)
    for history in scene.histories:
        history.index_entries.copy_(torch.randint(-1, 2, history.index_entries.shape, generator=made))
        if values == "all equal":
            history.index_entries.fill_(1.0)
    for history, (start, length) in zip(scene.histories, spans):
        slot = scene.plan.queries.slots[history.rows.start]
        for t in range((start + length) // 4):
            page = scene.plan.page_table[slot, t // 2]
            scene.cache.index_entries[page, t % 2] = history.index_entries[t]
    q = torch.randint(-1, 2, (64, 2, 4), generator=made).float()
    weights = torch.randint(-2, 2, (64, 2), generator=made).float()
    if values == "all zero":
        weights.zero_()
    for kernels in twins:
        chosen = kernels.bind("select_entries", ratio=4, top_k=top_k, scale=0.5)(q, weights, scene.cache, scene.plan)
        check_selection(chosen, scene, spans, q, weights, top_k, 0.5)


def test_plain_kernels_in_several_blocks(scenes, turned, tables, monkeypatch):
    """Memory is bounded by cutting the queries; the cut changes nothing."""
    spans = ((3, 9), (20, 2))
    scene = scenes(seed=2, spans=spans)
    q = torch.randn(11, 2, 8, generator=torch.Generator().manual_seed(1))
    weights = {"sinks": torch.zeros(2), "window": 6, "ratio": 4, "rope": tables(4, 32), "scale": 0.5}
    index_q, index_weights = q[..., :6].contiguous(), q[..., 0].contiguous()
    monkeypatch.setattr(sparse_attention, "BLOCK_ELEMENTS", 150)
    out = sparse_attention.attend(q, scene.keys, scene.cache, None, scene.plan, **weights)
    near(out, dense_attend(turned, scene, spans, q, None, **weights))
    chosen = sparse_attention.select_entries(index_q, index_weights, scene.cache, scene.plan, 4, 2, 1.0)
    check_selection(chosen, scene, spans, index_q, index_weights, 2, 1.0)
