"""The scheduler: budgets to the token, service by age, retraction, aborts under way, and books that always balance.

Requests are played without a model: a step gives the tokens that its plan promises. What the model makes of retracted
and resumed requests is tested with a small one of made-up weights, against each request alone.
"""

import random

import pytest
import torch
from dspark.layers.attention.v4 import V4AttentionSizes
from dspark.layers.kernels import Kernels
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.cache import Cache, CacheLayout, pages_within
from dspark.runtime.checkpoint import RandomWeights
from dspark.runtime.draft.none import NoDraft
from dspark.runtime.engine import Engine
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import make_cache
from dspark.runtime.model_config import ModelConfig
from dspark.runtime.models.deepseek_v4 import DeepseekV4
from dspark.runtime.prefix import PrefixTree
from dspark.runtime.request import Request, SamplingParams
from dspark.runtime.scheduler import Expectation, Scheduler, lightest
from dspark.runtime.sequence import RequestState
from dspark.runtime.step import Span, build_step

CPU = torch.device("cpu")
SIZES = V4AttentionSizes("hca", 128, 16, 2, 8, 8, 1, 8, 10, 2, 6, 4, 1e-6, 4)
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
    "compress_ratios": [0, 4, 128],
    "num_hash_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def new_cache(num_slots, num_pages, max_context=4096):
    return Cache(CacheLayout((SIZES,), 1, 4), num_slots, num_pages, max_context, CPU, torch.float32)


def new_state(number, num_prompt, num_new, gamma=0):
    tokens = tuple((number * 7 + i) % 40 for i in range(num_prompt))
    request = Request(str(number), tokens, SamplingParams(max_new_tokens=num_new, ignore_eos=True), number)
    return RequestState.start(request, 1 << 20, (), 0, gamma, number, 0)


def launch(scheduler, num_flights=1):
    """The next plan, as an engine launches it."""
    plan = scheduler.plan(num_flights)
    for chunk in plan.chunks:
        assert chunk.num_tokens > 0 and chunk.completes == (chunk.num_tokens == chunk.state.num_waiting)
        chunk.state.num_cached += chunk.num_tokens
    for state in plan.decoding + [chunk.state for chunk in plan.chunks if chunk.completes]:
        assert not state.in_flight
        state.in_flight = True
    return plan


def land(scheduler, plan, gone=(), accepted=lambda state: 0):
    """The plan's step is over: requests get their tokens, and those that are complete leave. Returns these."""
    scheduler.landed(plan)
    ended = []
    for state in plan.decoding + [chunk.state for chunk in plan.chunks if chunk.completes]:
        state.in_flight = False
        if state in gone:
            continue
        count = 1 if state.is_prefilling else 1 + min(accepted(state), state.gamma, state.num_left - 1)
        state.tokens += [3] * count
        state.num_cached = len(state.tokens) - 1
        if not state.num_left:
            scheduler.finish(state)
            ended.append(state)
    return ended


@pytest.mark.parametrize(
    "tokens,ranks,want", [([100, 10, 10, 50, 5, 5], 3, [0, 1, 2, 1, 2, 2]), ([1] * 5, 2, [0, 1, 0, 1, 0])]
)
def test_new_requests_go_to_the_lightest_rank(tokens, ranks, want):
    """Fewest tokens, then fewest requests, each request counted as soon as it is placed."""
    loads, chosen = [(0, 0)] * ranks, []
    for count in tokens:
        rank = lightest(loads)
        chosen.append(rank)
        loads[rank] = (loads[rank][0] + count, loads[rank][1] + 1)
    assert chosen == want
    assert lightest([(5, 2), (5, 1), (6, 0)]) == 1


