"""Linear layers and vocabulary layers cut over 1, 2, 3, 4 and 8 ranks: their shards are the checkpoint, their results
those of the whole weight."""

import pytest
import torch
from dspark.layers.embedding import ParallelLMHead, VocabParallelEmbedding, vocab_shard
from dspark.layers.kernels import Kernels
from dspark.layers.linear import (
    ColumnParallelLinear,
    GroupedColumnParallelLinear,
    MergedColumnParallelLinear,
    MergedLinear,
    Part,
    QKVParallelLinear,
    RowParallelLinear,
)
from dspark.layers.params import Scope
from dspark.parallel.groups import Group, Groups
from dspark.parallel.topology import Topology

HIDDEN, OUT, RANK, HEAD_DIM = 48, 80, 3, 5
QKV = {"8 heads, 8 kv": (8, 8), "8 heads, 1 kv": (8, 1), "32 heads, 4 kv": (32, 4), "16 heads, 2 kv": (16, 2)}
VOCABS = (1010, 1000, 130, 64, 7)
PLAIN = Kernels("torch")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights():
    """Every weight [out, in] as a checkpoint holds it."""
    made = {
        "column": random(OUT, HIDDEN, seed=1),
        "gate": random(OUT, HIDDEN, seed=2),
        "up": random(2 * OUT, HIDDEN, seed=3),
        "row": random(HIDDEN, OUT, seed=4),
        "grouped": random(8 * RANK, HIDDEN, seed=5),
    }
    for name, (num_heads, num_kv_heads) in QKV.items():
        made[f"{name}.q"] = random(num_heads * HEAD_DIM, HIDDEN, seed=6)
        made[f"{name}.k"] = random(num_kv_heads * HEAD_DIM, HIDDEN, seed=7)
        made[f"{name}.v"] = random(num_kv_heads * (HEAD_DIM + 1), HIDDEN, seed=8)
    for vocab in VOCABS:
        made[f"embed {vocab}"] = random(vocab, HIDDEN, seed=9)
        # With inputs that are all positive every logit is negative, so a padded column's 0 would be the highest.
        made[f"head {vocab}"] = -random(vocab, HIDDEN, seed=10).abs()
    return made


def pretend(size, rank):
    """A group to build layers with, without processes to talk to."""
    return Group("tp", tuple(range(size)), rank, None if size == 1 else object())


def token_ids(vocab):
    edges = [i for i in (0, 47, 48, 95, 96, 129, 511, 512, 383, 384, 767, 768, vocab - 1) if i < vocab]
    return torch.tensor(edges + torch.randint(0, vocab, (9,), generator=torch.Generator().manual_seed(1)).tolist())


