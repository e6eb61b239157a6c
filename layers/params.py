"""Where layers get their weights from, without knowing files.

Names are canonical: DeepSeek's own (``layers.3.attn.wq_a.weight``), whatever the checkpoint calls them.
"""

from __future__ import annotations

from typing import Protocol

import torch


class ParamSource(Protocol):
    """Gives slices of named parameters; a checkpoint reader, or random weights."""

    def take(
        self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The parameter ``name``, only ``[start, stop)`` of axis ``dim``, as a contiguous tensor.

        ``dtype=None`` means the dtype the model computes in (quantised weights are dequantised to it); integers
        stay integers. Raises ``ValueError`` when the name is unknown or the range leaves the parameter.
        """
        ...


class OnDevice:
    """A :class:`ParamSource` whose parameters are moved to a device as they are taken."""

    def __init__(self, source: ParamSource, device: torch.device) -> None:
        self._source, self._device = source, device

    def take(
        self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """As :meth:`ParamSource.take`, on the device."""
        return self._source.take(name, dim=dim, start=start, stop=stop, dtype=dtype).to(self._device)


class Scope:
    """A :class:`ParamSource` seen from below a prefix: ``Scope(source).scope("layers.0").take("attn_norm.weight")``."""

    def __init__(self, source: ParamSource, prefix: str = "") -> None:
        self._source, self._prefix = source, prefix

    def take(
        self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """As :meth:`ParamSource.take`, below this prefix."""
        return self._source.take(self._prefix + name, dim=dim, start=start, stop=stop, dtype=dtype)

    def scope(self, name: str) -> Scope:
        """The scope ``name`` below this one."""
        return Scope(self._source, f"{self._prefix}{name}.")
