"""The one shape of YAML that TensorRT-LLM's load balancer reads, without a YAML library.

    num_slots: 8
    layer_updates_per_iter: 0
    initial_global_assignments:
      3: [0, 1, 2, 3, 4, 5, 6, 7]

Lists may also be written one ``- item`` a line, or run over several lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_KEY = re.compile(r"^(\s*)(['\"]?)([A-Za-z_]\w*|\d+)\2:\s*(.*)$")


def write_trt(slots: Iterable[Sequence[int]], layers: Iterable[int]) -> str:
    """The file for a map that stays as it is (no updates while it runs)."""
    rows = [list(row) for row in slots]
    lines = [f"num_slots: {len(rows[0])}", "layer_updates_per_iter: 0", "initial_global_assignments:"]
    lines += [f"  {layer}: [{', '.join(map(str, row))}]" for layer, row in zip(layers, rows)]
    return "\n".join(lines) + "\n"


def parse_trt(text: str, what: str) -> tuple[int, dict[int, list[int]]]:
    """``num_slots`` and the experts of every layer's slots. Raises ``ValueError`` naming the line."""
    num_slots: int | None = None
    assignments: dict[int, list[int]] = {}
    inside, layer, opened = False, None, False
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#", 1)[0].rstrip()
        where = f"{what}, line {number}"
        if not line.strip() or line.strip() == "---":
            continue
        key = _KEY.match(line)
        if opened or key is None:
            if layer is None:
                raise ValueError(f"{where}: {line.strip()!r} belongs to no layer")
            opened = _items(line.strip(), assignments[layer], opened, where)
            continue
        indent, _, name, value = key.groups()
        if not indent:
            inside, layer = name == "initial_global_assignments", None
            if name == "num_slots":
                num_slots = _whole(value, where)
            elif name not in ("layer_updates_per_iter", "initial_global_assignments"):
                raise ValueError(f"{where}: unknown key {name!r}")
        elif inside and name.isdigit():
            layer = int(name)
            if layer in assignments:
                raise ValueError(f"{where}: layer {layer} comes twice")
            assignments[layer] = []
            opened = _items(value, assignments[layer], False, where) if value else False
        else:
            raise ValueError(f"{where}: {name!r} is no layer of initial_global_assignments")
    if opened:
        raise ValueError(f"{what} ends inside a list")
    if num_slots is None:
        raise ValueError(f"{what} has no num_slots")
    return num_slots, assignments


def _items(text: str, found: list[int], opened: bool, where: str) -> bool:
    """Add the numbers of one line; whether its list goes on in the next one."""
    if not opened and text.startswith("- "):
        found.append(_whole(text[2:], where))
        return False
    if not opened:
        if not text.startswith("["):
            raise ValueError(f"{where}: {text!r} is no list")
        text = text[1:]
    closed = text.endswith("]")
    body = text[:-1] if closed else text
    found += [_whole(item, where) for item in body.split(",") if item.strip()]
    return not closed


def _whole(text: str, where: str) -> int:
    text = text.strip()
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"{where}: {text!r} is no whole number")
    return int(text)
