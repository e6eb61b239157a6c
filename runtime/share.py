"""What the first rank knows and the others need: JSON values over one broadcast, and mistakes seen by all ranks alike.

Everything travels as bytes of strict JSON with a length in front; nothing executable is ever read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from ..comm.collectives import all_reduce, broadcast
from ..parallel.groups import Group
from ..parallel.roll_call import AgreedError
from .request import Request, SamplingParams

MAX_SHARED_BYTES = 1 << 30
_MAX_ERROR_CHARS = 2000

T = TypeVar("T")


def share_json(value: Any, group: Group, device: torch.device | str = "cpu", *, src: int = 0) -> Any:
    """The JSON ``value`` of group rank ``src`` on every rank; the argument of the others is ignored.

    Collective over ``group``. Raises ``ValueError`` on every rank when the text is above ``MAX_SHARED_BYTES``.
    """
    if group.size == 1:
        return value
    text = json.dumps(value, allow_nan=False).encode() if group.rank == src else b""
    size = torch.tensor([len(text)], dtype=torch.int64, device=device)
    num_bytes = int(broadcast(size, group, src).item())
    if not 0 <= num_bytes <= MAX_SHARED_BYTES:
        raise ValueError(f"{num_bytes} bytes of input are too many to share with the ranks; limit {MAX_SHARED_BYTES}")
    payload = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if group.rank == src and num_bytes:
        payload.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    payload = broadcast(payload, group, src)
    return value if group.rank == src else json.loads(payload.cpu().numpy().tobytes())


def from_first(make: Callable[[], Any], group: Group, device: torch.device | str = "cpu") -> Any:
    """``make()`` of the first rank as JSON on every rank; its ``ValueError`` or ``OSError`` is raised on every rank,
    as an ``AgreedError``.

    Collective over ``group``; ``make`` is called on the first rank only and must not communicate.
    """
    result: dict[str, Any] = {}
    if group.rank == 0:
        try:
            result = {"value": make()}
        except (ValueError, OSError) as error:
            result = {"error": str(error)[:_MAX_ERROR_CHARS]}
    result = share_json(result, group, device)
    if "error" in result:
        raise AgreedError(result["error"])
    return result["value"]


def all_or_none(work: Callable[[], T], group: Group, device: torch.device | str = "cpu") -> T:
    """``work()`` of every rank; if any raises ``ValueError`` or ``OSError``, all raise that of the first that did,
    as an ``AgreedError``.

    Collective over ``group``; ``work`` must not communicate, or a rank that fails would leave the others waiting.
    """
    result, message = None, None
    try:
        result = work()
    except (ValueError, OSError) as error:
        message = str(error)[:_MAX_ERROR_CHARS]
    failed = torch.tensor([group.size if message is None else group.rank], dtype=torch.int64, device=device)
    first = int(all_reduce(failed, group, "min").item())
    if first < group.size:
        raise AgreedError(share_json(message, group, device, src=first))
    return result


def share_requests(
    requests: Sequence[Request] | None, group: Group, device: torch.device | str = "cpu"
) -> list[Request]:
    """The requests of the first rank on every rank, in order. Collective over ``group``."""
    if group.size == 1:
        return list(requests or ())
    rows = [[r.request_id, list(r.prompt_ids), asdict(r.params), r.arrival] for r in requests or ()]
    return [
        Request(request_id, tuple(prompt_ids), SamplingParams(**params), arrival)
        for request_id, prompt_ids, params, arrival in share_json(rows, group, device)
    ]