def test_prefill_budgets_are_kept_to_the_token():
    scheduler = Scheduler(new_cache(8, 64), 64)
    states = [new_state(i, length, 40) for i, length in enumerate((100, 30, 5, 200))]
    for state in states:
        scheduler.add(state)
    # 64 of the first; its other 36 and 28 of the second, which is cut; then decoding rows are taken off the 64.
    want = [[(0, 64)], [(0, 36), (1, 28)], [(1, 2), (2, 5), (3, 56)], [(3, 61)], [(3, 61)], [(3, 22)], []]
    num_decoding = [0, 0, 1, 3, 3, 3, 4]
    for chunks, count in zip(want, num_decoding):
        plan = launch(scheduler)
        assert [(chunk.state.number, chunk.num_tokens) for chunk in plan.chunks] == chunks
        assert len(plan.decoding) == count
        assert sum(n for _, n in chunks) <= 64 - count
        land(scheduler, plan)


def test_prefill_goes_on_beside_more_decoding_requests_than_the_budget():
    scheduler = Scheduler(new_cache(8, 64), 4)
    for i in range(6):
        scheduler.add(new_state(i, 1, 50))
    for _ in range(3):
        land(scheduler, launch(scheduler))
    scheduler.add(late := new_state(6, 3, 5))
    plan = launch(scheduler)
    assert len(plan.decoding) == 6 and [(c.state, c.num_tokens) for c in plan.chunks] == [(late, 1)]


def test_the_expected_share_falls_and_jumps():
    """Numbers by hand from the rule: 600 steps down to 0.14 of the start; (emitted + 20 a request) / (budgets + 1)."""
    expected = Expectation(0.7)
    for _ in range(300):
        expected.step()
    assert expected.share == pytest.approx((0.7 + 0.098) / 2)
    for _ in range(400):
        expected.step()
    assert expected.share == pytest.approx(0.098)
    running = [new_state(0, 10, 100), new_state(1, 10, 50)]
    running[0].tokens += [3] * 30
    expected.retracted(running)
    assert expected.share == pytest.approx((30 + 20 * 2) / 151)
    assert expected.num_tokens(running[1]) == 10 + 1 + int(50 * 70 / 151)
    expected.retracted([new_state(2, 10, 5)])
    assert expected.share == 1.0 and expected.num_tokens(running[1]) == running[1].worst_case
    expected.step()
    assert expected.share < 1.0


def test_who_is_retracted():
    """Who has got least; of equals the longest prompt, then the youngest; the oldest never; who has steps under way not
    yet."""
    cache = new_cache(8, 5)
    scheduler = Scheduler(cache, 4096, 0.0)
    oldest, middle, long, young = states = [new_state(n, length, 300) for n, length in enumerate((200, 10, 300, 11))]
    for state in states:
        scheduler.add(state)
    land(scheduler, launch(scheduler))
    assert cache.num_free_pages == 0 and all(state.num_emitted == 1 for state in states)
    while oldest.num_cached < 256:
        land(scheduler, launch(scheduler))
    land(scheduler, plan := launch(scheduler))
    assert plan.decoding == [oldest, middle, young] and scheduler.num_waiting == 1
    assert long.slot == -1 and long.num_cached == 0 and long.num_prefill == len(long.tokens) and long.is_prefilling
    assert scheduler.counts.retracted == 1 and cache.num_free_pages == 1


