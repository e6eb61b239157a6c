"""Reading files that others made: sizes are bounded, nothing in them is ever executed.

Every function raises ``ValueError`` naming the file and what is wrong with it, or ``OSError``.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import pathlib
import struct
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

MOST_BYTES = 2 << 30


def check_size(path: pathlib.Path, most: int = MOST_BYTES) -> None:
    """Refuse a file above ``most`` bytes, packed or unpacked."""
    size = path.stat().st_size
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                size = max(size, sum(entry.file_size for entry in archive.infolist()))
    except (zipfile.BadZipFile, NotImplementedError, struct.error) as error:
        raise ValueError(f"{path} is a broken archive: {error}") from error
    if size > most:
        raise ValueError(f"{path} holds {size} bytes, more than the {most} that are read")


def read_npz(path: pathlib.Path, most: int = MOST_BYTES) -> dict[str, np.ndarray]:
    """All arrays of an npz; arrays of Python objects are refused, since those are pickles."""
    check_size(path, most)
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception as error:
        # numpy and zipfile raise many kinds here (BadZipFile, EOFError, NotImplementedError, SyntaxError, TokenError).
        raise ValueError(f"{path} is no npz of plain arrays: {type(error).__name__}: {error}") from error


def read_text(path: pathlib.Path, most: int = MOST_BYTES) -> str:
    """The text of a UTF-8 file."""
    check_size(path, most)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}") from error


def parse_json(text: str, what: str) -> Any:
    """Strict JSON: no NaN or infinity, no key twice in an object."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{what} holds {constant}, which is no JSON number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"{what} has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
        return found

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{what} is no JSON: {error}") from error


def read_json_lines(path: pathlib.Path, record_type: str) -> list[dict[str, Any]]:
    """The records of a vLLM JSON-lines file, each of ``record_type`` and version 1."""
    found = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        record = parse_json(line, f"{path}, line {number},")
        if not isinstance(record, dict) or record.get("record_type") != record_type:
            kind = record.get("record_type") if isinstance(record, dict) else type(record).__name__
            raise ValueError(f"{path}, line {number}, is a {kind!r}, not a {record_type!r}")
        if record.get("version") != 1:
            raise ValueError(f"{path}, line {number}, has version {record.get('version')!r}; only 1 is known")
        found.append(record)
    if not found:
        raise ValueError(f"{path} holds no {record_type!r} record")
    return found


def read_csv(path: pathlib.Path) -> tuple[list[str] | None, list[list[str]]]:
    """The heading, if the first row holds words, and the other rows that are not empty."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(read_text(path))) if any(row)]
    if not rows:
        raise ValueError(f"{path} is empty")
    has_heading = not all(_is_number(cell) for cell in rows[0])
    return ([name.lower() for name in rows[0]], rows[1:]) if has_heading else (None, rows)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_pt(path: pathlib.Path, most: int = MOST_BYTES) -> Any:
    """What a torch file holds, on the CPU, with tensors as numpy arrays.

    Only tensors and plain Python values are unpickled (``weights_only``); anything else is refused, not run.
    """
    check_size(path, most)
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            f"reading {path} needs torch: pip install torch, or convert it to npz where torch is"
        ) from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch raises many kinds here (UnpicklingError, RuntimeError, EOFError, ...); all mean that it is not usable.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path} is no torch file of plain tensors and was not run: {reason}") from error
    return _to_numpy(content, torch.is_tensor, path, most)


def _to_numpy(value: Any, is_tensor: Callable[[Any], bool], path: pathlib.Path, most: int) -> Any:
    if is_tensor(value):
        if value.numel() * value.element_size() > most:
            raise ValueError(f"{path} holds a tensor of shape {list(value.shape)}, more than the {most} bytes read")
        if value.dtype.is_floating_point:
            value = value.double()
        return value.detach().numpy()
    if isinstance(value, dict):
        return {key: _to_numpy(item, is_tensor, path, most) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_numpy(item, is_tensor, path, most) for item in value]
    return value


def to_array(value: Any, what: str, dims: tuple[int, ...]) -> np.ndarray:
    """``value`` as an array of numbers with one of the numbers of axes in ``dims``."""
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{what} has rows of different lengths") from error
    if array.dtype == object or not np.issubdtype(array.dtype, np.number):
        raise ValueError(f"{what} must hold numbers in rows of equal length, not {array.dtype}")
    if array.ndim not in dims:
        raise ValueError(f"{what} must have {' or '.join(map(str, dims))} axes, not {array.ndim}")
    return array


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary path beside ``path``, of the same suffix, whose file takes its place when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
