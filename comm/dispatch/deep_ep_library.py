"""The library deep_ep: importing it, with each way that can fail told apart, and the limits of its buffers.

It is no dependency: it is built by hand for a GPU and its drivers, and importing it runs code that can fail in ways of
its own. So it is imported when a dispatcher of it is made, on every rank, and the ranks agree on the outcome before
any of them enters its collective start-up.
"""

from __future__ import annotations

import importlib
import inspect
import re
from types import ModuleType
from typing import Any

from ...parallel.groups import Groups
from ..collectives import all_gather_ints
from .base import DispatchSizes

NODE_RANKS = 8
"""Ranks that the library takes for one node: the first so many of a group, the next so many, ..."""

BUFFER_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
LOW_LATENCY_TOP_K = 11
LOW_LATENCY_TOKENS = 1024
ELASTIC_RANKS, ELASTIC_EXPERTS, ELASTIC_LOCAL_EXPERTS, ELASTIC_TOP_K = 1024, 2048, 256, 32

NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "Buffer": {
        "__init__": ("group", "num_nvl_bytes", "num_rdma_bytes", "low_latency_mode", "num_qps_per_rank"),
        "get_dispatch_config": (),
        "get_combine_config": (),
        "get_low_latency_rdma_size_hint": (),
        "get_dispatch_layout": ("topk_idx", "num_experts"),
        "dispatch": ("num_tokens_per_rank", "is_token_in_rank", "topk_idx", "expert_alignment", "async_finish"),
        "combine": ("handle", "async_finish"),
        "clean_low_latency_buffer": (),
        "low_latency_dispatch": ("num_max_dispatch_tokens_per_rank", "use_fp8", "return_recv_hook"),
        "low_latency_combine": ("topk_weights", "handle", "zero_copy", "return_recv_hook"),
        "get_next_low_latency_combine_buffer": ("handle",),
    },
    "ElasticBuffer": {
        "__init__": ("group", "num_bytes", "num_max_tokens_per_rank", "hidden", "num_topk"),
        "get_buffer_size_hint": (),
        "dispatch": ("topk_idx", "num_experts", "num_max_tokens_per_rank", "async_with_compute_stream"),
        "combine": ("handle", "async_with_compute_stream"),
    },
}
"""What is used of each class: methods and their parameters."""

BACKENDS = {"Buffer": "deep_ep", "ElasticBuffer": "deep_ep_elastic"}


class LibraryError(ValueError):
    """deep_ep cannot be used here. ``reason``: "not installed", "not built", "missing library", "missing symbol",
    "import failed", "another package", "missing class" or "wrong version"."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(f"deep_ep: {reason}: {text}; or use --dispatch-backend torch")
        self.reason = reason


def load_library(class_name: str) -> type[Any]:
    """The class ``Buffer`` or ``ElasticBuffer`` of deep_ep. Raises :class:`LibraryError`."""
    try:
        module = importlib.import_module("deep_ep")
    except Exception as error:  # it checks drivers and compiles while it is imported: anything may come
        raise _import_error(error) from error
    where = f"deep_ep {getattr(module, '__version__', 'without a version')} in {getattr(module, '__file__', 'memory')}"
    found = [name for name in NEEDED if hasattr(module, name)]
    if not found:
        raise LibraryError(
            "another package",
            f"{where} has neither Buffer nor ElasticBuffer; the library is built from its repository, and the project "
            "of that name on PyPI is not it",
        )
    if class_name not in found:
        raise LibraryError(
            "missing class", f"{where} has no {class_name}, but {found[0]}: use --dispatch-backend {BACKENDS[found[0]]}"
        )
    missing = _missing(module, class_name)
    if missing:
        raise LibraryError("wrong version", f"{where} lacks {', '.join(missing)}; versions 1.2 to 2.1 are known to fit")
    return getattr(module, class_name)


def _missing(module: ModuleType, class_name: str) -> list[str]:
    """What :data:`NEEDED` names and the class lacks."""
    found, missing = getattr(module, class_name), []
    for method, parameters in NEEDED[class_name].items():
        if not hasattr(found, method):
            missing.append(f"{class_name}.{method}")
            continue
        known = inspect.signature(getattr(found, method)).parameters
        missing += [f"{class_name}.{method}({name})" for name in parameters if name not in known]
    return missing


def _import_error(error: Exception) -> LibraryError:
    """What it means that importing deep_ep raised ``error``."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError):
        name = error.name or ""
        if name == "deep_ep":
            return LibraryError("not installed", "build it from its repository for this Python, torch and CUDA")
        if name.startswith(("deep_ep.", "deep_ep_cpp")):
            return LibraryError("not built", f"its compiled part {name} is missing for this Python; build it again")
        return LibraryError("import failed", f"it needs the module {name}, which is not installed")
    symbol = re.search(r"undefined symbol: (\w+)", str(error))
    if symbol:
        owner = _owner(symbol[1]) or "torch, or whatever else it was built against"
        return LibraryError("missing symbol", f"{symbol[1]} of {owner} is not there: it was built for another version")
    library = re.search(r"(\S+\.so\S*): cannot open shared object file", str(error))
    if library:
        owner = _owner(library[1])
        return LibraryError("missing library", f"{library[1]}{f' of {owner}' if owner else ''} cannot be found")
    owner = _owner(str(error))
    return LibraryError("import failed", f"{f'something about {owner}: ' if owner else ''}{text}")


