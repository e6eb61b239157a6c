"""Which drafts ``bench accept`` compares: the names and folders of its ``--draft``."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from ..draft import draft_config, drafter_class, own_draft
from ..draft.files import DraftFiles
from ..engine_config import TREES
from ..model_config import Config, load_model_config


class DraftSpec(NamedTuple):
    """A draft to measure: ``label`` in results, checkpoint ``folder``, and ``name`` in the table of drafts;
    ``draft_model``: the draft's own folder; ``tree``: the kind of tree it proposes, "none" for blocks."""

    label: str
    folder: pathlib.Path
    name: str
    config: Config
    draft_model: str | None = None
    tree: str = "none"

    @property
    def settings(self) -> Config | DraftFiles:
        """What the draft's class reads its settings from."""
        return draft_config(self.name, self.config, self.draft_model)


def draft_specs(text: str, folder: pathlib.Path, config: Config) -> list[DraftSpec]:
    """The drafts of ``--draft text`` for the checkpoint ``folder``.

    Raises ``ValueError`` for a draft that is not there, a label that comes twice, or a folder with another target.
    """
    specs: list[DraftSpec] = []
    for part in text.split(","):
        part, tree = tree_of(part.strip())
        mark = "" if tree == "none" else f"@{tree}"
        label, _, other = (x.strip() for x in part.partition("="))
        if other and is_draft_folder(config, other):
            name = own_draft(config, other)
            specs.append(DraftSpec(_new_label(label + mark, specs), folder, name, config, other, tree))
            drafter_class(name).tap_layers(specs[-1].settings)
            continue
        own_folder, own_config = (pathlib.Path(other), load_model_config(other)) if other else (folder, config)
        name = own_draft(own_config) if other or label == "auto" else label
        if name == "none":
            raise ValueError(f"{own_folder} has no draft; name a checkpoint that has one, as in --draft mtp=DIR")
        drafter_class(name).tap_layers(draft_config(name, own_config, None))
        label = _new_label((name if label == "auto" else label) + mark, specs)
        if other and target_only(own_config) != target_only(config):
            raise ValueError(f"--draft {part}: the target of {own_folder} is not that of {folder}")
        specs.append(DraftSpec(label, own_folder, name, own_config, None, tree))
    return specs


def tree_of(part: str) -> tuple[str, str]:
    """A draft's NAME=DIR and the kind of tree that an ending such as ``@dynamic`` asks for."""
    rest, _, kind = part.rpartition("@")
    return (rest, kind) if kind in TREES else (part, "none")


def _new_label(label: str, specs: Sequence[DraftSpec]) -> str:
    if label in (spec.label for spec in specs):
        raise ValueError(f"--draft names {label!r} twice; call one of them something else, as in b=DIR")
    return label


def is_draft_folder(config: Config, folder: str) -> bool:
    """Whether ``folder`` holds a draft by itself, and not the target once more with a draft of its own."""
    found = DraftFiles(config, pathlib.Path(folder)).format
    if found != "model":
        return True
    other = load_model_config(folder)
    return own_draft(other) == "none" and target_only(other) != target_only(config)


def target_only(config: Config) -> tuple[object, ...]:
    """What a config says about the target."""
    fields = vars(config) | {"dspark": None, "num_nextn_predict_layers": 0}
    return tuple(sorted(fields.items()))


def common_gamma(wanted: int | None, specs: Sequence[DraftSpec]) -> int:
    """The length of every draft's blocks: ``wanted``, or the longest that all can propose."""
    most = {spec.label: drafter_class(spec.name).max_gamma(spec.settings) for spec in specs}
    for label, gamma in most.items():
        if wanted is not None and wanted > gamma:
            raise ValueError(f"--gamma is {wanted}, but the draft {label} proposes at most {gamma} tokens")
    return min(most.values()) if wanted is None else wanted
