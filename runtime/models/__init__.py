"""Models: which there are, and what the runtime needs of each.

A family is the class behind one line of the table. It reads ``config.json`` into a config of its own, says which
tensors that means, what is kept of a token, how the model may be cut, and builds it. Everything else sees a
:class:`~dspark.runtime.model_config.Config` and a :class:`.base.Model`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Family

# model_type of config.json -> "module:class" below this package
MODELS: dict[str, str] = {
    "deepseek_v4": "deepseek_v4_family:DeepseekV4Family",
    "qwen3": "qwen3:Qwen3",
    "llama": "llama:Llama",
    "nsa": "nsa:NSA",
    "deepseek_v3": "deepseek_v3:DeepseekV3",
    "deepseek_v32": "deepseek_v32:DeepseekV32",
}
# the first of ``architectures`` -> model type, for files that say nothing else
ARCHITECTURES: dict[str, str] = {
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM": "llama",
    "NSAForCausalLM": "nsa",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
}


def model_type(config: dict[str, Any]) -> str:
    """The key of :data:`MODELS` that a parsed ``config.json`` means; files that name no model are DeepSeek-V4's own.

    Raises ``ValueError`` for a model that is not in the table.
    """
    name, architectures = config.get("model_type"), config.get("architectures")
    if name is None and isinstance(architectures, list) and architectures:
        name = ARCHITECTURES.get(architectures[0], architectures[0]) if isinstance(architectures[0], str) else ""
    if name is None:
        return "deepseek_v4"
    if not isinstance(name, str) or name not in MODELS:
        raise ValueError(f"config.json: model_type is {name!r:.60}; supported models: {', '.join(MODELS)}")
    return name


def family(name: str) -> type[Family]:
    """The family of the model type ``name``, a key of :data:`MODELS`."""
    module, _, attribute = MODELS[name].partition(":")
    return getattr(importlib.import_module(f".{module}", __name__), attribute)
