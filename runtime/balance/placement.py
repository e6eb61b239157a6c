"""Where experts are at the start: in order, or as a file says; for the target and for the draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...eplb.files import read_map
from ...eplb.placement import Placement, trivial_slots
from ...eplb.shape import Shape
from ...layers.expert_slots import CopyRule
from ...parallel.groups import Group, Groups
from ...parallel.pipeline import stage_layers
from ...parallel.topology import Topology
from ..engine_config import EngineConfig
from ..model_config import Config
from .split import copy_rule

ExpertLinks = tuple[Group, Group] | None
"""Connections of moe_ep for what moves of the target and of the draft, which may move at the same time; None where
nothing does."""


def expert_links(config: EngineConfig, groups: Groups) -> ExpertLinks:
    """The connections that ``config`` asks for. Collective over the job."""
    return None if config.eplb_interval is None else (groups.twin("moe_ep"), groups.twin("moe_ep"))


class PlacedExperts(NamedTuple):
    """``placement``: of all layers that have experts. ``by_stage``: how many of them each pipeline stage has.
    ``split``: which copy of an expert a pick goes to, a value of ``--replica-split``."""

    placement: Placement
    by_stage: tuple[int, ...]
    split: str

    def copy_rule(self, slots: Sequence[int], rank: int) -> CopyRule | None:
        """See :func:`.split.copy_rule`."""
        return copy_rule(self.split, slots, self.placement.shape, rank)

    def of_stage(self, stage: int) -> Placement:
        """The part of one stage, which must have such layers."""
        first = sum(self.by_stage[:stage])
        return Placement(self.placement.slots[first : first + self.by_stage[stage]], self.placement.shape)


class ExpertPlacements(NamedTuple):
    """The experts of the target and of the draft; None: whole blocks, without slots."""

    target: PlacedExperts | None = None
    draft: PlacedExperts | None = None


def expert_placements(config: EngineConfig, model: Config, topology: Topology, has_draft: bool) -> ExpertPlacements:
    """The placements at the start, on the expert ranks of ``topology``, from the files that ``config`` names.

    Both None unless ``config`` wants anything of them. Raises ``ValueError`` or ``OSError`` naming the file and what is
    wrong with it, or where sizes do not fit.
    """
    if not config.places_experts:
        return ExpertPlacements()
    blocks = model.routed_blocks(has_draft)
    layers = {int(name.split(".")[1]): number for name, number in blocks if name.startswith("layers.")}
    drafts = [number for name, number in blocks if not name.startswith("layers.")]
    if not layers:
        raise ValueError("there is no expert to place: the model has none")
    split = config.replica_split
    if split != "even" and topology.ep == 1:
        raise ValueError(f"--replica-split {split}: with --ep 1 all copies of an expert are on every rank")
    by_stage = tuple(sum(layer in layers for layer in stage) for stage in stage_layers(model.num_layers, topology.pp))
    target = _placement("", config.init_expert_location, list(layers.values()), config.num_redundant_experts, topology)
    if not drafts:
        for name in ("num_redundant_draft_experts", "init_draft_expert_location", "eplb_draft_record"):
            if getattr(config, name):
                raise ValueError(f"--{name.replace('_', '-')} is given, but there is no draft with experts")
        return ExpertPlacements(PlacedExperts(target, by_stage, split))
    path = config.init_draft_expert_location
    draft = _placement("draft-", path, drafts, config.num_redundant_draft_experts, topology)
    on_last = (0,) * (topology.pp - 1) + (len(drafts),)
    return ExpertPlacements(PlacedExperts(target, by_stage, split), PlacedExperts(draft, on_last, split))


def _placement(
    which: str, path: str | None, experts: Sequence[int], num_redundant: int, topology: Topology
) -> Placement:
    """The placement of layers with ``experts`` each; ``which``: what is between the words of the options."""
    num_layers, num_experts = len(experts), experts[0]
    assert set(experts) == {num_experts}, "layers of one model have equally many experts"
    shape = Shape(num_experts, num_experts + num_redundant, topology.ep, _num_nodes(topology))
    if path is None:
        return Placement(trivial_slots(num_layers, shape), shape)
    slots, option = read_map(path).slots, f"--init-{which}expert-location {path}"
    if slots.shape != (num_layers, shape.num_slots):
        raise ValueError(
            f"{option} maps {slots.shape[0]} layers of {slots.shape[1]} slots, but there are {num_layers} layers of "
            f"{num_experts} experts, with --num-redundant-{which}experts {num_redundant}"
        )
    try:
        return Placement(slots, shape)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _num_nodes(topology: Topology) -> int:
    """Nodes of the expert ranks where these fill them evenly and in order; else 1, and no transfer prefers any."""
    lists = [[topology.node(rank) for rank in ranks] for ranks in topology.groups["moe_ep"]]
    count = len(set(lists[0]))
    even = topology.ep % count == 0 and all(_in_runs(nodes, topology.ep // count) for nodes in lists)
    return count if even else 1


def _in_runs(nodes: Sequence[int], length: int) -> bool:
    runs = [set(nodes[i : i + length]) for i in range(0, len(nodes), length)]
    return all(len(run) == 1 for run in runs) and len(set.union(*runs)) == len(runs)