def _owner(text: str) -> str | None:
    """Whose name is in ``text``."""
    names = {"nvshmem": "NVSHMEM", "nccl": "NCCL", "cuda": "CUDA", "ibv_": "libibverbs", "mlx5": "libmlx5"}
    return next((owner for sign, owner in names.items() if sign in text.lower()), None)


def load_everywhere(class_name: str, groups: Groups, sizes: DispatchSizes) -> type[Any]:
    """:func:`load_library` on every rank of ``moe_ep``; where one fails, all raise. Collective."""
    failed: LibraryError | None = None
    try:
        loaded = load_library(class_name)
    except LibraryError as error:
        failed = error
    marks = all_gather_ints([failed is not None], groups.moe_ep, sizes.device)
    if failed is not None:
        raise failed
    bad = [groups.moe_ep.ranks[rank] for rank, (mark,) in enumerate(marks) if mark]
    if bad:
        raise LibraryError("import failed", f"on rank{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))}")
    return loaded


def check_common(groups: Groups, sizes: DispatchSizes) -> None:
    """Raise ``ValueError`` for what neither buffer can do."""
    if groups.moe_ep.size == 1:
        raise ValueError("deep_ep moves rows between expert ranks, but --ep is 1; it needs at least 2")
    if str(sizes.dtype) != "torch.bfloat16":
        raise ValueError(f"deep_ep moves bfloat16 rows, but --dtype is {str(sizes.dtype).removeprefix('torch.')}")
    if sizes.hidden_size % 8:
        raise ValueError(f"deep_ep needs rows of a multiple of 16 bytes, but hidden_size {sizes.hidden_size} is no x8")


def check_buffer(groups: Groups, sizes: DispatchSizes, normal: bool, low_latency: bool) -> None:
    """Raise ``ValueError`` naming both numbers for what ``Buffer`` cannot do in the modes that are wanted."""
    check_common(groups, sizes)
    size = groups.moe_ep.size
    if size > NODE_RANKS and size % NODE_RANKS:
        raise ValueError(f"deep_ep takes {NODE_RANKS} ranks for a node, but --ep {size} is no multiple of that")
    if normal:
        if size not in BUFFER_RANKS:
            raise ValueError(f"deep_ep has no setting for --ep {size}; it knows {', '.join(map(str, BUFFER_RANKS))}")
        _check_nodes(groups)
    if low_latency:
        _check_low_latency(sizes)


def _check_low_latency(sizes: DispatchSizes) -> None:
    most = sizes.max_tokens_per_rank
    if sizes.hidden_size not in LOW_LATENCY_HIDDEN:
        raise ValueError(
            f"deep_ep's low latency knows hidden sizes {', '.join(map(str, LOW_LATENCY_HIDDEN))}, but hidden_size is "
            f"{sizes.hidden_size}; use the dispatcher normal"
        )
    if sizes.fp8 and sizes.hidden_size % 512:
        raise ValueError(f"8-bit low latency needs a hidden size divisible by 512, not {sizes.hidden_size}")
    if sizes.top_k > LOW_LATENCY_TOP_K:
        raise ValueError(
            f"deep_ep's low latency sends a row to {LOW_LATENCY_TOP_K} experts, but top-k is {sizes.top_k}"
        )
    if most > LOW_LATENCY_TOKENS:
        raise ValueError(
            f"deep_ep's low latency has buffers for {LOW_LATENCY_TOKENS} rows a rank, but --max-tokens-per-rank is "
            f"{most}"
        )


def _check_nodes(groups: Groups) -> None:
    """The library counts nodes off in runs of ranks; they must be the real ones."""
    nodes = [groups.topology.node(rank) for rank in groups.moe_ep.ranks]
    for start in range(0, len(nodes), NODE_RANKS):
        run = nodes[start : start + NODE_RANKS]
        if len(set(run)) > 1:
            ranks = groups.moe_ep.ranks[start : start + NODE_RANKS]
            raise ValueError(
                f"deep_ep takes the {len(run)} expert ranks {list(ranks)} for one node, but they are on "
                f"{len(set(run))} nodes {sorted(set(run))}; use the torch backend, or deep_ep_elastic"
            )


def check_elastic(groups: Groups, sizes: DispatchSizes) -> None:
    """Raise ``ValueError`` naming both numbers for what ``ElasticBuffer`` cannot do."""
    check_common(groups, sizes)
    size = groups.moe_ep.size
    for what, number, limit in (
        ("--ep", size, ELASTIC_RANKS),
        ("experts", sizes.num_experts, ELASTIC_EXPERTS),
        ("experts a rank", sizes.num_experts // size, ELASTIC_LOCAL_EXPERTS),
        ("top-k", sizes.top_k, ELASTIC_TOP_K),
    ):
        if number > limit:
            raise ValueError(f"deep_ep's ElasticBuffer allows {what} up to {limit}, not {number}")
