"""Inputs and mistakes of one rank reach the others; nobody waits for a rank that failed."""

import pytest
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.request import Request, SamplingParams
from dspark.runtime.share import all_or_none, from_first, share_json, share_requests

REQUESTS = [
    Request(
        "ä", (0, 5, 1535), SamplingParams(temperature=0.1 + 0.2, stop=("\n", "🙂"), stop_token_ids=(4,), seed=1), 0
    ),
    Request("b", (), SamplingParams(logprobs=3), 1),
]


def world_of(rank, world):
    return Groups.build(Topology(tp=world), rank).world


def share_all(rank, world):
    group = world_of(rank, world)
    value = {"a": [1, 2.5, None, "π"], "empty": ""}
    return (
        share_json(value if rank == 0 else None, group),
        share_json({"from": rank}, group, src=1),
        share_requests(REQUESTS if rank == 0 else None, group),
        from_first(lambda: rank + 10, group),
        all_or_none(lambda: rank, group),
    )


def test_values_and_requests_arrive_unchanged(run_ranks):
    for rank, (value, second, requests, first, own) in enumerate(run_ranks(share_all, 3)):
        assert value == {"a": [1, 2.5, None, "π"], "empty": ""}
        assert second == {"from": 1}
        assert requests == REQUESTS
        assert first == 10 and own == rank


def fail(message):
    raise ValueError(message)


def fail_some(rank, world):
    group, seen = world_of(rank, world), []
    for work in (
        lambda: from_first(lambda: fail("no such file"), group),
        lambda: all_or_none(lambda: fail(f"rank {rank}") if rank > 0 else 0, group),
        lambda: all_or_none(lambda: open(f"/nonexistent/{rank}"), group),
        lambda: all_or_none(lambda: "fine", group),
    ):
        try:
            seen.append(work())
        except ValueError as error:
            seen.append(str(error))
    return seen


def test_a_mistake_of_one_rank_is_the_same_error_on_all(run_ranks):
    results = run_ranks(fail_some, 3)
    assert results[0] == results[1] == results[2]
    assert results[0][:2] == ["no such file", "rank 1"]
    assert "/nonexistent/0" in results[0][2]
    assert results[0][3] == "fine"


def test_one_rank_needs_no_job():
    group = Groups.single().world
    assert share_requests(REQUESTS, group) == REQUESTS
    assert from_first(lambda: (1, 2), group) == (1, 2)
    with pytest.raises(ValueError, match="no such"):
        from_first(lambda: fail("no such"), group)
