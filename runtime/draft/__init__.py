"""Drafts: what proposes the tokens that the target then verifies. One file each, and one line in the table.

A draft may be any function of the tokens so far; which law its tokens are drawn from is its own business as long as it
hands that law over, because verification is exact for every law.
"""

from __future__ import annotations

import importlib

from ..model_config import Config
from .base import Drafter as Drafter
from .base import DraftRequests as DraftRequests

# name -> "module:class" below this package
DRAFTERS: dict[str, str] = {
    "none": "none:NoDraft",
    "dspark": "dspark:DSparkDrafter",
    "mtp": "mtp:MTPDrafter",
}


def own_draft(config: Config) -> str:
    """The name of the draft that a checkpoint brings with it; "none" if it has none."""
    if config.dspark is not None:
        return "dspark"
    return "mtp" if config.model_type == "deepseek_v4" and config.num_nextn_predict_layers == 1 else "none"


def drafter_class(name: str) -> type[Drafter]:
    """The class of the draft ``name``; ``ValueError`` lists the names there are."""
    if name not in DRAFTERS:
        raise ValueError(f"unknown draft {name!r}; there are {', '.join(DRAFTERS)}")
    module, _, attribute = DRAFTERS[name].partition(":")
    return getattr(importlib.import_module(f".{module}", __name__), attribute)
