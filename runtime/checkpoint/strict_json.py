"""JSON from files that nobody vouches for: size, nesting, numbers and duplicate keys are checked, not believed."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any, NoReturn

MAX_DIGITS = 30
MAX_DEPTH = 16
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))


def parse_json_object(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in ``data``; ``what`` names it in errors.

    Raises ``ValueError`` on anything but one object of UTF-8 text, on a key that occurs twice in an object, on over
    :data:`MAX_DEPTH` levels, on endless integers, and on ``NaN`` and ``Infinity``, which are not JSON.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise ValueError(f"{what}: duplicate key {key!r:.100}")
                seen.add(key)
        return result

    def bounded_int(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise ValueError(f"{what}: an integer of {len(digits)} digits")
        return int(digits)

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{what}: {name} is not a JSON number")

    # Converting endless digits takes quadratic time; files without any are spared a call for each number.
    parse_int = bounded_int if _LONG_NUMBER.search(data) else None
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant, parse_int=parse_int)
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}: not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{what}: not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{what}: nested deeper than {MAX_DEPTH} levels") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what}: expected an object, found {type(value).__name__}")
    _check_depth(value, what)
    return value


def _check_depth(value: dict[str, Any], what: str) -> None:
    """Level by level, since printing or comparing what the parser could still nest would overflow the stack."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        parts = (part.values() if isinstance(part, dict) else part for part in level)
        level = [inner for part in parts for inner in part if isinstance(inner, (dict, list))]
        if not level:
            return
    raise ValueError(f"{what}: nested deeper than {MAX_DEPTH} levels")


def read_json_object(path: pathlib.Path, *, max_bytes: int) -> dict[str, Any]:
    """The JSON object in the file ``path`` of at most ``max_bytes`` bytes.

    Raises ``ValueError`` when the file is absent, unreadable or too large, and as :func:`parse_json_object` does.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise ValueError(f"{path.name}: more than the limit of {max_bytes} bytes")
    return parse_json_object(data, path.name)