def play(seed, tree=False, num_flights=1, aborts=0.0):
    """A random load to its end; every law of the books is checked in every step."""
    dice = random.Random(seed)
    num_pages, num_slots = dice.randrange(5, 12), dice.randrange(2, 7)
    cache, chunk = new_cache(num_slots, num_pages), dice.choice((1, 7, 64, 300, 5000))
    if chunk == 1:
        num_pages, cache = 4, new_cache(num_slots, 4)
    stored = PrefixTree(cache, dice.randrange(1, 6)) if tree else None
    scheduler = Scheduler(cache, chunk, dice.choice((None, 0.0, 0.0, 0.0)), stored)
    longest = min(num_pages * 256, 300 if chunk == 1 else 1300)
    waiting = []
    for number in range(12 if chunk == 1 else 40):
        num_prompt = dice.randrange(1, longest - 1)
        state = new_state(
            number, num_prompt, dice.randrange(1, min(longest - num_prompt, 400) + 1), dice.choice((0, 3))
        )
        if tree and dice.random() < 0.7:  # half of its tokens are those of a few others
            shared = [dice.choice((1, 2))] * (num_prompt // 2)
            state.tokens[: len(shared)] = shared
        waiting.append(state)
    alive, gone, flights, finished = {}, [], [], []
    for state in waiting:
        scheduler.check_fits("it", state.worst_case)
    steps = 0
    while waiting or alive or any(plan.states for plan in flights):
        steps += 1
        assert steps < 20000, "requests starve"
        while waiting and dice.random() < 0.3:
            state = waiting.pop(0)
            alive[state.number] = state
            scheduler.add(state)
        before = {number: (list(state.tokens), state.slot) for number, state in alive.items()}
        plan = launch(scheduler, num_flights)
        flights.insert(0, plan)
        assert sum(chunk_.num_tokens for chunk_ in plan.chunks) <= max(chunk - len(plan.decoding), 1)
        held = [state for state in alive.values() if state.slot >= 0]
        assert len({state.slot for state in held}) == len(held)
        for state in plan.states:
            assert (
                cache.num_missing(state.slot, state.num_next_cached if state in plan.decoding else state.num_cached)
                == 0
            )
        for number, (tokens, slot) in before.items():
            assert alive[number].tokens == tokens, "planning changed tokens"
            if slot >= 0 and alive[number].slot < 0:
                assert any(other.slot >= 0 and other.number < number for other in alive.values()), (
                    "the oldest was retracted"
                )
        for state in list(alive.values()):
            if dice.random() < aborts:
                scheduler.finish(alive.pop(state.number))
                gone.append(state)
        if len(flights) >= num_flights:
            for state in land(scheduler, flights.pop(), gone, lambda _: dice.randrange(4)):
                finished.append(alive.pop(state.number))
    assert all(state.num_emitted == state.budget for state in finished)
    assert len(finished) + len(gone) == (12 if chunk == 1 else 40)
    if tree:
        assert cache.num_free_pages + len(stored) == num_pages and stored.num_evictable == len(stored)
        stored.clear()
    assert cache.num_free_pages == num_pages and cache.num_free_slots == num_slots and cache.bytes_in_use == 0
    return scheduler.counts


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("num_flights", [1, 3])
def test_random_loads_end_and_the_books_balance(tree, num_flights):
    counts = [play(seed, tree, num_flights, aborts=0.002 * (seed % 2)) for seed in range(10)]
    assert sum(count.retracted for count in counts) > 2
    assert (sum(count.hits for count in counts) > 5) == tree


def test_rings_of_many_requests_leave_no_room_for_a_page():
    layouts = [CacheLayout((SIZES,), 1, 4), CacheLayout((SIZES, SIZES), 1, 4)]
    page, slot = layouts[1].bytes_per_page, layouts[1].bytes_per_slot
    assert pages_within(layouts, 3, 0, 3 * slot + 5 * page + page - 1) == 5
    saved = 2 * layouts[1].bytes_per_snapshot
    assert pages_within(layouts, 3, 2, 3 * slot + saved + 5 * page - 1) == 4
    with pytest.raises(ValueError, match=f"{3 * slot + page - 1}, .*{3 * slot + page} bytes"):
        pages_within(layouts, 3, 0, 3 * slot + page - 1)


def tiny_engine(groups=None, model=None, **options):
    config = resolve(
        EngineConfig(**{"max_context": 700, "max_running": 12, "chunk_size": 400, "mixed_chunk": 400, **options}),
        model_dir="",
        device_type="cpu",
        max_positions=2048,
        own_draft="none",
    )
    groups, model_config = groups or Groups.single(), ModelConfig.from_dict(CONFIG)
    if model is None:
        model = DeepseekV4(model_config, RandomWeights(model_config, seed=2), groups, Kernels("torch"), 2048, CPU)
    return Engine(model, NoDraft(), make_cache(model_config, config, CPU, 1, groups.pp), groups, config)


def traffic(num_requests, seed=0, longest=60, shortest=5):
    """Requests that mostly grow over the end of their first page; every third is sampled."""
    dice = random.Random(seed)
    requests = []
    for i in range(num_requests):
        num_new = dice.randrange(10, longest)
        ids = tuple(
            dice.randrange(40)
            for _ in range(
                dice.choice((dice.randrange(max(shortest, 220), 256), dice.randrange(shortest, max(shortest + 1, 40))))
            )
        )
        params = SamplingParams(max_new_tokens=num_new, ignore_eos=True, temperature=0.9 * (i % 3 == 2), logprobs=1)
        requests.append(Request(str(i), ids, params, i))
    return requests


def run(engine, requests):
    """Tokens and log-probabilities by request; every token is emitted once and has one log-probability."""
    tokens = {one.request_id: [] for one in requests}
    logprobs = {one.request_id: [] for one in requests}
    for one in requests:
        engine.add(one)
    while engine.has_work():
        for event in engine.step():
            if engine.groups.world.rank == 0:
                assert [entry.token_id for entry in event.logprobs] == list(event.token_ids)
            tokens[event.request_id] += event.token_ids
            logprobs[event.request_id] += [entry.logprob for entry in event.logprobs]
    assert all(len(tokens[one.request_id]) == one.params.max_new_tokens for one in requests)
    return tokens, logprobs


def test_a_storm_of_retractions_changes_no_token():
    """200 requests in a cache for a third of those that run at once: all get the tokens that they get with room for
    all, and greedy ones those of one forward over each alone."""
    requests = traffic(200, longest=200, shortest=238)
    roomy = tiny_engine(max_running=48)
    want, want_logprobs = run(roomy, requests)
    engine = tiny_engine(model=roomy.model, max_running=48, admission="0.0", cache_pages=32)
    got, logprobs = run(engine, requests)
    assert got == want
    for name, values in logprobs.items():
        assert values == pytest.approx(want_logprobs[name], abs=1e-4)
    assert engine.counts.retracted > 10
    assert engine.cache.num_free_pages == 32 and engine.cache.num_free_slots == 48
    for one in requests[::4]:
        ids, cache = [*one.prompt_ids, *got[one.request_id]], roomy.cache
        slot = cache.acquire()
        cache.reserve(slot, len(ids))
        spans = [Span(slot, 0, ids[:-1], len(got[one.request_id]))]
        logits = roomy.logits(build_step(spans, cache.page_table, cache.layout.ratios, 40))
        cache.release(slot)
        if one.params.greedy:
            assert logits.argmax(-1).tolist() == got[one.request_id]


def test_a_request_that_can_never_fit_is_refused():
    engine = tiny_engine(cache_pages=2)
    with pytest.raises(
        ValueError, match="'big'.* 600 tokens, 3 pages of 256, but the cache has 2 pages.*--cache-pages"
    ):
        engine.add(Request("big", (1,) * 500, SamplingParams(max_new_tokens=100)))
    assert not engine.has_work()
    run(engine, [Request("fits", (1,) * 500, SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=0))])


