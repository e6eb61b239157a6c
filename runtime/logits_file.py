"""Logits of many sequences written to a ``.safetensors`` file as they come, without holding them in memory."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class LogitsFile:
    """``logits`` [B, L, V] float32, L the longest sequence, and ``lengths`` [B] int64; rows past a length are NaN.

    The file appears under its name when it is closed without an error. Raises ``OSError`` where it cannot be written.
    """

    def __init__(self, path: str | pathlib.Path, lengths: Sequence[int], vocab_size: int) -> None:
        self._path = pathlib.Path(path)
        self._partial = self._path.with_name(self._path.name + ".partial")
        shape = (len(lengths), max(lengths), vocab_size)
        num_bytes = 4 * shape[0] * shape[1] * shape[2]
        header = json.dumps(
            {
                "logits": {"dtype": "F32", "shape": shape, "data_offsets": [0, num_bytes]},
                "lengths": {
                    "dtype": "I64",
                    "shape": [len(lengths)],
                    "data_offsets": [num_bytes, num_bytes + 8 * len(lengths)],
                },
            }
        ).encode()
        header += b" " * (-len(header) % 8)
        start = 8 + len(header)
        with self._partial.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.seek(start + num_bytes)
            file.write(np.asarray(lengths, dtype="<i8").tobytes())
        self._logits = np.memmap(self._partial, dtype="<f4", mode="r+", offset=start, shape=shape)
        for index, length in enumerate(lengths):
            self._logits[index, length:] = np.nan

    def write(self, index: int, start: int, logits: NDArray[np.float32]) -> None:
        """Rows ``start ..`` of sequence ``index``: [T, V] float32."""
        self._logits[index, start : start + len(logits)] = logits

    def __enter__(self) -> LogitsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._logits.flush()
        del self._logits
        if kind is None:
            os.replace(self._partial, self._path)
        else:
            self._partial.unlink()
