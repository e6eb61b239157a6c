"""The start-up agreement: every rank says who it is and what it is about to run, before anything heavy begins.

What a rank says is one JSON object in the job's store; rank 0 reads them all and answers all with one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch.distributed as dist

MAX_BYTES = 1 << 16
# Rank 0, which may run the store, stays so long for the others to read that the job cannot start; and so much longer
# than rank 0 do the others wait, for it to say who is missing.
FAREWELL = datetime.timedelta(seconds=5)
SHOWN_CHARS = 100


class AgreedError(ValueError):
    """A mistake that every rank of the job reports alike, so that nobody is left waiting."""


class Present(NamedTuple):
    """A rank that came: its host's name, its process id there, and the device that it computes on."""

    host: str
    pid: int
    device: str


def roll_call(
    store: dist.Store,
    rank: int,
    world: int,
    device: str,
    fields: Mapping[str, str],
    error: str | None,
    limit: datetime.timedelta,
) -> tuple[Present, ...]:
    """All ranks of the job, once they have come and found that they say the same. Collective.

    ``fields`` must be equal on all ranks; ``error`` is why this rank cannot take part. Raises :class:`AgreedError`, on
    every rank, for an error of any rank or a field that differs, naming the rank; ``TimeoutError`` naming the ranks
    that did not come within ``limit``.
    """
    statement = {"host": socket.gethostname(), "pid": os.getpid(), "device": device, "error": error}
    text = json.dumps(statement | {"fields": dict(fields)})
    assert len(text) <= MAX_BYTES, len(text)
    store.set(f"here/{rank}", text)
    if error is not None:
        store.set("mistake", f"rank {rank} on {statement['host']}: {error}")
    if store.add("arrived", 1) == world or error is not None:
        store.set("everyone", "1")
    if rank == 0:
        store.set("answer", json.dumps(_judge(store, world, limit)))
    try:
        _wait(store, "answer", limit + FAREWELL)  # rank 0 may be the first to see that somebody is missing
    except RuntimeError as cause:
        raise TimeoutError(
            f"rank {rank} on {statement['host']}: no answer of rank 0 within {limit.total_seconds():g} s; is it there?"
        ) from cause
    answer = json.loads(store.get("answer"))
    if "present" not in answer:
        _take_leave(store, rank, answer["there"])
    if "missing" in answer:
        raise TimeoutError(answer["missing"])
    if "error" in answer:
        raise AgreedError(answer["error"])
    return tuple(Present(*row) for row in answer["present"])


def _wait(store: dist.Store, key: str, limit: datetime.timedelta) -> None:
    """As the store's own ``wait``, but signals are heard within a second. Raises ``RuntimeError`` after ``limit``."""
    deadline = time.monotonic() + limit.total_seconds()
    while True:
        left = deadline - time.monotonic()
        try:
            return store.wait([key], datetime.timedelta(seconds=max(0.001, min(left, 1.0))))
        except RuntimeError:
            if left <= 0:
                raise


def _take_leave(store: dist.Store, rank: int, there: int) -> None:
    if store.add("read", 1) == there:
        store.set("all read", "1")
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            _wait(store, "all read", FAREWELL)


def _judge(store: dist.Store, world: int, limit: datetime.timedelta) -> dict[str, Any]:
    keys = [f"here/{rank}" for rank in range(world)]
    try:
        _wait(store, "everyone", limit)
    except RuntimeError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        there = _hosts(store, [rank for rank in range(world) if rank not in missing])
        return {
            "there": world - len(missing),
            "missing": f"{len(missing)} of {world} ranks did not start within {limit.total_seconds():g} s: {missing}; "
            f"those that did are on {', '.join(there)}",
        }
    said = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}
    wrong = [rank for rank, statement in said.items() if statement["error"] is not None]
    if wrong:
        first = said[wrong[0]]
        # Of rank 0 it needs no name: a mistake in the command line is one of all ranks.
        where = "" if wrong[0] == 0 else f"rank {wrong[0]} on {first['host']}: "
        return {"there": world, "error": where + first["error"]}
    absent = [rank for rank in range(world) if rank not in said]
    if absent:  # a process has a wrong idea of its rank, and may or may not know it
        twice = f"{world} processes came, but none is rank {absent[0]}: two of them have the same rank"
        known = store.check(["mistake"])
        return {"there": len(said), "error": store.get("mistake").decode() if known else twice}
    difference = _difference(list(said.values()))
    if difference is not None:
        return {"there": world, "error": difference}
    return {"present": [[one["host"], one["pid"], one["device"]] for one in said.values()]}


def _hosts(store: dist.Store, ranks: Sequence[int]) -> list[str]:
    return sorted({json.loads(store.get(f"here/{rank}"))["host"] for rank in ranks})


def _difference(said: Sequence[Mapping[str, Any]]) -> str | None:
    """The first field in which a rank differs from rank 0, for people."""
    head = said[0]
    for name in head["fields"]:
        others = [rank for rank, one in enumerate(said) if one["fields"].get(name) != head["fields"][name]]
        if others:
            rank = others[0]
            mine, its = (str(one["fields"].get(name, "nothing"))[:SHOWN_CHARS] for one in (head, said[rank]))
            more = f" (and of {len(others) - 1} more ranks)" if len(others) > 1 else ""
            return (
                f"the ranks differ: {name} of rank {rank} on {said[rank]['host']}{more} is {its}, but of rank 0 on "
                f"{head['host']} it is {mine}; start all ranks with the same version, options and checkpoint"
            )
    return None
