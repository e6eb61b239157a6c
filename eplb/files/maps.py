"""Files of placements.

| format | suffix | content |
|---|---|---|
| sglang | .json | ``--init-expert-location``: an object with ``physical_to_logical_map`` [L][P] and no other key |
| npz | .npz | the same array, and the deployment: ``num_experts, num_gpus, num_nodes, num_groups`` |
| csv | .csv | columns ``layer, slot, gpu, expert`` |
| trt | .yaml, .yml | TensorRT-LLM: ``num_slots``, ``layer_updates_per_iter``, ``initial_global_assignments`` |
| vllm | .jsonl | one ``eplb_initial_mapping`` record |
| pt | .pt | read only: sglang's torch file of the same object |

sglang refuses any further key, so what else is known of a map goes into a file beside it, ``NAME.meta.json``.

Shapes: L layers, E experts, P slots.
"""

from __future__ import annotations

import csv
import io
import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..placement import Placement
from ..shape import Shape
from .safe import parse_json, read_csv, read_json_lines, read_npz, read_pt, read_text, replacing, to_array
from .trt_yaml import parse_trt, write_trt

KEY = "physical_to_logical_map"
FORMATS = {".json": "sglang", ".npz": "npz", ".csv": "csv", ".yaml": "trt", ".yml": "trt", ".jsonl": "vllm"}


@dataclass(frozen=True)
class MapFile:
    """``slots`` [L, P] int64 and what the file knows of the deployment; numbers of layers where it names them."""

    slots: np.ndarray
    num_experts: int | None = None
    num_gpus: int | None = None
    num_nodes: int | None = None
    num_groups: int | None = None
    layers: tuple[int, ...] | None = None

    def placement(
        self,
        num_gpus: int | None = None,
        num_nodes: int | None = None,
        num_groups: int | None = None,
        num_experts: int | None = None,
    ) -> Placement:
        """The map on a deployment; what is not given comes from the file, experts otherwise from the largest number.

        Raises ``ValueError`` where the number of GPUs is known to neither, where both know it and differ, and for
        whatever ``Placement`` refuses.
        """
        known = {
            "GPUs": (num_gpus, self.num_gpus),
            "nodes": (num_nodes, self.num_nodes),
            "groups": (num_groups, self.num_groups),
            "experts": (num_experts, self.num_experts),
        }
        for name, (given, stored) in known.items():
            if given is not None and stored is not None and given != stored:
                raise ValueError(f"the map was made for {stored} {name}, not for {given}")
        gpus, nodes, groups, experts = (given or stored for given, stored in known.values())
        if gpus is None:
            raise ValueError("the map file does not say for how many GPUs it is: give --gpus")
        experts = experts or int(self.slots.max()) + 1
        return Placement(self.slots, Shape(experts, self.slots.shape[1], gpus, nodes or 1, groups or 1))


def read_map(path: str | pathlib.Path) -> MapFile:
    """The map in a file of any format above. Raises ``ValueError`` naming the file and what is wrong with it."""
    path = pathlib.Path(path)
    readers: dict[str, Callable[[pathlib.Path], MapFile]] = {
        ".json": _read_json,
        ".npz": _read_npz,
        ".csv": _read_csv,
        ".yaml": _read_trt,
        ".yml": _read_trt,
        ".jsonl": _read_vllm,
        ".pt": _read_pt,
    }
    if path.suffix not in readers:
        raise ValueError(f"{path}: unknown kind of map {path.suffix!r}; known are {', '.join(readers)}")
    return readers[path.suffix](path)


def _slots(value: Any, path: pathlib.Path) -> np.ndarray:
    slots = to_array(value, f"the map of {path}", (2,))
    if not np.issubdtype(slots.dtype, np.integer):
        raise ValueError(f"the map of {path} must hold whole numbers, not {slots.dtype}")
    return slots.astype(np.int64)


def _read_json(path: pathlib.Path) -> MapFile:
    return _sglang(parse_json(read_text(path), str(path)), path)


def _read_pt(path: pathlib.Path) -> MapFile:
    return _sglang(read_pt(path), path)


def _sglang(content: Any, path: pathlib.Path) -> MapFile:
    if not isinstance(content, dict) or KEY not in content:
        keys = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path} holds {keys}, not {KEY}")
    if len(content) > 1:
        others = sorted(str(key) for key in content if key != KEY)
        raise ValueError(f"{path} holds {others} beside {KEY}; sglang fails on any key but that one")
    return MapFile(_slots(content[KEY], path))


def _read_npz(path: pathlib.Path) -> MapFile:
    content = read_npz(path)
    if KEY not in content:
        raise ValueError(f"{path} holds {sorted(content)}, not {KEY}")
    numbers = {
        name: int(content[name]) for name in ("num_experts", "num_gpus", "num_nodes", "num_groups") if name in content
    }
    return MapFile(_slots(content[KEY], path), **numbers)


