"""Drafts: what proposes the tokens that the target then verifies. One file each, and one line in the table.

A draft may be any function of the tokens so far; which law its tokens are drawn from is its own business as long as it
hands that law over, because verification is exact for every law.
"""

from __future__ import annotations

import importlib

from .base import Drafter as Drafter
from .base import DraftRequests as DraftRequests

# name -> "module:class" below this package
DRAFTERS: dict[str, str] = {
    "none": "none:NoDraft",
    "dspark": "dspark:DSparkDrafter",
}


def drafter_class(name: str) -> type[Drafter]:
    """The class of the draft ``name``; ``ValueError`` lists the names there are."""
    if name not in DRAFTERS:
        raise ValueError(f"unknown draft {name!r}; there are {', '.join(DRAFTERS)}")
    module, _, attribute = DRAFTERS[name].partition(":")
    return getattr(importlib.import_module(f".{module}", __name__), attribute)
