"""How tokens reach their experts and come back: the dispatchers, one file each and one line in the table."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import torch

from ...parallel.groups import Groups
from .base import Dispatcher as Dispatcher
from .base import DispatchSizes as DispatchSizes
from .base import Received as Received
from .base import StepRows as StepRows
from .exchange import Exchange as Exchange
from .width import OverWidth

# backend -> dispatcher -> "module:class" below this package
DISPATCHERS: dict[str, dict[str, str]] = {
    "torch": {
        "standard": "standard:Standard",
        "normal": "normal:Normal",
        "low_latency": "low_latency:LowLatency",
        "auto": "auto:Auto",
    },
    "deep_ep": {"normal": "deep_ep:Normal", "low_latency": "deep_ep:LowLatency", "auto": "deep_ep:Auto"},
    "deep_ep_elastic": dict.fromkeys(("normal", "low_latency", "auto"), "deep_ep_elastic:Elastic"),
}


def dispatcher_class(name: str, backend: str = "torch") -> type[Dispatcher]:
    """The class of the dispatcher ``name`` of a ``backend``; ``ValueError`` lists what there is."""
    if backend not in DISPATCHERS:
        raise ValueError(f"unknown dispatch backend {backend!r}; there are {', '.join(DISPATCHERS)}")
    table = DISPATCHERS[backend]
    if name not in table:
        raise ValueError(f"unknown dispatcher {name!r}; the backend {backend} has {', '.join(table)}")
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(f".{module}", __name__), attribute)


class DispatchOptions(NamedTuple):
    """The user's choice: a dispatcher of a backend, how many rows a rank may send at once where buffers are fixed, and
    whether rows travel as 8-bit floats."""

    name: str = "standard"
    backend: str = "torch"
    max_tokens_per_rank: int = 0
    fp8: bool = False


def make_dispatcher(
    options: DispatchOptions,
    groups: Groups,
    *,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Dispatcher:
    """The dispatcher of a model with these sizes on ``groups``.

    Raises ``ValueError`` for an unknown name, experts that do not divide over moe_ep, or what the dispatcher itself
    cannot serve: the same on every rank.
    """
    if num_experts % groups.moe_ep.size:
        raise ValueError(f"{num_experts} routed experts do not divide over the {groups.moe_ep.size} ranks of moe_ep")
    kind, limit = dispatcher_class(options.name, options.backend), options.max_tokens_per_rank
    sizes = DispatchSizes(num_experts, top_k, hidden_size, limit, dtype, device, fp8=options.fp8)
    dispatcher = kind(groups, sizes)
    if kind.all_to_all and groups.moe_tp.size > 1:
        return OverWidth(groups, sizes, dispatcher)
    return dispatcher
