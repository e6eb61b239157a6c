"""One ``.safetensors`` file: a header that is checked before it is believed, and byte slices through a memory map.

Why not the ``safetensors`` package's ``safe_open``: it hands out whole tensors or slices in the stored type, does not
know packed FP4 as two values a byte, and its checks are its version's. Here every rule below holds for every file, the
error names the tensor, and nothing larger than the header itself is allocated before the header has been checked:

- the header's length fits the file and :data:`MAX_HEADER_BYTES`; it is strict JSON without duplicate keys;
- each entry has exactly ``dtype`` (a known one), ``shape`` and ``data_offsets``, and the byte range is what the shape
  needs;
- the ranges lie side by side from the first byte to the last: no overlap, no hole, nothing behind the end.
"""

from __future__ import annotations

import mmap
import os
import pathlib
import struct
from typing import Any, NamedTuple

import numpy as np

from .strict_json import parse_json_object

MAX_HEADER_BYTES = 32 * 2**20
MAX_TENSORS = 2**20
MAX_DIMS = 8
MAX_NAME_LENGTH = 512

# Bits of one element.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; ``problems`` holds every finding, the message the first few and the count."""

    SHOWN = 5

    def __init__(self, problems: list[str] | str) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        more = len(self.problems) - self.SHOWN
        text = "; ".join(self.problems[: self.SHOWN]) + (f"; and {more} more problems" if more > 0 else "")
        super().__init__(text)


class StoredTensor(NamedTuple):
    """Where a tensor lies: ``dtype`` as the file names it, ``shape`` in elements, the first byte and the byte count.

    ``begin`` counts from the start of the file ``file`` (an index into the checkpoint's files).
    """

    dtype: str
    shape: tuple[int, ...]
    file: int
    begin: int
    nbytes: int


def read_header(path: pathlib.Path, file_index: int = 0) -> dict[str, StoredTensor]:
    """The tensors of the file ``path``, by their names in the file; ``file_index`` is put into each entry.

    Raises :class:`CheckpointError` naming the file and the tensor on anything that breaks the rules above.
    """
    what = path.name
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise CheckpointError(f"{what}: {size} bytes, too short for a safetensors file")
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{what}: header length {length} exceeds the limit of {MAX_HEADER_BYTES} bytes")
            if length > size - 8:
                raise CheckpointError(f"{what}: header length {length} exceeds the file, which has {size} bytes")
            data = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{what}: cannot be read: {error.strerror}") from None
    if len(data) != length or not data.startswith(b"{"):
        raise CheckpointError(f"{what}: the header is not a JSON object")
    try:
        header = parse_json_object(data, f"{what}: header")
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    _check_metadata(header.pop("__metadata__", {}), what)
    if len(header) > MAX_TENSORS:
        raise CheckpointError(f"{what}: {len(header)} tensors, more than the limit of {MAX_TENSORS}")
    tensors = {name: _entry(name, entry, what, file_index) for name, entry in header.items()}
    _check_ranges(tensors, size - 8 - length, what)
    return {name: tensor._replace(begin=8 + length + tensor.begin) for name, tensor in tensors.items()}


def _check_metadata(metadata: Any, what: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{what}: __metadata__ must map names to strings")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _entry(name: str, entry: Any, what: str, file_index: int) -> StoredTensor:
    if len(name) > MAX_NAME_LENGTH:
        raise CheckpointError(f"{what}: a tensor name of {len(name)} characters, more than {MAX_NAME_LENGTH}")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{what}: {name!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{what}: {name!r} has the unknown dtype {dtype!r:.40}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_count, shape)):
        raise CheckpointError(f"{what}: {name!r} has the bad shape {shape!r:.80}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise CheckpointError(f"{what}: {name!r} has the bad data_offsets {offsets!r:.80}")
    begin, end = offsets
    if end < begin:
        raise CheckpointError(f"{what}: {name!r} ends at byte {end} before it begins at {begin}")
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
    if bits % 8 or bits // 8 != end - begin:
        raise CheckpointError(
            f"{what}: {name!r} is {dtype} of shape {shape}, which takes {bits / 8:.10g} bytes, but its range has "
            f"{end - begin}"
        )
    return StoredTensor(dtype, tuple(shape), file_index, begin, end - begin)


def _check_ranges(tensors: dict[str, StoredTensor], data_bytes: int, what: str) -> None:
    position, previous = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if tensor.begin < position:
            raise CheckpointError(
                f"{what}: {name!r} begins at byte {tensor.begin}, inside {previous!r}, which ends at {position}"
            )
        if tensor.begin > position:
            raise CheckpointError(f"{what}: bytes {position} to {tensor.begin} before {name!r} belong to no tensor")
        position, previous = tensor.begin + tensor.nbytes, name
        if position > data_bytes:
            raise CheckpointError(
                f"{what}: {name!r} ends at byte {position}, but the file holds only {data_bytes} bytes of data "
                "(truncated?)"
            )
    if position < data_bytes:
        raise CheckpointError(f"{what}: {data_bytes - position} bytes after the last tensor belong to no tensor")


class MappedFile:
    """The bytes of one file through a read-only memory map, opened at the first use."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._bytes: np.ndarray | None = None

    def bytes(self, begin: int, count: int) -> np.ndarray:
        """``count`` bytes from ``begin`` on, uint8, a read-only view. Raises :class:`CheckpointError` if they left."""
        if self._bytes is None:
            try:
                with open(self._path, "rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{self._path.name}: cannot be mapped: {error}") from None
            self._bytes = np.frombuffer(mapped, dtype=np.uint8)
        view = self._bytes[begin : begin + count]
        if len(view) != count:
            raise CheckpointError(f"{self._path.name}: bytes {begin} to {begin + count} are no longer in the file")
        return view