def run_layers(rank, world, named, backend):
    """Results of every layer on this rank by name."""
    group = Groups.build(Topology(tp=world), rank).tp
    source, kernels, x = Scope(named(weights())), Kernels(backend), random(6, HIDDEN, seed=20)
    results = {}
    if world != 3:
        results["column"] = ColumnParallelLinear(source, "column", OUT, group, kernels)(x)
        results["gathered"] = ColumnParallelLinear(source, "column", OUT, group, kernels, gather=True)(x)
        merged = MergedColumnParallelLinear(source, {"gate": OUT, "up": 2 * OUT}, group, kernels)
        results["gate"], results["up"] = merged.split(merged(x))
        share = slice(group.rank * OUT // world, (group.rank + 1) * OUT // world)
        row, y = RowParallelLinear(source, "row", OUT, group, kernels), random(6, OUT, seed=21)[:, share]
        results["row"], results["partial"] = row(y), row.partial(y)
        grouped = GroupedColumnParallelLinear(source, "grouped", 8, RANK, group, kernels)
        share = slice(group.rank * 8 // world, (group.rank + 1) * 8 // world)
        results["grouped"] = grouped(random(6, 8, HIDDEN, seed=22)[:, share])
        for name, (num_heads, num_kv_heads) in QKV.items():
            names = (f"{name}.q", f"{name}.k", f"{name}.v")
            qkv = QKVParallelLinear(
                source, names, num_heads, num_kv_heads, HEAD_DIM, group, kernels, v_head_dim=HEAD_DIM + 1
            )
            for part, value in zip(names, qkv.split(qkv(x))):
                results[part] = value
    for vocab in VOCABS:
        embed = VocabParallelEmbedding(source, f"embed {vocab}", vocab, group)
        results[f"embed {vocab}"] = embed(token_ids(vocab))
        results[f"no ids {vocab}"] = embed(torch.empty(0, dtype=torch.int64))
        results[f"head {vocab}"] = ParallelLMHead(source, f"head {vocab}", vocab, group, kernels)(x.abs())
    return {name: value.numpy() for name, value in results.items()}


def run_everywhere(run_ranks, world, named, backend):
    if backend == "numba":
        # Compiled before forking, so that the ranks need not.
        pytest.importorskip("numba")
        kernels = Kernels(backend)
        kernels.bind("linear", weight=torch.ones(2, 2))(torch.ones(1, 2))
        kernels.bind("grouped_linear", weight=torch.ones(1, 2, 2))(torch.ones(1, 1, 2))
    results = run_ranks(run_layers, world, named, backend)
    return [{name: torch.from_numpy(value) for name, value in result.items()} for result in results]


def near(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


def check_vocab(result, full):
    x = random(6, HIDDEN, seed=20)
    for vocab in VOCABS:
        near(result[f"embed {vocab}"], full[f"embed {vocab}"][token_ids(vocab)])
        assert result[f"no ids {vocab}"].shape == (0, HIDDEN)
        logits, expected = result[f"head {vocab}"], x.abs() @ full[f"head {vocab}"].T
        assert (expected < 0).all() and logits.shape == (6, vocab) and logits.dtype == torch.float32
        near(logits, expected)
        assert torch.equal(logits.argmax(1), expected.argmax(1))


@pytest.mark.parametrize("world,backend", [(1, "torch"), (2, "torch"), (4, "torch"), (8, "torch"), (2, "numba")])
def test_sharded_equals_dense(run_ranks, named, world, backend):
    full, x = weights(), random(6, HIDDEN, seed=20)
    results = run_everywhere(run_ranks, world, named, backend)

    def side_by_side(name):
        return torch.cat([result[name] for result in results], dim=1)

    for name in ("column", "gate", "up"):
        near(side_by_side(name), x @ full[name].T)
    grouped = torch.einsum("tgi,gri->tgr", random(6, 8, HIDDEN, seed=22), full["grouped"].unflatten(0, (8, RANK)))
    near(side_by_side("grouped"), grouped.flatten(1))
    near(sum(result["partial"] for result in results), random(6, OUT, seed=21) @ full["row"].T)
    for result in results:
        near(result["gathered"], x @ full["column"].T)
        near(result["row"], random(6, OUT, seed=21) @ full["row"].T)
        check_vocab(result, full)
    for name, (_, num_kv_heads) in QKV.items():
        near(side_by_side(f"{name}.q"), x @ full[f"{name}.q"].T)
        # Which kv heads each rank holds, by the rule for more and for fewer ranks than heads.
        here = max(num_kv_heads // world, 1)
        for rank, result in enumerate(results):
            first = rank * num_kv_heads // world
            for part, width in (("k", HEAD_DIM), ("v", HEAD_DIM + 1)):
                rows = full[f"{name}.{part}"][first * width : (first + here) * width]
                near(result[f"{name}.{part}"], x @ rows.T)


def test_vocabulary_over_three_ranks(run_ranks, named):
    for result in run_everywhere(run_ranks, 3, named, "torch"):
        check_vocab(result, weights())


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shards_together_are_the_checkpoint(named, size):
    """What a layer makes of the unit vectors are the columns of its weight [out, in]."""
    full = weights()
    source = Scope(named(full))
    ranks = [pretend(size, rank) for rank in range(size)]
    columns = [ColumnParallelLinear(source, "column", OUT, group, PLAIN) for group in ranks]
    assert torch.equal(torch.cat([layer(torch.eye(HIDDEN)).T for layer in columns]), full["column"])
    merged = [MergedColumnParallelLinear(source, {"gate": OUT, "up": 2 * OUT}, group, PLAIN) for group in ranks]
    parts = [layer(torch.eye(HIDDEN)).T.split(layer.sizes) for layer in merged]
    assert torch.equal(torch.cat([gate for gate, _ in parts]), full["gate"])
    assert torch.equal(torch.cat([up for _, up in parts]), full["up"])
    rows = [RowParallelLinear(source, "row", OUT, group, PLAIN) for group in ranks]
    ones = torch.eye(OUT // size)
    assert torch.equal(torch.cat([layer.partial(ones).T for layer in rows], dim=1), full["row"])
    grouped = [GroupedColumnParallelLinear(source, "grouped", 8, RANK, group, PLAIN) for group in ranks]
    assert torch.equal(torch.cat([layer.weight.transpose(1, 2).flatten(0, 1) for layer in grouped]), full["grouped"])
    for vocab in VOCABS:
        tables = [VocabParallelEmbedding(source, f"embed {vocab}", vocab, group) for group in ranks]
        assert torch.equal(torch.cat([table.weight[:-1] for table in tables]), full[f"embed {vocab}"])
        assert all((table.weight[-1] == 0).all() for table in tables)
        heads = [ParallelLMHead(source, f"head {vocab}", vocab, group, PLAIN) for group in ranks]
        whole = torch.cat([head.weight.T for head in heads])
        assert torch.equal(whole[:vocab], full[f"head {vocab}"]) and (whole[vocab:] == 0).all()


def test_a_merged_product_takes_any_slices(named):
    full = weights()
    layer = MergedLinear(Scope(named(full)), [Part("up", 3, 10), Part("gate", 0, 0), Part("gate", 79, 80)], PLAIN)
    x = random(2, HIDDEN)
    first, nothing, last = layer.split(layer(x))
    near(first, x @ full["up"][3:10].T)
    near(last, x @ full["gate"][79:].T)
    assert nothing.shape == (2, 0)


@pytest.mark.parametrize(
    "vocab,size,ranges,padded",
    [
        (129280, 8, [(r * 16160, (r + 1) * 16160) for r in range(8)], 129280),
        (1010, 2, [(0, 512), (512, 1010)], 1024),
        (1000, 3, [(0, 384), (384, 768), (768, 1000)], 1152),
        (130, 4, [(0, 48), (48, 96), (96, 130), (130, 130)], 192),
        (7, 8, [(0, 7), *[(7, 7)] * 7], 64),
    ],
)
def test_vocabulary_ranges(vocab, size, ranges, padded):
    shards = [vocab_shard(vocab, size, rank) for rank in range(size)]
    assert [(shard.start, shard.stop) for shard in shards] == ranges
    assert {(shard.size, shard.padded) for shard in shards} == {(padded // size, padded)}


def test_kv_replicas_of_the_example():
    """32 query heads, 4 kv heads, 8 ranks: ranks 0 and 1 hold kv head 0, ranks 2 and 3 head 1, and so on."""
    taken = []

    class Log:
        def take(self, name, *, dim=0, start=0, stop=None, dtype=None):
            taken.append((name, start, stop))
            return torch.zeros(stop - start, 2)

    for rank in range(8):
        taken.clear()
        layer = QKVParallelLinear(Scope(Log()), ("q", "k", "v"), 32, 4, 10, pretend(8, rank), PLAIN)
        kv = rank // 2
        assert taken == [
            ("q", 40 * rank, 40 * rank + 40),
            ("k", 10 * kv, 10 * kv + 10),
            ("v", 10 * kv, 10 * kv + 10),
        ]
        assert sum(layer.sizes) == (4 + 1 + 1) * 10 and layer.num_kv_heads == 1


@pytest.mark.parametrize(
    "build,numbers",
    [
        (lambda s, g: ColumnParallelLinear(s, "column", OUT, g, PLAIN), (80, 7)),
        (lambda s, g: MergedColumnParallelLinear(s, {"gate": OUT}, g, PLAIN), (80, 7)),
        (lambda s, g: RowParallelLinear(s, "row", OUT, g, PLAIN), (80, 7)),
        (lambda s, g: GroupedColumnParallelLinear(s, "grouped", 8, RANK, g, PLAIN), (8, 7)),
        (lambda s, g: QKVParallelLinear(s, ("q", "k", "v"), 32, 4, 5, g, PLAIN), (32, 7)),
        (lambda s, g: QKVParallelLinear(s, ("q", "k", "v"), 14, 4, 5, g, PLAIN), (4, 7)),
        (lambda s, g: QKVParallelLinear(s, ("q", "k", "v"), 14, 8, 5, g, PLAIN), (8, 7)),
    ],
)
def test_sizes_that_do_not_divide_are_named(named, build, numbers):
    with pytest.raises(ValueError) as error:
        build(Scope(named(weights())), pretend(7, 0))
    for number in numbers:
        assert str(number) in str(error.value)
