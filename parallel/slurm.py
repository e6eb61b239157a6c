"""Slurm's compressed lists, as text to values. Pure."""

from __future__ import annotations

import itertools
import math
import re

# Far above any real job; a typo such as [1-9999999999] must not fill the memory.
_MAX_HOSTS = 1 << 17


def expand_hosts(nodelist: str) -> list[str]:
    """``"a[01-03,7],b2"`` to ``["a01", "a02", "a03", "a7", "b2"]``: Slurm's host list, in its order.

    Several brackets in one name multiply, last one fastest. Raises ``ValueError`` for text that is no such list.
    """
    hosts: list[str] = []
    for entry in _split_outside_brackets(nodelist):
        parts = [_expand_part(part, nodelist) for part in re.split(r"(\[[^\[\]]*\])", entry) if part]
        if not parts or len(hosts) + math.prod(map(len, parts)) > _MAX_HOSTS:
            raise ValueError(f"the node list {nodelist!r} has an empty name or more than {_MAX_HOSTS} hosts")
        hosts += ["".join(pieces) for pieces in itertools.product(*parts)]
    return hosts


def _split_outside_brackets(nodelist: str) -> list[str]:
    entries, depth = [""], 0
    for char in nodelist.strip():
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise ValueError(f"the node list {nodelist!r} has unbalanced brackets")
        if char == "," and depth == 0:
            entries.append("")
        else:
            entries[-1] += char
    if depth:
        raise ValueError(f"the node list {nodelist!r} has unbalanced brackets")
    return entries


def _expand_part(part: str, nodelist: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    names: list[str] = []
    for item in part[1:-1].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None:
            raise ValueError(f"the node list {nodelist!r} has the range {item!r}; expected numbers like 3 or 01-16")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= _MAX_HOSTS:
            raise ValueError(f"the node list {nodelist!r} has the range {item!r}, which descends or is too long")
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return names


def expand_counts(counts: str) -> list[int]:
    """``"8(x2),4"`` to ``[8, 8, 4]``: Slurm's tasks per node. Raises ``ValueError`` for other text."""
    values: list[int] = []
    for item in counts.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise ValueError(f"the tasks per node {counts!r} have the item {item!r}; expected 4 or 8(x2)")
        repeat = int(match[2] or 1)
        if len(values) + repeat > _MAX_HOSTS:
            raise ValueError(f"the tasks per node {counts!r} describe more than {_MAX_HOSTS} nodes")
        values += [int(match[1])] * repeat
    return values
