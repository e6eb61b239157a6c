"""Configs, checkpoints, the model, its cache, the engine and the command line.

``from dspark.runtime import LLM, SamplingParams`` is the Python interface; names load on first use, so that importing
this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "LLM": ".llm",
    "SamplingParams": ".request",
    "RequestOutput": ".request",
    "EngineConfig": ".engine_config",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
