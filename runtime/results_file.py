"""A file of results that only grows: one JSON object a line, each written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import stat
from collections.abc import Iterable
from typing import Any, NamedTuple

MAX_FILE_BYTES = 1 << 36
MAX_LINE_BYTES = 1 << 28


class OutputFailed(RuntimeError):
    """Results can no longer be written; the message says where, why and what to do."""


class Earlier(NamedTuple):
    """What an earlier run left: the number of prompt tokens by request id, and the bytes of the results."""

    prompt_tokens: dict[str, int]
    num_bytes: int


def read_earlier(path: str | os.PathLike[str], known: Iterable[str]) -> Earlier:
    """The results in the file ``path``; nothing where there is no file. A last line without an end was torn: it does
    not count.

    ``known`` are the ids of the requests at hand. Raises ``ValueError`` naming the line for one that is no result, for
    an id that is unknown or there twice.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return Earlier({}, 0)
    if not path.is_file():
        raise ValueError(f"--resume needs a file to read, and {path} is none")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; at most {MAX_FILE_BYTES} are read")
    known, found, num_bytes = set(known), {}, 0
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), start=1):
            if not line.endswith(b"\n"):
                if len(line) == MAX_LINE_BYTES:
                    raise ValueError(f"{path} line {number} is longer than {MAX_LINE_BYTES} bytes")
                break
            request_id, num_tokens = _result(line, f"{path} line {number}")
            if request_id in found:
                raise ValueError(f"{path} line {number}: a second result of {request_id[:80]!r}")
            if request_id not in known:
                raise ValueError(
                    f"{path} line {number} is a result of {request_id[:80]!r}, which is no request of this run; resume "
                    "with the input it was made from"
                )
            found[request_id] = num_tokens
            num_bytes += len(line)
    return Earlier(found, num_bytes)


def _result(line: bytes, where: str) -> tuple[str, int]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where} is no JSON; --resume continues a file that generate --output wrote") from None
    request_id = value.get("id") if isinstance(value, dict) else None
    num_tokens = value.get("prompt_tokens") if isinstance(value, dict) else None
    if not isinstance(request_id, str) or type(num_tokens) is not int:
        raise ValueError(f"{where} has no id and prompt_tokens; --resume continues a file that generate --output wrote")
    return request_id, num_tokens


class ResultsFile:
    """Appends results to the file ``path``, behind its first ``keep`` bytes; what else was in it is cut off."""

    def __init__(self, path: str | os.PathLike[str], keep: int = 0) -> None:
        self._path, self._num_lines, self._end = path, 0, keep
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._is_regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
        self._cut()

    def _cut(self) -> None:
        if self._is_regular:
            os.ftruncate(self._fd, self._end)

    def write(self, value: dict[str, Any]) -> None:
        """Append one result. Raises :class:`OutputFailed`, with the results before it intact."""
        line = (json.dumps(value, ensure_ascii=False) + "\n").encode()
        try:
            done = os.write(self._fd, line)
            while done < len(line):
                done += os.write(self._fd, line[done:])
        except OSError as error:
            with contextlib.suppress(OSError):
                self._cut()
            raise OutputFailed(
                f"--output {self._path}: {error.strerror}; the {self._num_lines} results of this run before it are "
                "complete; make room, and continue with --resume"
            ) from None
        self._num_lines += 1
        self._end += len(line)

    def close(self) -> None:
        """No more results come."""
        os.close(self._fd)

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
