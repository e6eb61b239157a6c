"""Drafts: what proposes the tokens that the target then verifies. One file each, and one line in the table.

A draft may be any function of the tokens so far; which law its tokens are drawn from is its own business as long as it
hands that law over, because verification is exact for every law.
"""

from __future__ import annotations

import importlib
import pathlib

from ..model_config import Config
from .base import Drafter as Drafter
from .base import DraftRequests as DraftRequests
from .files import DraftFiles

# name -> "module:class" below this package
DRAFTERS: dict[str, str] = {
    "none": "none:NoDraft",
    "dspark": "dspark:DSparkDrafter",
    "mtp": "mtp:MTPDrafter",
    "dspark_dense": "block:BlockDrafter",
    "dflash": "block:BlockDrafter",
    "dflash2": "block:BlockDrafter",
    "eagle": "eagle:EagleDrafter",
    "eagle3": "eagle3:Eagle3Drafter",
    "mtp_v3": "mtp_v3:MTPV3Drafter",
    "model": "model:ModelDrafter",
    "ngram": "lookup:LookupDrafter",
}


def own_draft(config: Config, folder: str | None = None) -> str:
    """The name of the draft that a checkpoint brings with it, or of the one in ``folder``; "none" if there is none."""
    if folder is not None:
        return DraftFiles(config, pathlib.Path(folder)).format
    if config.dspark is not None:
        return "dspark"
    if config.num_nextn_predict_layers != 1:
        return "none"
    return OWN_PREDICTION.get(config.model_type, "none")


# model type -> the draft that its one prediction layer is
OWN_PREDICTION: dict[str, str] = {"deepseek_v4": "mtp", "deepseek_v3": "mtp_v3", "deepseek_v32": "mtp_v3"}
# drafts that are read from a folder of their own
FROM_FOLDER = frozenset(("dspark_dense", "dflash", "dflash2", "eagle", "eagle3", "model"))


def draft_config(name: str, config: Config, folder: str | None) -> Config | DraftFiles:
    """What the class of the draft ``name`` reads its settings from: the target's ``config``, or the draft's own folder.

    Raises ``ValueError`` if there is a folder that the draft does not need, or none where it does.
    """
    if name not in FROM_FOLDER:
        if folder is not None:
            raise ValueError(f"--draft-model is {folder}, but the draft {name} reads no folder of its own")
        return config
    if folder is None:
        raise ValueError(f"the draft {name} is a checkpoint of its own; name its folder with --draft-model")
    files = DraftFiles(config, pathlib.Path(folder))
    if files.format != name:
        raise ValueError(f"--draft is {name}, but {folder} holds a draft of the format {files.format}")
    return files


def drafter_class(name: str) -> type[Drafter]:
    """The class of the draft ``name``; ``ValueError`` lists the names there are."""
    if name not in DRAFTERS:
        raise ValueError(f"unknown draft {name!r}; there are {', '.join(DRAFTERS)}")
    module, _, attribute = DRAFTERS[name].partition(":")
    return getattr(importlib.import_module(f".{module}", __name__), attribute)