def _read_csv(path: pathlib.Path) -> MapFile:
    heading, rows = read_csv(path)
    if heading is None or not {"layer", "slot", "expert"} <= set(heading):
        raise ValueError(f"{path} must have the columns layer, slot, expert (and gpu)")
    try:
        table = np.array([[int(cell) for cell in row] for row in rows], np.int64).reshape(len(rows), -1)
    except ValueError as error:
        raise ValueError(f"{path} must hold whole numbers, as many in every row ({error})") from error
    column = {name: table[:, n] for n, name in enumerate(heading)}
    layer, slot = column["layer"], column["slot"]
    if not len(table) or min(layer.min(), slot.min()) < 0 or (layer.max() + 1) * (slot.max() + 1) != len(table):
        raise ValueError(f"{path} must give every slot of every layer once, counted from 0")
    slots = np.full((layer.max() + 1, slot.max() + 1), -1, np.int64)
    slots[layer, slot] = column["expert"]
    num_gpus = int(column["gpu"].max()) + 1 if "gpu" in column else None
    return MapFile(slots, num_gpus=num_gpus)


def _read_trt(path: pathlib.Path) -> MapFile:
    num_slots, assignments = parse_trt(read_text(path), str(path))
    return _by_layer(assignments, num_slots, path)


def _read_vllm(path: pathlib.Path) -> MapFile:
    records = read_json_lines(path, "eplb_initial_mapping")
    if len(records) > 1:
        raise ValueError(f"{path} holds {len(records)} maps; one is read")
    record = records[0]
    missing = {"num_slots", "num_redundant_experts", "initial_global_assignments"} - set(record)
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
    try:
        assignments = {int(layer): row for layer, row in record["initial_global_assignments"].items()}
    except (AttributeError, ValueError) as error:
        raise ValueError(f"{path}: initial_global_assignments must map layer numbers to lists ({error})") from error
    for name in ("num_slots", "num_redundant_experts"):
        if type(record[name]) is not int:
            raise ValueError(f"{path}: {name} is {record[name]!r:.60}, not a whole number")
    experts = record["num_slots"] - record["num_redundant_experts"]
    found = _by_layer(assignments, record["num_slots"], path)
    return MapFile(found.slots, num_experts=experts, layers=found.layers)


def _by_layer(assignments: dict[int, Any], num_slots: int, path: pathlib.Path) -> MapFile:
    layers = tuple(sorted(assignments))
    if not layers:
        raise ValueError(f"{path} assigns no layer")
    for layer in layers:
        length = len(assignments[layer]) if isinstance(assignments[layer], list) else 0
        if length != num_slots:
            raise ValueError(f"{path}: layer {layer} assigns {length} slots, num_slots is {num_slots}")
    return MapFile(_slots([assignments[layer] for layer in layers], path), layers=layers)


def write_map(
    path: str | pathlib.Path,
    placement: Placement,
    *,
    kind: str | None = None,
    meta: dict[str, Any] | None = None,
    first_layer: int = 0,
) -> list[pathlib.Path]:
    """Write a map as ``kind`` or in the format of the suffix, whole or not at all; returns the files written.

    ``meta`` goes into ``NAME.meta.json`` beside it. ``first_layer`` is the number that formats with layer numbers give
    to the first layer (models whose first layers have no experts).
    """
    path = pathlib.Path(path)
    if kind is None and path.suffix not in FORMATS:
        raise ValueError(f"{path}: maps are written as {', '.join(FORMATS)}, not {path.suffix!r}")
    kind = kind or FORMATS[path.suffix]
    if kind not in FORMATS.values():
        raise ValueError(f"unknown kind of map {kind!r}; there are {', '.join(dict.fromkeys(FORMATS.values()))}")
    layers = range(first_layer, first_layer + placement.num_layers)
    with replacing(path) as part:
        if kind == "npz":
            with part.open("wb") as file:
                np.savez(file, **{KEY: placement.slots, **deployment(placement)})
        else:
            part.write_text(_text(kind, placement, layers), encoding="utf-8")
    written = [path]
    if meta is not None:
        beside = path.with_name(path.name + ".meta.json")
        with replacing(beside) as part:
            part.write_text(json.dumps(meta, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        written.append(beside)
    return written


def _text(kind: str, placement: Placement, layers: range) -> str:
    slots = placement.slots.tolist()
    if kind == "sglang":
        return json.dumps({KEY: slots}) + "\n"
    if kind == "trt":
        return write_trt(slots, layers)
    if kind == "vllm":
        record = {
            "record_type": "eplb_initial_mapping",
            "version": 1,
            "num_redundant_experts": placement.shape.num_redundant,
            "num_slots": placement.shape.num_slots,
            "initial_global_assignments": {str(layer): row for layer, row in zip(layers, slots)},
        }
        return json.dumps(record) + "\n"
    assert kind == "csv", kind
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    rows.writerow(["layer", "slot", "gpu", "expert"])
    per_gpu = placement.shape.slots_per_gpu
    for layer, row in enumerate(slots):
        rows.writerows([layer, slot, slot // per_gpu, expert] for slot, expert in enumerate(row))
    return out.getvalue()


def deployment(placement: Placement) -> dict[str, int]:
    """The sizes that a map file may carry."""
    shape = placement.shape
    return {
        "num_experts": shape.num_experts,
        "num_gpus": shape.num_gpus,
        "num_nodes": shape.num_nodes,
        "num_groups": shape.num_groups,
    }
