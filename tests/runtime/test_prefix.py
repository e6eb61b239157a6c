"""Prefix reuse: the tree's books, and that a request resumed behind a shared prefix gets the tokens it gets alone.

The model is a small one of made-up weights, with and without a made-up draft; references are runs without reuse.
"""

import random

import pytest
import torch
from dspark.layers.attention.v4 import V4AttentionSizes
from dspark.layers.kernels import Kernels
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.cache import Cache, CacheLayout
from dspark.runtime.checkpoint import RandomWeights
from dspark.runtime.draft import drafter_class
from dspark.runtime.draft.base import DraftElsewhere, DraftRoom
from dspark.runtime.engine import Engine
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import make_cache
from dspark.runtime.model_config import ModelConfig
from dspark.runtime.models.deepseek_v4 import DeepseekV4
from dspark.runtime.prefix import PrefixTree, RingCopy, RingSnapshots
from dspark.runtime.request import Request, SamplingParams

CPU = torch.device("cpu")
PAGE = 256
GAMMA = 3
CONFIG = {
    "model_type": "deepseek_v4",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 8,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 8,
    "o_groups": 2,
    "o_lora_rank": 8,
    "index_n_heads": 2,
    "index_head_dim": 6,
    "index_topk": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "sliding_window": 10,
    "swiglu_limit": 10.0,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "max_position_embeddings": 2048,
    "compress_ratios": [0, 4, 128, 0, 0],
    "num_nextn_predict_layers": 1,
    "num_hash_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
    "dspark_block_size": GAMMA,
    "dspark_markov_rank": 8,
    "dspark_noise_token_id": 2,
    "dspark_target_layer_ids": [0, 2],
}
MIXED = (
    V4AttentionSizes("csa", 4, 16, 2, 8, 8, 1, 8, 10, 2, 6, 4, 1e-6, 4),
    V4AttentionSizes("hca", 128, 16, 2, 8, 8, 1, 8, 10, 2, 6, 4, 1e-6, 4),
)


def new_cache(num_slots=4, num_pages=8):
    return Cache(CacheLayout(MIXED, 3, 4), num_slots, num_pages, 2048, CPU, torch.float32)


def stand(tree, cache, names):
    """Store pages of made-up tokens, one for each letter, as a request would; the node it stands on."""
    slot = cache.acquire()
    assert cache.reserve(slot, len(names) * PAGE)
    node = tree.root
    for index, name in enumerate(names):
        node, _ = tree.extend(node, key(name), cache.page(slot, index))
    cache.release(slot)
    return node


def key(name):
    return (ord(name),) * PAGE


def text(names, more=1):
    return [ord(name) for name in names for _ in range(PAGE)] + [0] * more


def test_the_tree_finds_the_longest_prefix_that_leaves_a_token():
    cache = new_cache()
    tree = PrefixTree(cache, 8)
    tree.unlock(stand(tree, cache, "abc"))
    tree.unlock(stand(tree, cache, "abd"))
    assert len(tree) == 4 and tree.num_evictable == 4 and cache.num_free_pages == 4
    assert [tree.find(text(names)).depth for names in ("", "x", "a", "abc", "abd", "abx", "bc")] == [
        0,
        0,
        1,
        3,
        3,
        2,
        0,
    ]
    assert tree.find(text("abc", more=0)).depth == 2, "the last token must run"
    assert tree.find(text("ab", more=255)).depth == 2


def test_the_least_recently_used_leaf_goes_first_and_used_paths_stay():
    cache = new_cache()
    tree = PrefixTree(cache, 4)
    tree.unlock(stand(tree, cache, "ab"))
    tree.unlock(stand(tree, cache, "cd"))
    node = tree.find(text("ab"))
    pages = tree.lock(node)
    assert len(pages) == 2 and tree.num_evictable == 2
    assert not tree.make_room(cache.num_free_pages + 3) and len(tree) == 4
    tree.unlock(stand(tree, cache, "e"))  # in place of d
    assert [tree.find(text(names)).depth for names in ("cd", "ab", "e")] == [1, 2, 1]
    assert tree.make_room(cache.num_free_pages + 2) and len(tree) == 2 and tree.num_evicted == 3
    assert tree.extend(node, key("x"), 7)[1] and tree.extend(tree.find(text("abx")), key("y"), 7)[1]
    assert tree.extend(tree.find(text("abxy")), key("z"), 7) is None, "all snapshots are in use"
    assert not tree.make_room(9)


def test_a_snapshot_brings_back_what_is_read_behind_a_boundary():
    """Rows of the window, and of the CSA window that the next entry overlaps; HCA needs none. Positions are marked."""
    cache = new_cache()
    layout = cache.layout
    assert [layout.resume_rows(sizes) for sizes in MIXED] == [(10, 4), (10, 0)]
    assert layout.bytes_per_snapshot == 4 * (2 * 10 * 8 + 4 * 4 * (8 + 6))
    snapshots = RingSnapshots(cache, 2)
    for layer in cache.layers:
        for ring in (layer.window, layer.raw):
            for position in range(PAGE + 3):  # three rows beyond the boundary are written already
                ring[1, position % ring.shape[1]] = position
    snapshots.apply(RingCopy(1, PAGE, 0, restores=False))
    for layer in cache.layers:
        layer.window.fill_(-1)
        layer.raw.fill_(-1)
    snapshots.apply(RingCopy(2, PAGE, 0, restores=True))
    for (window, raw), layer in zip(((10, 4), (10, 0)), cache.layers):
        for ring, count in ((layer.window, window), (layer.raw, raw)):
            for position in range(PAGE - count, PAGE):
                assert (ring[2, position % ring.shape[1]] == position).all()
            assert (ring[2] == -1).all(1).sum() == ring.shape[1] - count and (ring[:2] == -1).all()


