"""V4 attention of every kind, cut over 1, 2, 4 and 8 ranks, against dense float64 maths without cache or chunks."""

import functools

import pytest
import torch
from dspark.comm.collectives import start_all_reduce
from dspark.layers.attention.v4 import V4Attention, V4AttentionSizes
from dspark.layers.kernels import Kernels
from dspark.layers.params import Scope
from dspark.layers.probe import ignore
from dspark.layers.rope import build_rope_table
from dspark.layers.stages import drain
from dspark.parallel.groups import Group, Groups
from dspark.parallel.topology import Topology
from dspark.runtime.cache import Cache, CacheLayout
from dspark.runtime.step import Span, build_step

KINDS = {"sliding": 0, "csa": 4, "hca": 8}
HIDDEN, HEADS, HEAD_DIM, LATENT, GROUPS, GROUP_RANK, WINDOW = 20, 8, 12, 14, 8, 5, 6
INDEX_HEADS, INDEX_DIM, TOP_K, ROPE_DIM, THETA, EPS = 3, 10, 2, 4, 1e4, 1e-6
LENGTHS, CHUNKS = (37, 22), (5, 1, 16, 15)


def sizes_of(kind):
    return V4AttentionSizes(
        kind=kind,
        ratio=KINDS[kind],
        hidden_size=HIDDEN,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        q_lora_rank=LATENT,
        o_groups=GROUPS,
        o_lora_rank=GROUP_RANK,
        window=WINDOW,
        index_num_heads=INDEX_HEADS,
        index_head_dim=INDEX_DIM,
        index_topk=TOP_K,
        norm_eps=EPS,
        rope_dim=ROPE_DIM,
    )


