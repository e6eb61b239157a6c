"""The engine: the same tokens in any company, chunk and memory, ends of requests, and nothing left behind.

Tokens are compared with golden continuations of other code for the bundled model.
"""

import dataclasses
import functools
import json
import pathlib

import pytest
import torch
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.cache import Cache
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.engine import Engine
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import load_engine
from dspark.runtime.request import Request, SamplingParams

GOLDEN = json.loads((pathlib.Path(__file__).resolve().parent.parent / "data" / "models" / "golden.json").read_text())[
    "items"
]
CPU = torch.device("cpu")
CONTEXT = 512
# Prompts of 13 to 110 tokens; the long ones are left to the test of whole continuations.
SHORT = [i for i, item in enumerate(GOLDEN) if len(item["prompt_ids"]) <= 110]
NUM_TOKENS = 12
GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.1, top_k=40, top_p=0.95, seed=7)


def load(groups=None, text=None, **options):
    config = resolve(
        EngineConfig(**{"max_context": CONTEXT, "max_running": 4, **options}),
        model_dir=str(bundled_model()),
        device_type="cpu",
        max_positions=4096,
        own_draft="none",
    )
    return load_engine(config, groups or Groups.single(), CPU, text=text)


@functools.cache
def shared_engine():
    """One engine for the tests that leave it empty."""
    return load()


def request(i, params=GREEDY, name=None):
    return Request(str(i) if name is None else name, tuple(GOLDEN[i]["prompt_ids"]), params)


def run(engine, requests, watch=lambda: None):
    """Token ids and finish reason of each request by its id."""
    tokens, reasons = {r.request_id: [] for r in requests}, {}
    for one in requests:
        engine.add(one)
    while engine.has_work():
        for event in engine.step():
            assert event.request_id not in reasons, "an event after the last one"
            tokens[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                reasons[event.request_id] = event.finish_reason
        watch()
    return {name: (ids, reasons.get(name)) for name, ids in tokens.items()}


def check(results, indices=SHORT, num_tokens=NUM_TOKENS):
    assert len(results) == len(indices)
    for i in indices:
        assert results[str(i)] == (GOLDEN[i]["output_ids"][:num_tokens], "length"), i


def check_empty(engine, num_slots=4):
    assert engine.cache.bytes_in_use == 0 and engine.cache.num_free_slots == num_slots
    assert engine.cache.num_free_pages == num_slots * engine.cache.layout.pages_for(CONTEXT)
    assert not engine.has_work() and engine.step() == []


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 100000])
def test_any_chunk_size_with_fewer_slots_than_requests(chunk_size):
    engine = load(chunk_size=chunk_size)
    assert len(SHORT) > engine.cache.num_free_slots
    busiest = []
    check(run(engine, [request(i) for i in SHORT], lambda: busiest.append(engine.cache.num_free_slots)))
    assert min(busiest) == 0
    check_empty(engine)


def test_one_by_one_and_in_another_order():
    engine = shared_engine()
    for i in SHORT[:3]:
        check(run(engine, [request(i)]), [i])
    check(run(engine, [request(i) for i in reversed(SHORT)]))
    check_empty(engine)


def test_admission_waits_for_pages():
    """Two pages of 256 tokens: two short requests or one long one at a time, whatever slots are free."""
    base = shared_engine()
    layout = base.cache.layout
    assert layout.page_tokens == 256
    cache = Cache(layout, 4, 2, CONTEXT, CPU, torch.float32)
    engine = Engine(base.model, base.drafter, cache, base.groups, base.config)
    long = next(i for i, item in enumerate(GOLDEN) if 256 < len(item["prompt_ids"]) + NUM_TOKENS <= CONTEXT)
    order = [*SHORT[:3], long, *SHORT[3:]]
    seen = set()
    results = run(engine, [request(i) for i in order], lambda: seen.add((cache.num_free_slots, cache.num_free_pages)))
    check(results, order)
    assert {slots for slots, _ in seen} <= {2, 3, 4} and (2, 0) in seen and (3, 0) in seen
    assert cache.bytes_in_use == 0 and cache.num_free_pages == 2 and cache.num_free_slots == 4


def test_aborted_requests_leave_and_the_others_go_on():
    engine = load(max_running=2)
    prefilling, running, staying, waiting = (request(i) for i in SHORT[:4])
    for one in (running, staying):
        engine.add(one)
    for _ in range(3):
        engine.step()
    engine.abort(running.request_id)
    assert engine.cache.num_free_slots == 1
    engine.add(prefilling)
    engine.add(waiting)
    tokens = {staying.request_id: [], prefilling.request_id: []}
    for event in engine.step():
        tokens[event.request_id] += event.token_ids
    engine.abort(waiting.request_id)
    engine.abort(waiting.request_id)
    engine.abort("never there")
    while engine.has_work():
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
    assert tokens[staying.request_id][-NUM_TOKENS + 4 :] == GOLDEN[SHORT[2]]["output_ids"][4:NUM_TOKENS]
    assert tokens[prefilling.request_id] == GOLDEN[SHORT[0]]["output_ids"][:NUM_TOKENS]
    check_empty(engine, num_slots=2)
    # An aborted id may come again, and its old tokens are forgotten.
    check(run(engine, [request(SHORT[1]), request(SHORT[3])]), [SHORT[1], SHORT[3]])
    check_empty(engine, num_slots=2)


