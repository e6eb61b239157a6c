"""From one placement to the next: what differs, which weights travel from where to where, and what that costs.

Slots of a GPU are alike, so an expert that stays on its GPU never moves: ``keep_slots`` puts it back where it was, and
only (GPU, expert) pairs that are new count. Weights of a new pair come from a GPU that has the expert now, on the same
node if there is one, from the one that sends least so far.

A layer is exchanged while the old map is still in use: its new experts wait in buffers until all have come, then the
map of that layer flips. Batches bound what is under way at a time.

Shapes: L layers, E experts, P slots, G GPUs, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .placement import Placement


class Transfer(NamedTuple):
    """One expert's weights of one layer, from a slot of the old map to a slot of the new one."""

    layer: int
    expert: int
    source_slot: int
    target_slot: int
    source_gpu: int
    target_gpu: int
    crosses_node: bool


class Difference(NamedTuple):
    """Per layer, [L] each: slots whose expert differs; the same after ``keep_slots``; copies gained and lost."""

    changed_slots: np.ndarray
    moved: np.ndarray
    new_copies: np.ndarray
    removed_copies: np.ndarray


def check_same_deployment(old: Placement, new: Placement) -> None:
    """Raise ``ValueError`` with both numbers where two maps cannot follow one another."""
    pairs = {
        "layers": (old.num_layers, new.num_layers),
        "experts": (old.shape.num_experts, new.shape.num_experts),
        "slots": (old.shape.num_slots, new.shape.num_slots),
        "GPUs": (old.shape.num_gpus, new.shape.num_gpus),
        "nodes": (old.shape.num_nodes, new.shape.num_nodes),
    }
    for name, (before, after) in pairs.items():
        if before != after:
            raise ValueError(f"the first map has {before} {name}, the second {after}")


def keep_slots(old: Placement, new: Placement) -> Placement:
    """``new`` with the experts of every GPU reordered so that those that stay keep their slots."""
    check_same_deployment(old, new)
    before, after = old.by_gpu, new.by_gpu
    num_slots = old.shape.slots_per_gpu
    kept = np.full(after.shape, -1, np.int32)
    used = np.zeros(after.shape, bool)
    for slot in range(num_slots):
        # The first slot of the new map that holds the old slot's expert and was not matched yet.
        match = (after == before[:, :, slot : slot + 1]) & ~used
        found = match.any(2)
        layer, gpu = np.nonzero(found)
        used[layer, gpu, match.argmax(2)[found]] = True
        kept[layer, gpu, slot] = before[layer, gpu, slot]
    # Both lists run through the GPUs in the same order, with as many free slots as unmatched experts on each.
    kept[kept < 0] = after[~used]
    return Placement(kept.reshape(new.slots.shape), new.shape)


def difference(old: Placement, new: Placement) -> Difference:
    """What differs between two maps of the same deployment."""
    kept = keep_slots(old, new)
    gained = new.counts - old.counts
    return Difference(
        (new.slots != old.slots).sum(1),
        (kept.slots != old.slots).sum(1),
        np.maximum(gained, 0).sum(1),
        np.maximum(-gained, 0).sum(1),
    )


def transfers(old: Placement, new: Placement) -> list[Transfer]:
    """The transfers that turn ``old`` into ``keep_slots(old, new)``, by layer, those within a node first.

    A second copy of an expert on a GPU is copied there and is no transfer.
    """
    kept = keep_slots(old, new)
    shape = old.shape
    gpu_of = np.arange(shape.num_slots) // shape.slots_per_gpu
    node_of = np.arange(shape.num_gpus) // shape.gpus_per_node
    found: list[Transfer] = []
    for layer in range(old.num_layers):
        sent = np.zeros(shape.num_gpus, np.int64)
        homes: dict[int, list[int]] = {}
        for slot, expert in enumerate(old.slots[layer].tolist()):
            homes.setdefault(expert, []).append(slot)
        here, arrives = [], set()
        for slot in np.flatnonzero(kept.slots[layer] != old.slots[layer]).tolist():
            expert, target = int(kept.slots[layer, slot]), int(gpu_of[slot])
            sources = homes[expert]
            if (expert, target) in arrives or any(gpu_of[home] == target for home in sources):
                continue
            arrives.add((expert, target))
            source = min(sources, key=lambda s, t=target: (node_of[gpu_of[s]] != node_of[t], sent[gpu_of[s]], s))
            sent[gpu_of[source]] += 1
            crosses = bool(node_of[gpu_of[source]] != node_of[target])
            here.append(Transfer(layer, expert, source, slot, int(gpu_of[source]), target, crosses))
        found += sorted(here, key=lambda one: (one.crosses_node, one.target_slot))
    return found