def weights(kind):
    """All tensors of one layer by canonical name, [out, in]."""
    made = torch.Generator().manual_seed(31)

    def random(*shape, mean=0.0, spread=None):
        return mean + torch.randn(*shape, generator=made) * (shape[-1] ** -0.5 if spread is None else spread)

    halves, m = (2 if kind == "csa" else 1), KINDS[kind]
    tensors = {
        "wq_a.weight": random(LATENT, HIDDEN),
        "q_norm.weight": random(LATENT, mean=1.0, spread=0.2),
        "wq_b.weight": random(HEADS * HEAD_DIM, LATENT),
        "wkv.weight": random(HEAD_DIM, HIDDEN),
        "kv_norm.weight": random(HEAD_DIM, mean=1.0, spread=0.2),
        "attn_sink": random(HEADS, spread=1.0),
        "wo_a.weight": random(GROUPS * GROUP_RANK, HEADS * HEAD_DIM // GROUPS),
        "wo_b.weight": random(HIDDEN, GROUPS * GROUP_RANK),
    }
    compressors = {"sliding": [], "hca": [("", HEAD_DIM)], "csa": [("", HEAD_DIM), ("indexer.", INDEX_DIM)]}[kind]
    for prefix, d in compressors:
        tensors[f"{prefix}compressor.wkv.weight"] = random(halves * d, HIDDEN)
        tensors[f"{prefix}compressor.wgate.weight"] = random(halves * d, HIDDEN)
        tensors[f"{prefix}compressor.ape"] = random(m, halves * d, spread=0.5)
        tensors[f"{prefix}compressor.norm.weight"] = random(d, mean=1.0, spread=0.2)
    if kind == "csa":
        tensors["indexer.wq_b.weight"] = random(INDEX_HEADS * INDEX_DIM, LATENT)
        tensors["indexer.weights_proj.weight"] = random(INDEX_HEADS, HIDDEN)
    return tensors


def inputs():
    return [torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


def norm(x, weight=1.0):
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def spin(x, positions, turned, sign=1):
    """``x`` [L, ..., d] with its tails turned to ``positions`` [L]."""
    inv = torch.tensor([THETA ** (-2 * i / ROPE_DIM) for i in range(ROPE_DIM // 2)], dtype=torch.float64)
    angles = positions.double().reshape(-1, *[1] * (x.dim() - 1)) * inv
    return turned(x, angles.cos(), angles.sin(), sign)


def dense_entries(x, w, prefix, m, overlap, turned):
    """Compressed entries of a whole sequence ``x`` [L, D]."""
    c, z = x @ w[f"{prefix}wkv.weight"].T, x @ w[f"{prefix}wgate.weight"].T
    d = c.shape[1] // 2 if overlap else c.shape[1]
    z = z + w[f"{prefix}ape"][torch.arange(len(x)) % m]
    entries = []
    for t in range(len(x) // m):
        now, before = slice(t * m, (t + 1) * m), slice((t - 1) * m, t * m)
        values, gates = c[now, -d:], z[now, -d:]
        if overlap and t:
            values, gates = torch.cat((c[before, :d], values)), torch.cat((z[before, :d], gates))
        entries.append((gates.softmax(0) * values).sum(0))
    made = norm(torch.stack(entries), w[f"{prefix}norm.weight"])
    return spin(made, torch.arange(len(entries)) * m, turned)


def dense_attention(kind, x, turned):
    w = {name: tensor.double() for name, tensor in weights(kind).items()}
    x, m, at = x.double(), KINDS[kind], torch.arange(len(x))
    latent = norm(x @ w["wq_a.weight"].T, w["q_norm.weight"])
    q = spin(norm((latent @ w["wq_b.weight"].T).unflatten(1, (HEADS, HEAD_DIM))), at, turned)
    keys = spin(norm(x @ w["wkv.weight"].T, w["kv_norm.weight"]), at, turned)
    visible = (at[:, None] >= at) & (at[:, None] - at < WINDOW)
    if m:
        entries = dense_entries(x, w, "compressor.", m, kind == "csa", turned)
        seen = torch.arange(len(entries)) < ((at + 1) // m)[:, None]
        if kind == "csa":
            index_keys = dense_entries(x, w, "indexer.compressor.", m, True, turned)
            index_q = spin((latent @ w["indexer.wq_b.weight"].T).unflatten(1, (INDEX_HEADS, INDEX_DIM)), at, turned)
            dots = torch.einsum("lhd,td->lht", index_q, index_keys).relu()
            scores = torch.einsum("lh,lht->lt", x @ w["indexer.weights_proj.weight"].T, dots)
            best = scores.masked_fill(~seen, -torch.inf).argsort(dim=1, descending=True)[:, :TOP_K]
            seen &= torch.zeros_like(seen).scatter(1, best, True)
        keys, visible = torch.cat((keys, entries)), torch.cat((visible, seen), dim=1)
    logits = torch.einsum("lhd,kd->lhk", q, keys) * HEAD_DIM**-0.5
    logits = logits.masked_fill(~visible[:, None], -torch.inf)
    sinks = w["attn_sink"][None, :, None].expand(len(x), -1, 1)
    probs = torch.cat((logits, sinks), dim=2).softmax(2)[:, :, :-1]
    o = spin(torch.einsum("lhk,kd->lhd", probs, keys), at, turned, -1)
    o = torch.einsum("lgi,gri->lgr", o.reshape(len(x), GROUPS, -1), w["wo_a.weight"].unflatten(0, (GROUPS, -1)))
    return o.flatten(1) @ w["wo_b.weight"].T


def run_attention(rank, world, named, backend, kinds):
    """Outputs of the layer by kind and cut, the two requests side by side."""
    group = Groups.build(Topology(tp=world), rank).attn_tp
    results = {}
    for kind in kinds:
        sizes = sizes_of(kind)
        rope = build_rope_table(ROPE_DIM, THETA, 64)
        layer = V4Attention(Scope(named(weights(kind))), sizes, rope, group, Kernels(backend), layer=0)
        layout = CacheLayout((sizes,), max_verify=1, itemsize=4)
        for chunks in ((40,), CHUNKS):
            cache = Cache(layout, 3, 3, 64, torch.device("cpu"), torch.float32)
            slots = [cache.acquire() for _ in LENGTHS]
            assert all(cache.reserve(slot, 40) for slot in slots)
            outputs, start = [[] for _ in LENGTHS], 0
            for chunk in chunks:
                parts = [x[start : start + chunk] for x in inputs()]
                spans = [Span(slot, start, [0] * len(part), 0) for slot, part in zip(slots, parts)]
                plan = build_step(spans, cache.page_table, layout.ratios, vocab_size=1).plan
                start_sum = functools.partial(start_all_reduce, group=group)
                stages = layer.stages(torch.cat(parts), cache.layers[0], plan, start_sum, ignore)
                for output, piece in zip(outputs, drain(stages).split([len(part) for part in parts])):
                    output.append(piece)
                start += chunk
            results[kind, chunks] = [torch.cat(output).numpy() for output in outputs]
    return results


@pytest.mark.parametrize("world,backend", [(1, "torch"), (1, "numba"), (2, "numba"), (4, "torch"), (8, "numba")])
def test_sharded_equals_dense(run_ranks, named, turned, world, backend):
    if backend == "numba":
        pytest.importorskip("numba")
        run_attention(0, 1, named, backend, KINDS)  # compiles before forking
    expected = {kind: [dense_attention(kind, x, turned) for x in inputs()] for kind in KINDS}
    for result in run_ranks(run_attention, world, named, backend, KINDS):
        assert len(result) == 2 * len(KINDS)
        for (kind, chunks), outputs in result.items():
            for output, reference in zip(outputs, expected[kind]):
                error = (torch.from_numpy(output).double() - reference).abs().max()
                assert error < 1e-5, (kind, chunks)


@pytest.mark.parametrize("size", [3, 16])
def test_heads_that_do_not_divide_are_named(named, size):
    group = Group("attn_tp", tuple(range(size)), 0, object())
    rope = build_rope_table(ROPE_DIM, THETA, 8)
    with pytest.raises(ValueError, match=f"heads is 8.* {size} ranks of group attn_tp"):
        V4Attention(Scope(named(weights("hca"))), sizes_of("hca"), rope, group, Kernels("torch"), layer=0)


def test_output_groups_that_do_not_divide_are_named(named):
    group = Group("attn_tp", tuple(range(8)), 0, object())
    sizes, rope = sizes_of("sliding")._replace(o_groups=4), build_rope_table(ROPE_DIM, THETA, 8)
    with pytest.raises(ValueError, match="output groups is 4.* 8 ranks of group attn_tp"):
        V4Attention(Scope(named(weights("sliding"))), sizes, rope, group, Kernels("torch"), layer=0)
