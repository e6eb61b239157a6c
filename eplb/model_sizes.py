"""The few sizes of a mixture-of-experts model that placements depend on, from its ``config.json``."""

from __future__ import annotations

import math
import pathlib
from dataclasses import dataclass
from typing import Any

from .files.safe import parse_json, read_text

_NAMES = {
    "num_experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "num_layers": ("num_hidden_layers", "n_layers"),
    "hidden_size": ("hidden_size", "dim"),
    "expert_size": ("moe_intermediate_size", "moe_inter_dim"),
}
# Bits of a weight and of the scale that a block of weights shares, with the weights in a block.
_FORMATS = {"bf16": (16, 0, 1), "fp8": (8, 32, 128 * 128), "fp4": (4, 8, 32)}


@dataclass(frozen=True)
class ModelSizes:
    """Experts of a layer, layers (dense ones included), and bytes of one expert's three matrices."""

    num_experts: int
    num_layers: int
    expert_bytes: int


def read_model_sizes(path: str | pathlib.Path) -> ModelSizes:
    """From a checkpoint folder or its ``config.json``. Raises ``ValueError`` naming what is missing."""
    path = pathlib.Path(path)
    path = path / "config.json" if path.is_dir() else path
    config = parse_json(read_text(path), str(path))
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object")
    sizes = {name: _size(config, names, path) for name, names in _NAMES.items()}
    bits, scale_bits, block = _FORMATS[_weight_format(config)]
    weights = 3 * sizes["hidden_size"] * sizes["expert_size"]
    return ModelSizes(
        sizes["num_experts"], sizes["num_layers"], math.ceil(weights * bits / 8 + weights / block * scale_bits / 8)
    )


def _size(config: dict[str, Any], names: tuple[str, ...], path: pathlib.Path) -> int:
    for name in names:
        if name in config:
            if not isinstance(config[name], int) or config[name] < 1:
                raise ValueError(f"{path}: {name} is {config[name]!r}; it must be a whole number above 0")
            return config[name]
    raise ValueError(f"{path} has none of {', '.join(names)}")


def _weight_format(config: dict[str, Any]) -> str:
    if config.get("expert_dtype") == "fp4":
        return "fp4"
    quantization = config.get("quantization_config") or {}
    return "fp8" if "fp8" in (quantization.get("quant_method"), config.get("dtype")) else "bf16"