def test_aborting_everything_frees_everything():
    engine = load(chunk_size=5)
    for i in SHORT:
        engine.add(request(i))
    for _ in range(4):
        engine.step()
    for i in SHORT:
        engine.abort(str(i))
    check_empty(engine)


def test_an_id_that_is_still_there_is_not_taken_twice():
    engine = load()
    engine.add(request(SHORT[0]))
    with pytest.raises(AssertionError, match="added twice"):
        engine.add(request(SHORT[0]))


@pytest.mark.parametrize("seed", [7, None], ids=["own seed", "seed by request id"])
def test_sampled_tokens_do_not_depend_on_company_or_chunks(seed):
    params = dataclasses.replace(SAMPLED, seed=seed)
    sampled = request(SHORT[1], params, "sampled")
    alone = run(shared_engine(), [sampled])["sampled"]
    assert len(alone[0]) == NUM_TOKENS and alone[0] != GOLDEN[SHORT[1]]["output_ids"][:NUM_TOKENS]
    others = [request(i, GREEDY if i % 2 else SAMPLED) for i in SHORT[:5]]
    assert run(shared_engine(), [*others, sampled])["sampled"] == alone
    assert run(load(chunk_size=7), [sampled, *others])["sampled"] == alone
    assert run(load(chunk_size=1, max_running=1), [sampled])["sampled"] == alone
    # The company is greedy and golden all the same.
    mixed = run(shared_engine(), [sampled, *(request(i) for i in SHORT)])
    assert mixed.pop("sampled") == alone
    check(mixed)


def test_seeds_decide_what_is_sampled():
    def tokens(engine, seed, name):
        params = dataclasses.replace(SAMPLED, seed=seed)
        return run(engine, [request(SHORT[0], params, name)])[name][0]

    engine = shared_engine()
    assert tokens(engine, 7, "a") == tokens(engine, 7, "b")
    assert tokens(engine, 7, "a") != tokens(engine, 8, "a")
    assert tokens(engine, None, "a") != tokens(engine, None, "b")
    assert tokens(engine, None, "a") == tokens(load(seed=0), None, "a") != tokens(load(seed=1), None, "a")


def test_a_stop_id_ends_a_request_and_is_kept():
    engine = shared_engine()
    for i in SHORT[:3]:
        expected = GOLDEN[i]["output_ids"][:NUM_TOKENS]
        for stop in {expected[0], expected[5], expected[-1]}:
            params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=(1535, stop))
            ids, reason = run(engine, [request(i, params)])[str(i)]
            # A stop id in the very last place that was left is still a stop.
            assert (ids, reason) == (expected[: expected.index(stop) + 1], "stop")
    check_empty(engine)


def test_ends_of_sequence_end_a_request_unless_ignored():
    engine = load()
    i = SHORT[0]
    eos = GOLDEN[i]["output_ids"][4]
    engine.model.config = dataclasses.replace(engine.model.config, eos_token_ids=(eos,))
    first = GOLDEN[i]["output_ids"].index(eos)
    params = SamplingParams(max_new_tokens=NUM_TOKENS)
    assert run(engine, [request(i, params)])[str(i)] == (GOLDEN[i]["output_ids"][: first + 1], "stop")
    check(run(engine, [request(i)]), [i])


def test_a_stop_string_ends_a_request():
    """Whoever knows the text tells how many tokens are kept."""

    class Text:
        def __init__(self):
            self.seen = {}

        def push(self, request_id, token_ids):
            before = len(self.seen.setdefault(request_id, []))
            self.seen[request_id] += token_ids
            return 6 - before if request_id == "ends" and before < 6 <= len(self.seen[request_id]) else None

    text = Text()
    engine = load(text=text)
    first, other = SHORT[:2]
    results = run(engine, [request(first, name="ends"), request(other)])
    assert results["ends"] == (GOLDEN[first]["output_ids"][:6], "stop")
    assert results[str(other)] == (GOLDEN[other]["output_ids"][:NUM_TOKENS], "length")
    assert text.seen[str(other)] == GOLDEN[other]["output_ids"][:NUM_TOKENS]
    check_empty(engine)


@pytest.mark.parametrize("room", [1, 2, 5])
def test_the_context_limit_ends_a_request(room):
    i = SHORT[2]
    engine = load(max_context=len(GOLDEN[i]["prompt_ids"]) + room)
    assert run(engine, [request(i)])[str(i)] == (GOLDEN[i]["output_ids"][:room], "length")
    one = SamplingParams(max_new_tokens=1, ignore_eos=True)
    assert run(engine, [request(i, one)])[str(i)] == (GOLDEN[i]["output_ids"][:1], "length")
    assert engine.cache.bytes_in_use == 0


def run_on_ranks(rank, world):
    engine = load(Groups.build(Topology(tp=world), rank), chunk_size=64)
    mixed = [
        request(SHORT[0], SAMPLED, "own seed"),
        request(SHORT[1], dataclasses.replace(SAMPLED, seed=None)),
    ]
    return run(engine, [request(i) for i in SHORT]), run(engine, mixed), engine.cache.bytes_in_use


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_gets_the_same_tokens(run_ranks, world):
    expected = run_on_ranks(0, 1)
    for greedy, sampled, bytes_left in run_ranks(run_on_ranks, world):
        check(greedy)
        assert sampled == expected[1] and bytes_left == 0
