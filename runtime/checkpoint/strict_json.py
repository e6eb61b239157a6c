"""JSON from files that nobody vouches for: size, depth and duplicate keys are checked before anything is believed."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any, NoReturn

MAX_DEPTH = 16
MAX_DIGITS = 30

# Strings are matched first so that brackets inside them do not count.
_STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


def parse_json_object(data: bytes, what: str, *, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The JSON object in ``data``; ``what`` names it in errors.

    Raises ``ValueError`` on anything but one object of UTF-8 text, on nesting deeper than ``max_depth``, on a key that
    occurs twice in an object, on endless integers, and on ``NaN`` and ``Infinity``, which are not JSON.
    """
    depth = 0
    for match in _STRUCTURE.finditer(data):
        token = match.group()
        if token in (b"{", b"["):
            depth += 1
            if depth > max_depth:
                raise ValueError(f"{what}: nested deeper than {max_depth} levels (at byte {match.start()})")
        elif token in (b"}", b"]"):
            depth -= 1

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise ValueError(f"{what}: duplicate key {key!r}")
                seen.add(key)
        return result

    def bounded_int(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise ValueError(f"{what}: an integer of {len(digits)} digits")
        return int(digits)

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{what}: {name} is not a JSON number")

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}: not UTF-8 text (byte {error.start})") from None
    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant, parse_int=bounded_int)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what}: expected an object, found {type(value).__name__}")
    return value


def read_json_object(path: pathlib.Path, *, max_bytes: int, max_depth: int = MAX_DEPTH) -> dict[str, Any]:
    """The JSON object in the file ``path`` of at most ``max_bytes`` bytes.

    Raises ``ValueError`` when the file is absent, unreadable or too large, and as :func:`parse_json_object` does.
    """
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise ValueError(f"{path.name}: {size} bytes, more than the limit of {max_bytes}")
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise ValueError(f"{path.name}: more than the limit of {max_bytes} bytes")
    return parse_json_object(data, path.name, max_depth=max_depth)
