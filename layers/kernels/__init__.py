"""Operations that layers are made of, each as a plain torch function and, where it pays, as compiled or device code.

An operation is a function ``op(activations..., **weights)``. :meth:`Kernels.bind` fixes the weights once and gives a
callable of the activations alone, so that an implementation may prepare its weights. All implementations of an
operation take the same weights and activations and give the same result; a test holds them together. Which one runs is
chosen once, when the model is built.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .quantised import PackedWeight

# operation -> the module of this package that holds its plain torch function
TWINS = {
    "linear": "linear",
    "grouped_linear": "linear",
    "project": "projection",
    "rms_norm": "norm_rope",
    "head_norm_rope": "norm_rope",
    "head_rope": "norm_rope",
    "key_norm_rope": "norm_rope",
    "hc_pre": "hyper_connection",
    "hc_post": "hyper_connection",
    "hc_collapse": "hyper_connection",
    "hc_mean": "hyper_connection",
    "pack_keys": "packed_keys",
    "store_rows": "compress",
    "pool_windows": "compress",
    "select_entries": "sparse_attention",
    "attend": "sparse_attention",
    "attend_block": "block_attention",
    "merge": "block_attention",
    "route_scored": "moe",
    "route_grouped": "moe",
    "route_hashed": "moe",
    "swiglu": "moe",
    "experts_forward": "moe",
    "experts_inner": "moe",
    "experts_outer": "moe",
    "markov_greedy": "draft",
    "markov_sample": "draft",
    "reject_drafts": "rejection",
    "scaled_linear": "quantised",
    "scaled_experts_forward": "quantised",
}

# Products whose weights may be kept narrow: what a layer asks for -> what runs then.
NARROW = {"block_linear": "scaled_linear", "experts_forward": "scaled_experts_forward"}


Bound = Callable[..., object]
"""An operation with its weights, see :meth:`Kernels.bind`. Those that may be joined have ``weights``, as packed."""


class Backend(NamedTuple):
    """``package``: what it needs. ``modules``: operation -> the module below this package that offers
    ``bind_<operation>``. ``row_count_matters``: operations that give a row other bits in other company, unless bound
    with ``row_by_row``. ``joined``: several operations in one call -> their module."""

    package: str
    modules: dict[str, str]
    row_count_matters: frozenset[str]
    joined: dict[str, str] = {}


COMPILED = {
    "numba": Backend(
        "numba",
        {
            "linear": "cpu.linear",
            "grouped_linear": "cpu.linear",
            "project": "cpu.projection",
            "rms_norm": "cpu.norm_rope",
            "head_norm_rope": "cpu.norm_rope",
            "head_rope": "cpu.norm_rope",
            "key_norm_rope": "cpu.norm_rope",
            "hc_pre": "cpu.hyper_connection",
            "hc_post": "cpu.hyper_connection",
            "hc_collapse": "cpu.hyper_connection",
            "hc_mean": "cpu.hyper_connection",
            "store_rows": "cpu.compress",
            "pool_windows": "cpu.compress",
            "select_entries": "cpu.entry_selection",
            "attend": "cpu.sparse_attention",
            "route_scored": "cpu.moe",
            "route_hashed": "cpu.moe",
            "swiglu": "cpu.moe",
            "experts_forward": "cpu.moe",
            "experts_inner": "cpu.moe",
            "experts_outer": "cpu.moe",
            "markov_greedy": "cpu.draft",
        },
        frozenset(),
        {"draft_block": "cpu.draft_block", "draft_context": "cpu.draft_block", "draft_heads": "cpu.draft"},
    ),
    "triton": Backend(
        "triton",
        {
            "linear": "triton.linear",
            "grouped_linear": "triton.linear",
            "project": "triton.projection",
            "rms_norm": "triton.norm_rope",
            "head_norm_rope": "triton.norm_rope",
            "head_rope": "triton.norm_rope",
            "key_norm_rope": "triton.norm_rope",
            "hc_pre": "triton.hyper_connection",
            "hc_post": "triton.hyper_connection",
            "hc_collapse": "triton.hyper_connection",
            "pack_keys": "triton.packed_keys",
            "store_rows": "triton.compress",
            "pool_windows": "triton.compress",
            "select_entries": "triton.select_entries",
            "attend": "triton.sparse_attention",
            "attend_block": "triton.block_attention",
            "merge": "triton.block_attention",
            "route_scored": "triton.routing",
            "route_grouped": "triton.routing",
            "route_hashed": "triton.routing",
            "swiglu": "triton.experts",
            "experts_forward": "triton.experts",
            "markov_greedy": "triton.draft",
            "markov_sample": "triton.draft",
            "reject_drafts": "triton.rejection",
            "scaled_linear": "triton.fp8",
            "scaled_experts_forward": "triton.experts",
        },
        frozenset(
            (
                "linear",
                "project",
                "grouped_linear",
                "experts_forward",
                "scaled_experts_forward",
                "scaled_linear",
                "attend",
            )
        ),
    ),
}


class Kernels:
    """The implementations of one backend, ``"torch"`` or a key of :data:`COMPILED`.

    ``deterministic``: every row is computed by itself, bitwise the same whatever else is in the step. Only compiled
    backends can promise that; ``ValueError`` otherwise. ``whole_sums``: so are sums over ranks, since layers cut
    products whose inputs are shared out by their outputs instead. ``formats``: operation -> "fp8" or "fp4", for those
    of :data:`NARROW` whose weights are packed when they are bound.
    """

    def __init__(self, backend: str, deterministic: bool = False, formats: Mapping[str, str] | None = None) -> None:
        if backend != "torch" and backend not in COMPILED:
            raise ValueError(f"unknown kernel backend {backend!r}; there are 'torch' and {sorted(COMPILED)}")
        if deterministic and backend == "torch":
            raise ValueError("--deterministic needs compiled kernels: float32 on the CPU, with the extra dspark[cpu]")
        if deterministic and formats and backend != "triton":
            raise ValueError("--deterministic with --expert-format or --linear-format needs --kernels triton")
        self.backend, self._deterministic, self._formats = backend, deterministic, dict(formats or {})
        self._compiled = COMPILED.get(backend, Backend("", {}, frozenset()))
        self.whole_sums = deterministic and "experts_outer" in self._compiled.modules

    def pack(self, operation: str, weight: torch.Tensor) -> torch.Tensor | PackedWeight:
        """``weight`` [.., in, out] in the format that ``operation`` keeps its weights in."""
        if operation not in self._formats:
            return weight
        return importlib.import_module(".quantised", __name__).FORMATS[self._formats[operation]](weight)

    def bind(self, operation: str, **weights: object) -> Bound:
        """``operation`` with its weights fixed: a callable of the activations. "block_linear" is a "linear" whose
        weight may be packed. Weights that :meth:`pack` has packed already are taken as they are."""
        if operation in self._formats:
            weights = {k: self.pack(operation, v) if isinstance(v, torch.Tensor) else v for k, v in weights.items()}
            operation = NARROW[operation]
        elif operation == "block_linear":
            operation = "linear"
        if operation in self._compiled.modules:
            module = importlib.import_module(f".{self._compiled.modules[operation]}", __name__)
            if self._deterministic and operation in self._compiled.row_count_matters:
                weights["row_by_row"] = True
            return getattr(module, f"bind_{operation}")(**weights)
        module = importlib.import_module(f".{TWINS[operation]}", __name__)
        return functools.partial(getattr(module, operation), **weights)

    def join(self, name: str, **parts: object) -> Bound | None:
        """One call for operations that were bound before, which are among the ``parts``; None where this backend has
        none, or where weights are packed. All of the operations' rows must be on this rank."""
        if self._formats or name not in self._compiled.joined:
            return None
        module = importlib.import_module(f".{self._compiled.joined[name]}", __name__)
        return getattr(module, f"bind_{name}")(**parts)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def default_choice(device_type: str, dtype: torch.dtype) -> str:
    """Triton's kernels on a GPU, and on the CPU compiled ones for float32, where these packages are installed; else
    plain torch."""
    if device_type != "cpu":
        return "triton" if _installed("triton") else "torch"
    return "cpu" if dtype == torch.float32 and _installed("numba") else "torch"


def choose(
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = False,
    choice: str = "auto",
    formats: Mapping[str, str] | None = None,
) -> Kernels:
    """The kernels for a model on ``device`` that computes in ``dtype``: "torch", "cpu" (compiled), "triton", or by
    :func:`default_choice` if ``choice`` is "auto". Raises ``ValueError`` if they cannot run here."""
    if choice == "auto":
        choice = default_choice(device.type, dtype)
    if choice == "cpu":
        if device.type != "cpu" or dtype != torch.float32:
            raise ValueError(f"--kernels cpu needs --device cpu and --dtype float32, not {device.type} and {dtype}")
        if not _installed("numba"):
            raise ValueError("--kernels cpu needs numba: install the extra dspark[cpu]")
        choice = "numba"
    if choice == "triton":
        if not _installed("triton"):
            raise ValueError("--kernels triton needs triton: install the extra dspark[triton]")
        importlib.import_module(".triton.jit", __name__).check_device(device)
    return Kernels(choice, deterministic, formats)