def layout_of_ranks(rank, world, topology):
    engine = tiny_engine(Groups.build(topology, rank), admission="0.0", cache_pages=3, max_running=4)
    tokens, _ = run(engine, traffic(12, seed=1))
    after = (engine.cache.num_free_pages, engine.cache.num_free_slots)
    return tokens, after, engine.counts.retracted


@pytest.mark.parametrize("sizes", [{"tp": 2, "dp": 2}, {"tp": 1, "pp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2}])
def test_retraction_on_ranks(run_ranks, sizes):
    topology = Topology(**sizes)
    want, _ = run(tiny_engine(), traffic(12, seed=1))
    results = run_ranks(layout_of_ranks, topology.world, topology)
    for tokens, after, _ in results:
        assert tokens == want and after == (3, 4)
    assert sum(retracted for *_, retracted in results) > 0


def test_a_rank_without_requests_for_200_steps(run_ranks):
    """Two DP ranks, one request of more than 200 steps: the other rank has rows in none of them."""
    requests = traffic(1, seed=1, longest=220)
    num_new = 219
    requests = [
        Request("0", requests[0].prompt_ids, SamplingParams(max_new_tokens=num_new, ignore_eos=True, logprobs=0))
    ]
    want, _ = run(tiny_engine(), requests)

    def lonely(rank, world):
        return run(tiny_engine(Groups.build(Topology(tp=2, dp=2), rank)), requests)[0]

    assert run_ranks(lonely, 2) == [want, want]


def test_one_rank_ends_early_and_one_prefills_while_the_other_decodes(run_ranks):
    """Requests go to the two DP ranks in turns: short ones to one, long ones to the other."""

    def request(name, num_prompt, num_new):
        ids = tuple((num_prompt * 3 + i) % 40 for i in range(num_prompt))
        return Request(name, ids, SamplingParams(max_new_tokens=num_new, ignore_eos=True, logprobs=0))

    requests = [request("a", 3, 60), request("b", 5, 2), request("c", 200, 3)]

    def mixed(rank, world):
        return run(tiny_engine(Groups.build(Topology(tp=2, dp=2), rank), chunk_size=32), requests)[0]

    want, _ = run(tiny_engine(), requests)
    assert run_ranks(mixed, 2) == [want, want]


def test_an_abort_while_steps_are_under_way_frees_memory_when_they_land(run_ranks):
    requests = traffic(6, seed=4)

    def aborting(rank, world):
        engine = tiny_engine(Groups.build(Topology(tp=1, pp=2), rank), max_running=3, chunk_size=64)
        want, _ = run(engine, requests)
        for one in requests:
            engine.add(one)
        tokens, steps = {one.request_id: [] for one in requests}, 0
        while engine.has_work():
            for event in engine.step():
                tokens[event.request_id] += event.token_ids
            steps += 1
            if steps in (3, 7, 8):
                engine.abort(str(steps % 4))
        gone = {"3", "0"}
        same = all(ids == want[name] for name, ids in tokens.items() if name not in gone)
        return same, all(ids == want[name][: len(ids)] for name, ids in tokens.items()), engine.cache.bytes_in_use

    assert run_ranks(aborting, 2) == [(True, True, 0)] * 2


def test_prefill_beside_decoding_requests_has_a_budget_of_its_own():
    """8 tokens beside up to 8 requests that decode on the average rank, in proportion with more; all of the chunk where
    nobody decodes."""
    want = {0: 64, 1: 8, 8: 8, 9: 9, 40: 40, 1000: 64}
    for num_beside, budget in want.items():
        scheduler = Scheduler(new_cache(4, 64), 64, mixed_chunk=8)
        scheduler.add(new_state(1, 100, 4))
        assert [chunk.num_tokens for chunk in scheduler.plan(1, num_beside).chunks] == [budget]


def chunks_of(groups, plan, monkeypatch):
    """The chunks of a long prompt that comes when a short request decodes, on the rank that has it."""
    seen = []
    monkeypatch.setattr(Scheduler, "plan", lambda self, *numbers: seen.append(plan(self, *numbers)) or seen[-1])
    engine = tiny_engine(groups, chunk_size=64, mixed_chunk=8)
    for name, ids, num_new in (("short", (1,) * 5, 12), ("long", (3,) * 200, 2)):
        engine.add(Request(name, ids, SamplingParams(max_new_tokens=num_new, ignore_eos=True)))
        engine.step()
    while engine.has_work():
        engine.step()
    return [c.num_tokens for plan in seen for c in plan.chunks if c.state.request.request_id == "long"]


def test_a_long_prompt_comes_in_small_chunks_while_others_decode(monkeypatch, run_ranks):
    """Also while they decode on another DP rank only, since all ranks wait for the longest step."""
    want = [8] * 11 + [64, 48]
    assert chunks_of(None, Scheduler.plan, monkeypatch) == want
    plan = Scheduler.plan

    def two(rank, world):
        return chunks_of(Groups.build(Topology(tp=2, dp=2), rank), plan, pytest.MonkeyPatch())

    monkeypatch.undo()
    plan = Scheduler.plan
    assert run_ranks(two, 2) == [[], want]