def engine_of(draft, groups=None, like=None, **options):
    """An engine with the draft or "none"; ``like`` lends its weights."""
    config = resolve(
        EngineConfig(**{"max_context": 1200, "max_running": 4, "chunk_size": 300, **options}),
        model_dir="",
        device_type="cpu",
        max_positions=2048,
        own_draft="none",
    )
    groups, model_config = groups or Groups.single(), ModelConfig.from_dict(CONFIG)
    source, kernels, made = RandomWeights(model_config, seed=2), Kernels("torch"), drafter_class(draft)
    gamma = made.max_gamma(model_config)
    if like is None:
        taps = made.tap_layers(model_config)
        model = DeepseekV4(model_config, source, groups, kernels, 2048, CPU, taps)
        room = DraftRoom(4, 1200, 2 * (1 + gamma))
        if model.is_last:
            drafter = made.load(model_config, source, model, groups, kernels, room, None)
        else:
            drafter = DraftElsewhere(gamma)
    else:
        model, drafter = like.model, like.drafter
    return Engine(model, drafter, make_cache(model_config, config, CPU, 1 + gamma, groups.pp), groups, config)


def families(seed, num_requests=10):
    """Requests of which most begin like others, for one to three pages."""
    dice = random.Random(seed)
    base = [dice.randrange(40) for _ in range(3 * PAGE + 40)]
    requests = []
    for i in range(num_requests):
        shared = dice.choice((0, PAGE - 1, PAGE, PAGE + 30, 2 * PAGE, 3 * PAGE + 5))
        ids = base[:shared] + [dice.randrange(40) for _ in range(dice.choice((1, 9, 70)))]
        params = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.8 * (i % 4 == 3))
        requests.append(Request(str(i), tuple(ids), params, i))
    return requests


def run(engine, requests):
    tokens, spec = {one.request_id: [] for one in requests}, {}
    for one in requests:
        engine.add(one)
    while engine.has_work():
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
            if event.finish_reason:
                spec[event.request_id] = event.spec
    return tokens, spec


@pytest.mark.parametrize("draft", ["none", "dspark"])
def test_reused_prefixes_change_no_token_and_no_acceptance(draft):
    """Together and then again, when all is stored; what the draft proposes is the same too, so its context is there."""
    requests = families(0)
    plain = engine_of(draft)
    want, want_spec = run(plain, requests)
    engine = engine_of(draft, like=plain, prefix_cache=True, prefix_pages=6)
    for again in range(2):
        before = engine.counts.hit_tokens
        got, spec = run(engine, requests)
        assert got == want
        assert engine.counts.hit_tokens - before >= (4 + again) * PAGE
        if draft != "none":
            for name, fields in spec.items():
                assert fields["accept_histogram"] == want_spec[name]["accept_histogram"], name
    held = len(engine.tree)
    assert 3 <= held <= 6 and engine.cache.num_free_pages == engine.cache.num_pages - held
    engine.tree.clear()
    assert engine.cache.bytes_in_use == 0 and engine.cache.num_free_pages == engine.cache.num_pages


def test_an_answer_is_part_of_the_next_prefix():
    """A conversation: the next prompt is the last one, its answer and more. The page it filled is found."""
    plain = engine_of("dspark")
    engine = engine_of("dspark", like=plain, prefix_cache=True)
    dice = random.Random(3)
    ids = [dice.randrange(40) for _ in range(PAGE - 20)]
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    for turn in range(2):
        hits = engine.counts.hits
        request = Request(str(turn), tuple(ids), params, turn)
        (want,), (got,) = (run(one, [request])[0].values() for one in (plain, engine))
        assert got == want and engine.counts.hits - hits == turn
        ids += [*got, 5, 6, 7]


def test_reuse_with_retraction_and_few_pages():
    requests = families(1, 16)
    plain = engine_of("none")
    want, _ = run(plain, requests)
    engine = engine_of("none", like=plain, prefix_cache=True, admission="0.0", cache_pages=5, chunk_size=90)
    got, _ = run(engine, requests)
    assert got == want and engine.counts.hits > 2
    engine.tree.clear()
    assert engine.cache.num_free_pages == 5


@pytest.mark.parametrize("sizes", [{"tp": 1, "pp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "dp": 2}])
@pytest.mark.parametrize("draft", ["none", "dspark"])
def test_every_rank_restores_its_part(run_ranks, sizes, draft):
    requests, topology = families(2, 6), Topology(**sizes)
    want, _ = run(engine_of(draft), requests)

    def reuse(rank, world):
        engine = engine_of(draft, Groups.build(topology, rank), prefix_cache=True)
        return [run(engine, requests)[0] for _ in range(2)], engine.counts.hits

    results = run_ranks(reuse, topology.world)
    for runs, hits in results:
        assert runs == [want, want] and hits > 0
