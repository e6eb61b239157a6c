"""Made-up weights of any config, for tests and benchmarks: a function of (seed, name, position), so slices agree."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from ..model_config import Config
from .safetensors_file import CheckpointError
from .spec import TensorSpec, expected_tensors

_CHUNK = 2**20  # values made at a time


class RandomWeights:
    """A :class:`~dspark.layers.params.ParamSource` that needs no files.

    Every value depends on ``seed``, the tensor's name and the value's position alone, so ranks that take slices agree
    with a rank that takes the whole. Sizes are chosen so that a model's logits have a standard deviation of about 2,
    experts are used evenly, and no sink, gate or residual mix saturates.
    """

    def __init__(self, config: Config, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        self.dtype = dtype
        self._seed = seed
        self._specs = {name: spec for name, spec in expected_tensors(config).items() if spec.copy_of is None}

    @property
    def has_draft(self) -> bool:
        """Whether the config announces a draft, which then has weights too."""
        return self.config.num_draft_stages > 0

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def names(self, role: str | None = None) -> list[str]:
        """The canonical names of all tensors, or of those of the ``role`` target or draft."""
        return [name for name, spec in self._specs.items() if role in (None, spec.role)]

    def take(
        self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """As :meth:`~dspark.layers.params.ParamSource.take`."""
        spec = self._specs.get(name)
        if spec is None:
            raise CheckpointError(f"{name} is not a tensor of this model")
        shape = spec.shape
        stop = shape[dim] if stop is None else stop
        if not 0 <= dim < len(shape) or not 0 <= start <= stop <= shape[dim]:
            raise CheckpointError(f"{name}: [{start}, {stop}) of axis {dim} leaves the shape {list(shape)}")
        if spec.kind == "table":
            return self._table(name, spec, dim, start, stop)
        inner = int(np.prod(shape[1:], dtype=np.int64))
        rows = np.arange(start, stop) if dim == 0 else np.arange(shape[0])
        if dim == 0:
            columns = np.arange(inner)
        else:
            columns = np.arange(inner).reshape(shape[1:]).take(np.arange(start, stop), axis=dim - 1).reshape(-1)
        values = np.empty((len(rows), len(columns)), dtype=np.float32)
        key, (mean, spread) = self._key(name), _law(name, spec, self.config)
        step = max(1, _CHUNK // max(len(columns), 1))
        for first in range(0, len(rows), step):
            block = rows[first : first + step, None].astype(np.uint64) * np.uint64(inner) + columns.astype(np.uint64)
            # A uniform law of the wanted standard deviation.
            values[first : first + step] = mean + spread * np.sqrt(np.float32(3)) * (2 * _uniform(key, block) - 1)
        result_shape = [stop - start if axis == dim else size for axis, size in enumerate(shape)]
        return torch.from_numpy(values.reshape(result_shape)).to(self.dtype if dtype is None else dtype)

    def _key(self, name: str) -> np.uint64:
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        return np.uint64(int.from_bytes(digest[:8], "little"))

    def _table(self, name: str, spec: TensorSpec, dim: int, start: int, stop: int) -> torch.Tensor:
        """Distinct experts for every token: a random first one and a random stride."""
        num_tokens, top_k = spec.shape
        num_experts = self.config.num_experts
        tokens = np.arange(num_tokens, dtype=np.uint64)[:, None]
        first = (_uniform(self._key(name), tokens) * num_experts).astype(np.int64)
        slots = np.arange(top_k) * max(1, num_experts // top_k)
        table = (first + slots) % num_experts
        return torch.from_numpy(table).narrow(dim, start, stop - start).contiguous()


def _uniform(key: np.uint64, index: np.ndarray) -> np.ndarray:
    """Float32 in [0, 1) for each index: the output function of the SplitMix64 generator at position ``index``."""
    with np.errstate(over="ignore"):
        z = (index + key) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def _law(name: str, spec: TensorSpec, config: Config) -> tuple[float, float]:
    """Mean and standard deviation of the values of one tensor."""
    leaf = name.split(".")[-1]
    if name == "embed.weight":
        return 0.0, 1.0
    if name == "head.weight":
        return 0.0, 2.0 * config.hidden_size**-0.5
    if len(spec.shape) == 1:
        if leaf == "weight":  # a norm
            return 1.0, 0.1
        if leaf.endswith("_scale"):
            return 0.5, 0.05
        if name.endswith("gate.bias"):
            return 0.0, 0.02
        return 0.0, 0.3  # sinks, bases of the residual mix, biases of a draft's head
    if leaf == "ape":
        return 0.0, 0.3
    if leaf.startswith("hc_"):
        return 0.0, spec.shape[1] ** -0.5
    if "markov_w1" in name:
        return 0.0, 1.0
    return 0.0, spec.shape[1] ** -0.5
