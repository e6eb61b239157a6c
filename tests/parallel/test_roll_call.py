"""Ranks that do not agree on what they run say so alike, whichever of them is the odd one."""

import datetime
import json
import os

import pytest
import torch.distributed as dist
from dspark.parallel.roll_call import AgreedError, Present, roll_call

LIMIT = datetime.timedelta(seconds=20)


def ask(rank, world, fields, error=None, absent=(), limit=LIMIT):
    """What the roll call of ``fields[rank]`` and ``error`` of rank 1 came to on this rank; absent ranks do not come."""
    store = dist.PrefixStore("call", dist.distributed_c10d._get_default_store())
    if rank in absent:
        return "absent"
    try:
        return roll_call(store, rank, world, "cpu", fields[rank], error if rank == 1 else None, limit)
    except (AgreedError, TimeoutError) as problem:
        return type(problem).__name__, str(problem)


def test_all_alike(run_ranks):
    results = run_ranks(ask, 3, [{"a": "1", "b": "2"}] * 3)
    assert results[0] == results[1] == results[2]
    assert all(isinstance(one, Present) and one.device == "cpu" for one in results[0])
    assert len({one.pid for one in results[0]}) == 3 and results[0][0].host == os.uname().nodename


def test_the_rank_the_field_and_both_values_are_named(run_ranks):
    fields = [{"--seed": "0", "--chunk-size": "512"}] * 3 + [{"--seed": "0", "--chunk-size": "256"}]
    results = run_ranks(ask, 4, fields)
    assert len(set(results)) == 1
    kind, text = results[0]
    assert kind == "AgreedError" and "--chunk-size of rank 3 on" in text
    assert "is 256, but of rank 0" in text and "it is 512" in text
    fields = [{"--seed": "1"}] + [{"--seed": "0"}] * 3
    assert "--seed of rank 1 on" in run_ranks(ask, 4, fields)[2][1] and "(and of 2 more ranks)"


def test_an_error_of_one_rank_is_everybodys_and_waits_for_nobody(run_ranks):
    results = run_ranks(ask, 3, [{}] * 3, "no such folder: /data/model")
    assert {kind for kind, _ in results} == {"AgreedError"}
    assert all(text.startswith("rank 1 on ") and text.endswith(": no such folder: /data/model") for _, text in results)


def misled(rank, world):
    """What both are told when rank 1 believes to be rank 7 of 8, and knows that this is wrong."""
    store = dist.PrefixStore("call", dist.distributed_c10d._get_default_store())
    own = (rank, world, "cpu", {}, None) if rank == 0 else (7, 8, "cpu", {}, "RANK=7")
    with pytest.raises(AgreedError) as problem:
        roll_call(store, *own, LIMIT)
    return str(problem.value)


def test_a_process_with_a_wrong_idea_of_its_rank(run_ranks):
    for text in run_ranks(misled, 2):
        assert text.startswith("rank 7 on ") and text.endswith(": RANK=7")


@pytest.mark.parametrize("absent", [(2,), (0,)])
def test_who_is_missing(run_ranks, absent):
    limit = datetime.timedelta(seconds=1)
    results = run_ranks(ask, 3, [{}] * 3, None, absent, limit)
    came = [result for rank, result in enumerate(results) if rank not in absent]
    assert {kind for kind, _ in came} == {"TimeoutError"}
    for _, text in came:
        assert ("1 of 3 ranks did not start within 1 s: [2]" if absent == (2,) else "no answer of rank 0") in text


def test_what_travels_is_json(run_ranks):
    def fn(rank, world):
        ask(rank, world, [{"x": "y"}] * world)
        store = dist.PrefixStore("call", dist.distributed_c10d._get_default_store())
        return [json.loads(store.get(key)) for key in ("here/0", "here/1", "answer")]

    statement, _, answer = run_ranks(fn, 2)[0]
    assert statement["fields"] == {"x": "y"} and set(answer) == {"present"}
