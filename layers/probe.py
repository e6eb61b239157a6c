"""A way to look inside a forward: whoever passes a probe is told intermediate tensors by name."""

from __future__ import annotations

from typing import Protocol

import torch


class Probe(Protocol):
    """Called with tensors of a running step; it must not change them."""

    def __call__(self, name: str, layer: int, value: torch.Tensor) -> None:
        """``name`` says what ``value`` is (see the callers), ``layer`` which layer it comes from."""
        ...


def ignore(name: str, layer: int, value: torch.Tensor) -> None:
    """The probe that does not look."""
