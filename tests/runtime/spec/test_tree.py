"""Draft trees: grown and verified as reference code does, and the exact law of what verification emits."""

import itertools
import json
import pathlib

import numpy as np
import pytest
import torch
from dspark.parallel.groups import Group
from dspark.runtime.draft.growth import TreeGrower, TreeShape
from dspark.runtime.spec.rows import PackedRows
from dspark.runtime.spec.tree import ROOT, DraftTree, trees_from_tensor, trees_to_tensor
from dspark.runtime.spec.tree_verify import verify_greedy_trees, verify_trees
from safetensors import safe_open

DATA = pathlib.Path(__file__).resolve().parents[2] / "data" / "speculative"
EXACT = 1e-12
CASES = range(12)


@pytest.fixture(scope="module")
def oracle():
    """``(meta, tensors)`` of every case."""
    with safe_open(DATA / "eagle_tree.safetensors", "pt") as file:
        meta = json.loads(file.metadata()["meta"])["cases"]
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    return [
        (one, {k.removeprefix(f"c{i}."): v for k, v in tensors.items() if k.startswith(f"c{i}.")})
        for i, one in enumerate(meta)
    ]


def grown(cases, kind="dynamic"):
    """The trees of several cases of one shape, as requests of one step."""
    meta, depth = cases[0][0], cases[0][0]["depth_forwards"] + 1
    shape = TreeShape.make(kind, meta["draft_nodes"], meta["top_k"], depth, meta["vocab"])
    grower = TreeGrower(shape, Group.alone("attn_block"), torch.device("cpu"))

    def advance(frontier):
        level = 0 if frontier is None else frontier.level
        return torch.cat([tensors[f"draft_logits_{level}"] for _, tensors in cases])

    return grower.grow([meta["root"] for meta, _ in cases], True, advance)


@pytest.mark.parametrize("first", range(4))
def test_trees_are_those_of_the_reference(oracle, first):
    """Three requests at a time: tokens, parents, mask, positions, and the paths to the leaves."""
    cases = oracle[first::4]
    for (_, expected), tree in zip(cases, grown(cases)):
        assert tree.tokens.tolist() == expected["tokens"].tolist()
        assert tree.parents.tolist() == expected["parents"].tolist()
        assert (tree.sees == expected["mask"].numpy()).all()
        assert tree.depths.tolist() == expected["position_offset"].tolist()
        leaves = [node for node, children in enumerate(tree.children) if not children]
        paths = [[n for n in path if n >= 0] for path in expected["retrieve_indices"].tolist()]
        assert sorted(map(tree.path, leaves)) == sorted(paths)


@pytest.mark.parametrize("case", CASES)
def test_verification_is_that_of_the_reference(oracle, case):
    """Greedy and sampled: the path that is kept, and the law of the token behind it."""
    expected = oracle[case][1]
    tree = DraftTree(expected["tokens"].numpy(), expected["parents"].numpy())
    rows = PackedRows.from_trees([tree], oracle[case][0]["depth_forwards"] + 1)
    greedy = verify_greedy_trees(rows, expected["target_logits"].argmax(1).numpy())
    path = expected["greedy_path_nodes"].tolist()
    assert greedy.token_lists() == [[*tree.tokens[path[1:]].tolist(), *expected["greedy_next_token"].tolist()]]
    # Which child comes first changes no law; the reference goes by its table of paths.
    order = list(dict.fromkeys(node for path in expected["retrieve_indices"].tolist() for node in path if node >= 0))
    parents = [ROOT, *(order.index(tree.parents[node]) for node in order[1:])]
    tree = DraftTree(tree.tokens[order], np.array(parents))
    rows = PackedRows.from_trees([tree], rows.gamma)
    probs = expected["target_logits"].double().softmax(1)[order]
    coins = np.full((1, tree.num_drafts), np.nan)
    tried = expected["walk_uniforms"].numpy()
    coins[0, : len(tried)] = tried
    kept = tree.tokens[[order.index(node) for node in expected["walk_path_nodes"].tolist()[1:]]].tolist()
    law = expected["walk_next_law"].double() / expected["walk_next_law"].double().sum()
    for token in law.nonzero()[:, 0].tolist():
        edge = law[: token + 1].sum()
        for uniform in (edge - law[token] + 1e-6, edge - 1e-6):
            verdict = verify_trees(rows, probs, coins, uniform[None])
            assert verdict.token_lists() == [[*kept, token]]


def random_tree(seed, num_nodes, vocab, depth):
    """A tree whose siblings differ, and nothing else is sure of."""
    generator = np.random.default_rng(seed)
    tokens, parents = [0], [ROOT]
    while len(tokens) < num_nodes:
        parent = int(generator.integers(len(tokens)))
        taken = [tokens[i] for i, above in enumerate(parents) if above == parent]
        level = len(DraftTree(np.array(tokens), np.array(parents)).path(parent))
        free = [x for x in range(vocab) if x not in taken]
        if free and level <= depth:
            tokens.append(int(generator.choice(free)))
            parents.append(parent)
    return DraftTree(np.array(tokens), np.array(parents))


def law_of(prefix, seed, vocab):
    """p behind ``prefix``; now and then without some token."""
    generator = np.random.default_rng([seed, *[x + 1 for x in prefix]])
    law = generator.dirichlet(np.full(vocab, 0.7))
    law[generator.random(vocab) < 0.15] = 0.0
    return law / law.sum() if law.sum() else np.eye(vocab)[0]


