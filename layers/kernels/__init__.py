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
from collections.abc import Callable

import torch

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
    "store_rows": "compress",
    "pool_windows": "compress",
    "select_entries": "sparse_attention",
    "attend": "sparse_attention",
    "attend_block": "block_attention",
    "route_scored": "moe",
    "route_grouped": "moe",
    "route_hashed": "moe",
    "swiglu": "moe",
    "experts_forward": "moe",
}
# backend -> (package it needs, operation -> module below this package that offers ``bind_<operation>``)
COMPILED = {
    "numba": (
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
            "store_rows": "cpu.compress",
            "pool_windows": "cpu.compress",
            "select_entries": "cpu.sparse_attention",
            "attend": "cpu.sparse_attention",
            "route_scored": "cpu.moe",
            "route_hashed": "cpu.moe",
            "swiglu": "cpu.moe",
            "experts_forward": "cpu.moe",
        },
    ),
}


class Kernels:
    """The implementations of one backend, ``"torch"`` or a key of :data:`COMPILED`.

    ``deterministic``: every row is computed by itself, bitwise the same whatever else is in the step. Only compiled
    backends can promise that; ``ValueError`` otherwise.
    """

    def __init__(self, backend: str, deterministic: bool = False) -> None:
        if backend != "torch" and backend not in COMPILED:
            raise ValueError(f"unknown kernel backend {backend!r}; there are 'torch' and {sorted(COMPILED)}")
        if deterministic and backend == "torch":
            raise ValueError("--deterministic needs compiled kernels: float32 on the CPU, with the extra dspark[cpu]")
        self.backend, self._deterministic = backend, deterministic
        self._modules = COMPILED[backend][1] if backend in COMPILED else {}

    def bind(self, operation: str, **weights: object) -> Callable[..., object]:
        """``operation`` with its weights fixed: a callable of the activations."""
        if operation in self._modules:
            module = importlib.import_module(f".{self._modules[operation]}", __name__)
            return getattr(module, f"bind_{operation}")(**weights)
        module = importlib.import_module(f".{TWINS[operation]}", __name__)
        return functools.partial(getattr(module, operation), **weights)


def choose(device: torch.device, dtype: torch.dtype, deterministic: bool = False) -> Kernels:
    """The kernels for a model on ``device`` that computes in ``dtype``: compiled ones for float32 on the CPU where the
    optional compiler is installed, else plain torch."""
    if device.type == "cpu" and dtype == torch.float32 and importlib.util.find_spec("numba") is not None:
        return Kernels("numba", deterministic)
    return Kernels("torch", deterministic)