def batches(moves: Sequence[Transfer], most_per_gpu: int = 2, most: int | None = None) -> list[list[Transfer]]:
    """``moves`` in order of layers, cut so that no batch mixes layers, no GPU sends or receives more than
    ``most_per_gpu`` of a batch, and a batch has at most ``most`` transfers.

    Transfers within a node come in earlier batches than those across nodes where both are ready.
    """
    for name, value in (("most_per_gpu", most_per_gpu), ("most", most)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    found: list[list[Transfer]] = []
    waiting = sorted(moves, key=lambda one: (one.layer, one.crosses_node, one.target_slot))
    while waiting:
        layer, batch, later = waiting[0].layer, [], []
        sends: dict[int, int] = {}
        receives: dict[int, int] = {}
        for move in waiting:
            full = most is not None and len(batch) >= most
            busy = sends.get(move.source_gpu, 0) >= most_per_gpu or receives.get(move.target_gpu, 0) >= most_per_gpu
            if move.layer != layer or full or busy:
                later.append(move)
                continue
            sends[move.source_gpu] = sends.get(move.source_gpu, 0) + 1
            receives[move.target_gpu] = receives.get(move.target_gpu, 0) + 1
            batch.append(move)
        found.append(batch)
        waiting = later
    return found


@dataclass(frozen=True)
class Links:
    """Bytes per second of one GPU, each way, within a node and across nodes, and the seconds that a batch costs."""

    within_node: float
    across_nodes: float
    batch_latency: float = 0.0

    def __post_init__(self) -> None:
        for name in ("within_node", "across_nodes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"the bandwidth {name} is {getattr(self, name)} bytes/s; it must be above 0")


class Cost(NamedTuple):
    """What a migration costs: bytes within and across nodes, batches, extra memory of a GPU at most, seconds."""

    num_transfers: int
    bytes_within_node: int
    bytes_across_nodes: int
    num_batches: int
    peak_extra_bytes: int
    seconds: float


def cost(plan: Sequence[Sequence[Transfer]], expert_bytes: int, links: Links) -> Cost:
    """The cost of ``plan`` (see :func:`batches`) with experts of ``expert_bytes``.

    A batch lasts as long as its busiest GPU; batches follow each other. Received experts wait until their layer flips.
    """
    if expert_bytes < 1:
        raise ValueError(f"an expert has {expert_bytes} bytes; it must have at least 1")
    seconds, waiting = 0.0, {}
    for batch in plan:
        busy: dict[tuple[int, str], float] = {}
        for move in batch:
            took = expert_bytes / (links.across_nodes if move.crosses_node else links.within_node)
            for end in ((move.source_gpu, "send"), (move.target_gpu, "receive")):
                busy[end] = busy.get(end, 0.0) + took
            held = (move.layer, move.target_gpu)
            waiting[held] = waiting.get(held, 0) + 1
        seconds += max(busy.values(), default=0.0) + links.batch_latency
    across = sum(move.crosses_node for batch in plan for move in batch)
    total = sum(len(batch) for batch in plan)
    return Cost(
        total,
        (total - across) * expert_bytes,
        across * expert_bytes,
        len(plan),
        max(waiting.values(), default=0) * expert_bytes,
        seconds,
    )


def break_even_steps(old_top: float, new_top: float, seconds: float, step_seconds: float) -> float:
    """Steps until a migration of ``seconds`` has paid, ``inf`` if never.

    ``old_top`` and ``new_top`` are the loads of the fullest GPUs, summed over the layers, under both maps;
    ``step_seconds`` what the experts of one step take now. The experts' time follows the fullest GPU.
    """
    if not old_top > 0 or not step_seconds > 0:
        raise ValueError(f"loads ({old_top}) and the seconds of a step ({step_seconds}) must be above 0")
    saved = step_seconds * (1 - new_top / old_top)
    return seconds / saved if saved > 0 else float("inf")