def cells(points):
    """Midpoints and widths of the cells of [0, 1) between ``points``."""
    edges = np.array([0.0, *sorted(x for x in points if 0 < x < 1), 1.0])
    keep = np.diff(edges) > 1e-14
    return ((edges[1:] + edges[:-1]) / 2)[keep], np.diff(edges)[keep]


def emitted_law(tree, laws):
    """{emitted tokens: probability} over all coins and final draws, which the choice is a step function of."""
    coins, finals = [set() for _ in range(tree.num_drafts)], set()
    for node, children in enumerate(tree.children):
        left, rest = 1.0, laws[node].copy()
        for child in children:
            chance = laws[node][tree.tokens[child]]
            for tries in coins:  # a walk may come here with any number of coins used
                tries.add(chance / left if left > 0 else 0.0)
            left -= chance
            rest[tree.tokens[child]] = 0.0
        finals.update((rest / rest.sum()).cumsum().tolist() if rest.sum() > 0 else laws[node].cumsum().tolist())
    axes = [cells(points) for points in (*coins, finals)]
    law = {}
    for points, widths in zip(itertools.product(*(a[0] for a in axes)), itertools.product(*(a[1] for a in axes))):
        add_outcome(law, tree, laws, np.array(points), float(np.prod(widths)))
    return law


def add_outcome(law, tree, laws, point, mass):
    rows = PackedRows.from_trees([tree], 8)
    final = torch.tensor(point[-1:])
    (tokens,) = verify_trees(rows, torch.from_numpy(np.stack(laws)), point[None, :-1], final).token_lists()
    law[tuple(tokens)] = law.get(tuple(tokens), 0.0) + mass


@pytest.mark.parametrize("seed, num_nodes, vocab", [(0, 4, 3), (1, 4, 3), (2, 5, 2), (3, 4, 4), (4, 3, 3)])
def test_the_law_of_what_is_emitted_is_the_targets(seed, num_nodes, vocab):
    """Exactly: the first tokens, completed by the target where fewer come out of the step."""
    tree = random_tree(seed, num_nodes, vocab, depth=3)
    prefixes = [tuple(tree.tokens[tree.path(node)[1:]].tolist()) for node in range(num_nodes)]
    law = emitted_law(tree, [law_of(prefix, seed, vocab) for prefix in prefixes])
    depth = max(map(len, law))
    found, expected = (dict.fromkeys(itertools.product(range(vocab), repeat=depth), 0.0) for _ in range(2))
    for tokens in found:
        expected[tokens] = np.prod([law_of(tokens[:k], seed, vocab)[tokens[k]] for k in range(depth)])
        for size in range(1, depth + 1):
            rest = np.prod([law_of(tokens[:k], seed, vocab)[tokens[k]] for k in range(size, depth)])
            found[tokens] += law.get(tokens[:size], 0.0) * rest
    assert sum(expected.values()) == pytest.approx(1, abs=EXACT)
    assert max(abs(found[tokens] - expected[tokens]) for tokens in found) < EXACT


def test_static_trees_have_one_shape(oracle):
    """Whatever the draft thinks; the ranks say how far down each branch goes."""
    trees = grown(oracle[2::4], "static")
    assert all(tree.parents.tolist() == trees[0].parents.tolist() for tree in trees)
    assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in itertools.pairwise(trees))
    assert trees[0].num_drafts == 20 and len(trees[0].children[0]) == 3
    below = [int(trees[0].sees[:, child].sum()) for child in trees[0].children[0]]
    assert below == sorted(below, reverse=True) and below[0] > below[-1]


def test_equal_scores_never_lose_a_parent():
    """A draft that is certain: every node on the path scores 0, and tokens of probability 0 are no nodes."""
    shape = TreeShape.make("dynamic", 6, 3, 4, 5)
    grower = TreeGrower(shape, Group.alone("attn_block"), torch.device("cpu"))

    def advance(frontier):
        rows = 1 if frontier is None else frontier.tokens.size
        return torch.full((rows, 5), -torch.inf).index_fill_(1, torch.tensor([2]), 1.0)

    (tree,) = grower.grow([4], True, advance)
    assert tree.tokens.tolist() == [4, 2, 2, 2, 2] and tree.parents.tolist() == [-1, 0, 1, 2, 3]


def test_cut_follow_and_messages():
    trees = [random_tree(seed, 12, 5, depth=4) for seed in range(6)] + [DraftTree.lone(3)]
    again = trees_from_tensor(trees_to_tensor(trees, 15))
    for tree, other in zip(trees, again):
        assert (tree.tokens == other.tokens).all() and (tree.parents == other.parents).all()
        for node in range(len(tree.tokens)):
            assert tree.follow(tree.tokens[tree.path(node)[1:]].tolist()) == tree.path(node)
        short = tree.cut(2)
        assert short.tokens.tolist() == tree.tokens[tree.depths <= 2].tolist()
        paths = [tree.tokens[tree.path(n)].tolist() for n in range(len(tree.tokens)) if tree.depths[n] <= 2]
        assert [short.tokens[short.path(n)].tolist() for n in range(len(short.tokens))] == paths


@pytest.mark.parametrize(
    "sizes, message",
    [((None, 30, 3, 24), "--tree-topk is 30, but the vocabulary has 24"), ((25, 4, 2, 24), "25, but 2 levels .* 20")],
)
def test_shapes_that_cannot_be(sizes, message):
    with pytest.raises(ValueError, match=message):
        TreeShape.make("dynamic", *sizes)
