"""Files of expert loads, whatever wrote them, as windows of counts per layer and expert.

| suffix | content |
|---|---|
| .npz | ``load`` [S, L, E] or [L, E]; our recorder's dumps |
| .json | an object with ``logical_count`` (as sglang's loader takes it) or ``load``, [S][L][E] or [L][E] |
| .csv | columns ``layer, expert, count`` (and ``window``), or a matrix with one row a layer |
| .pt | sglang's recorder: ``stat`` (``logical_count``), or ``per_pass`` / ``per_token`` records of one or more ranks |
| .jsonl | vLLM's ``eplb_load_stats`` records |

Counts of physical slots become counts of experts by the map that stands beside them.

Shapes: S windows, L layers, E experts, P slots.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .safe import parse_json, read_csv, read_json_lines, read_npz, read_pt, read_text, to_array

# A table may leave cells out, so its size says nothing about that of the array.
MOST_COUNTS = 1 << 26


@dataclass(frozen=True)
class Loads:
    """``load`` [S, L, E] float64: tokens per window, layer and expert; windows without any token are left out."""

    load: np.ndarray

    @property
    def num_windows(self) -> int:
        """Number of windows."""
        return len(self.load)

    def total(self, decay: float = 1.0) -> np.ndarray:
        """All windows together, [L, E]; each older window counts ``decay`` times the next (1: all alike)."""
        if not 0 < decay <= 1:
            raise ValueError(f"a decay must lie above 0 and at most at 1, not {decay}")
        weight = decay ** np.arange(self.num_windows - 1, -1, -1.0)
        return np.tensordot(weight, self.load, 1)


def read_loads(paths: Sequence[str | pathlib.Path], *, fractions: bool = False) -> Loads:
    """The windows of all files, in the order given.

    Several ``per_pass`` files are ranks of one recording: their counts are added pass by pass. ``fractions`` allows
    counts that are not whole. Raises ``ValueError`` naming file, layer and expert of what is wrong: unreadable files,
    shapes that differ, counts that are negative, not finite or (unless allowed) not whole, no tokens at all.
    """
    if not paths:
        raise ValueError("no file of loads was given")
    found: list[tuple[str, np.ndarray]] = []
    passes: list[tuple[str, dict[str, Any]]] = []
    for path in map(pathlib.Path, paths):
        content = _read(path)
        if isinstance(content, dict):
            passes.append((str(path), content))
        else:
            found.append((str(path), content))
    if passes:
        found.append((passes[0][0], _merge_passes(passes)))
    windows = [_checked(load, name, fractions) for name, load in found]
    for (name, _), load in zip(found, windows):
        if load.shape[1:] != windows[0].shape[1:]:
            raise ValueError(
                f"{name} has {load.shape[1]} layers of {load.shape[2]} experts, "
                f"{found[0][0]} has {windows[0].shape[1]} of {windows[0].shape[2]}"
            )
    load = np.concatenate(windows)
    load = load[load.any((1, 2))]
    if not len(load):
        raise ValueError(f"{', '.join(map(str, paths))}: no window holds a single token")
    return Loads(load)


def _read(path: pathlib.Path) -> np.ndarray | dict[str, Any]:
    readers = {".npz": _read_npz, ".json": _read_json, ".csv": _read_csv, ".pt": _read_pt, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise ValueError(f"{path}: unknown kind of loads {path.suffix!r}; known are {', '.join(readers)}")
    return readers[path.suffix](path)


def _checked(load: np.ndarray, name: str, fractions: bool) -> np.ndarray:
    load = to_array(load, f"the loads of {name}", (2, 3)).astype(np.float64)
    load = load[None] if load.ndim == 2 else load
    checks = [(~np.isfinite(load), "not a finite number"), (load < 0, "negative")]
    if not fractions:
        checks.append((load != np.floor(load), "not a whole number of tokens (allow it with --fractions)"))
    for bad, word in checks:
        if bad.any():
            window, layer, expert = np.argwhere(bad)[0]
            raise ValueError(
                f"{name}: window {window}, layer {layer}, expert {expert} counts {load[window, layer, expert]}, {word}"
            )
    return load


def _read_npz(path: pathlib.Path) -> np.ndarray:
    return _entry(read_npz(path), path)


def _read_json(path: pathlib.Path) -> np.ndarray:
    content = parse_json(read_text(path), str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object with logical_count or load")
    return _entry(content, path)


def _entry(content: dict[str, Any], path: pathlib.Path) -> np.ndarray:
    for key in ("load", "logical_count"):
        if key in content:
            return to_array(content[key], f"{key} of {path}", (2, 3))
    raise ValueError(f"{path} holds {sorted(content)}, neither load nor logical_count")


def _read_csv(path: pathlib.Path) -> np.ndarray:
    heading, rows = read_csv(path)
    try:
        table = np.array([[float(cell) for cell in row] for row in rows])
    except ValueError as error:
        raise ValueError(f"{path}: every row needs the same number of numbers ({error})") from error
    if heading is None:
        return to_array(table, f"the matrix of {path}", (2,))
    missing = {"layer", "expert", "count"} - set(heading)
    if missing or not len(table):
        raise ValueError(f"{path} has the columns {heading} and {len(table)} rows; needed are layer, expert, count")
    if table.shape[1:] != (len(heading),):
        raise ValueError(f"{path} has {len(heading)} columns in its heading, but {table.shape[1]} in its rows")
    column = {name: table[:, n] for n, name in enumerate(heading)}
    window = column.get("window", np.zeros(len(table)))
    index = []
    for name, values in (("window", window), ("layer", column["layer"]), ("expert", column["expert"])):
        if (values < 0).any() or (values != np.floor(values)).any() or values.max() > 1e6:
            raise ValueError(f"{path}: a {name} must be a whole number from 0 on")
        index.append(values.astype(np.int64))
    sizes = [int(values.max()) + 1 for values in index]
    if math.prod(sizes) > MOST_COUNTS:
        raise ValueError(f"{path} names {sizes} windows, layers and experts, more than {MOST_COUNTS} counts")
    load = np.zeros(sizes)
    if len(np.unique(np.stack(index, 1), axis=0)) < len(table):
        raise ValueError(f"{path} gives a window, layer and expert more than once")
    load[tuple(index)] = column["count"]
    return load


def _read_jsonl(path: pathlib.Path) -> np.ndarray:
    windows = []
    for record in read_json_lines(path, "eplb_load_stats"):
        missing = {"expert_load", "p2l_map"} - set(record)
        if missing:
            raise ValueError(f"{path}: a record lacks {', '.join(sorted(missing))}")
        windows.append(to_logical(record["expert_load"], record["p2l_map"], str(path)))
    if len({window.shape for window in windows}) > 1:
        raise ValueError(f"{path} has records of different numbers of layers or experts")
    return np.stack(windows)


def to_logical(physical: Any, slots: Any, name: str) -> np.ndarray:
    """Counts of experts, [L, E], from counts of slots and the map beside them, [L, P] each; slots of -1 are unused."""
    physical = to_array(physical, f"the counts of {name}", (2,)).astype(np.float64)
    slots = to_array(slots, f"the map of {name}", (2,))
    if physical.shape != slots.shape:
        raise ValueError(f"{name} counts {list(physical.shape)} slots under a map of {list(slots.shape)}")
    if not np.issubdtype(slots.dtype, np.integer) or slots.min() < -1 or slots.max() > 1_000_000:
        raise ValueError(f"the map of {name} must hold expert numbers, or -1 for an unused slot")
    load = np.zeros((len(slots), int(slots.max()) + 1))
    layer, place = np.nonzero(slots >= 0)
    np.add.at(load, (layer, slots[layer, place]), physical[layer, place])
    return load


def _read_pt(path: pathlib.Path) -> np.ndarray | dict[str, Any]:
    content = read_pt(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a recorder's dictionary")
    if "records" in content:
        if "last_physical_to_logical_map" not in content or not isinstance(content["records"], list):
            raise ValueError(f"{path} has records without last_physical_to_logical_map")
        return content
    return _entry(content, path)


def _merge_passes(files: list[tuple[str, dict[str, Any]]]) -> np.ndarray:
    """One window a forward pass, [S, L, E], the ranks' counts added up."""
    name, first = files[0]
    slots = np.asarray(first["last_physical_to_logical_map"])
    total: dict[int, np.ndarray] = {}
    seen: set[tuple[int, int]] = set()
    for path, content in files:
        if not np.array_equal(slots, np.asarray(content["last_physical_to_logical_map"])):
            raise ValueError(f"{path} was recorded under another map than {name}")
        for record in content["records"]:
            if not isinstance(record, dict) or not {"forward_pass_id", "global_physical_count"} <= set(record):
                raise ValueError(f"{path} has a record without forward_pass_id or global_physical_count")
            number, rank = int(record["forward_pass_id"]), int(record.get("rank", 0))
            if (number, rank) in seen:
                raise ValueError(f"{path} repeats pass {number} of rank {rank}: was a file given twice?")
            seen.add((number, rank))
            load = to_logical(record["global_physical_count"], slots, path)
            total[number] = total.get(number, 0) + load
    if not total:
        raise ValueError(f"{name} holds no record")
    return np.stack([total[number] for number in sorted(total)])
