"""Prompts and token sequences from the command line and from files, with errors that name the line.

A mistake in one line of prompts belongs to that request: the others run, and it comes back as a result with
``finish_reason="error"``. A file that cannot be read at all, or a bad line where every line is needed, is a
``ValueError``.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .request import SAMPLING_FIELDS, Request, RequestOutput, SamplingParams, check_token_ids, sampling_from_dict

MAX_FILE_BYTES = 1 << 30
MAX_REQUESTS = 1_000_000
MAX_ID_CHARS = 256
_REQUEST_KEYS = ("id", "prompt", "token_ids", "domain")

Encode = Callable[[str], tuple[int, ...]]
"""Text to prompt ids; raises ``ValueError`` where the checkpoint has no tokenizer."""


class Inputs(NamedTuple):
    """Requests to run, the results of those that could not become one, and the ids of all in the order given."""

    requests: tuple[Request, ...] = ()
    refused: tuple[RequestOutput, ...] = ()
    order: tuple[str, ...] = ()


def refused_output(request_id: str, error: str, prompt_ids: Sequence[int] = ()) -> RequestOutput:
    """The result of a request that cannot run."""
    return RequestOutput(request_id, tuple(prompt_ids), (), "", "error", error=error)


def requests_from_prompts(prompts: Sequence[str], base: SamplingParams, encode: Encode) -> Inputs:
    """One request a prompt, with ids ``"0"``, ``"1"``, ..."""
    return _collect([({"prompt": prompt}, f"prompt {i}") for i, prompt in enumerate(prompts)], base, encode)


def requests_from_file(path: str | pathlib.Path, base: SamplingParams, encode: Encode) -> Inputs:
    """One request a line of a JSON-lines file: ``prompt`` or ``token_ids``, optionally ``id`` and sampling fields.

    A ``domain`` is allowed and not read here: prompt sets carry it for whoever reports by domain.

    Without an ``id`` it is the number of the request, from 0; a line that repeats an id is refused, as ``id#number``.
    Fields a line does not give come from ``base``.
    Raises ``ValueError`` for a file that is too large or empty, ``OSError`` for one that cannot be opened.
    """
    return _collect(((line, f"{path} line {number}") for number, line in _lines(path)), base, encode)


def _collect(items: Iterable[tuple[dict[str, Any] | str, str]], base: SamplingParams, encode: Encode) -> Inputs:
    """Items are (fields or their JSON text, where they stand)."""
    requests: list[Request] = []
    refused: list[RequestOutput] = []
    seen: dict[str, None] = {}
    for arrival, (item, where) in enumerate(items):
        request_id = str(arrival)
        try:
            fields = _object(item) if isinstance(item, str) else item
            request_id = _request_id(fields, request_id)
            if request_id in seen:
                raise ValueError(f"the id {request_id!r} was used before")
            requests.append(_request(fields, request_id, arrival, base, encode))
        except ValueError as error:
            while request_id in seen:  # every result has an id of its own, which --resume knows it by
                request_id += f"#{arrival}"
            refused.append(refused_output(request_id, f"{where}: {error}"))
        seen[request_id] = None
    return Inputs(tuple(requests), tuple(refused), tuple(seen))


def _request(fields: dict[str, Any], request_id: str, arrival: int, base: SamplingParams, encode: Encode) -> Request:
    unknown = sorted(set(fields) - {*_REQUEST_KEYS, *SAMPLING_FIELDS})
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; known: {', '.join((*_REQUEST_KEYS, *SAMPLING_FIELDS))}")
    if ("prompt" in fields) == ("token_ids" in fields):
        raise ValueError("give either prompt or token_ids")
    params = sampling_from_dict({k: v for k, v in fields.items() if k in SAMPLING_FIELDS}, base)
    if "prompt" in fields:
        if not isinstance(fields["prompt"], str):
            raise ValueError(f"prompt is a {type(fields['prompt']).__name__}, not a text")
        prompt_ids = encode(fields["prompt"])
    else:
        prompt_ids = _token_ids(fields["token_ids"])
    return Request(request_id, prompt_ids, params, arrival)


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"token_ids is a {type(value).__name__}, not a list")
    return tuple(value)


def _request_id(fields: dict[str, Any], default: str) -> str:
    value = fields.get("id", default)
    if type(value) is int:
        value = str(value)
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARS:
        raise ValueError(f"id is {str(value)[:40]!r}; allowed: a number or a text of 1 to {MAX_ID_CHARS} characters")
    if any(0xD800 <= ord(char) <= 0xDFFF for char in value):  # no file could name it in a result
        raise ValueError(f"id is {value[:40]!r}, which is no valid Unicode")
    return value


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is expected, this is a {type(value).__name__}")
    return value


def _lines(path: str | pathlib.Path) -> Iterator[tuple[int, str]]:
    """Line numbers from 1 and texts of the lines that are not blank."""
    path = pathlib.Path(path)
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are read")
    found = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            found += 1
            if found > MAX_REQUESTS:
                raise ValueError(f"{path} has more than {MAX_REQUESTS} lines; split it")
            yield number, raw.decode("utf-8", errors="surrogateescape")
    if not found:
        raise ValueError(f"{path} has no lines")


def check_output(option: str, path: str, inputs: Iterable[str]) -> None:
    """Raise ``ValueError`` if ``path``, given as ``option``, is no place for a file or one of the ``inputs``.

    Meant for before the long work, not after it.
    """
    target = pathlib.Path(path)
    if not path or target.is_dir():
        raise ValueError(f"{option} {path!r} is a folder, or nothing; give the name of a file")
    if not target.resolve().parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {target.resolve().parent}")
    if target.exists() and any(pathlib.Path(source).exists() and target.samefile(source) for source in inputs):
        raise ValueError(f"{option} {path} is also an input, which would be lost; give another name")


def sequences_from_file(path: str | pathlib.Path, vocab_size: int, max_length: int) -> list[list[int]]:
    """Sequences to score: ``token_ids`` of the lines of a ``.jsonl``, or ``input_ids`` [B, L] of a ``.safetensors``.

    Raises ``ValueError`` naming the line or row for anything else, an id outside the vocabulary, an empty sequence or
    one longer than ``max_length``.
    """
    path = pathlib.Path(path)
    if path.suffix == ".safetensors":
        named = [(f"{path} row {i}", row) for i, row in enumerate(_safetensors_rows(path))]
    elif path.suffix == ".jsonl":
        named = [(f"{path} line {number}", _sequence(line, f"{path} line {number}")) for number, line in _lines(path)]
    else:
        raise ValueError(f"{path} ends in {path.suffix!r}; score reads .jsonl or .safetensors")
    for name, sequence in named:
        if not 1 <= len(sequence) <= max_length:
            raise ValueError(f"{name}: {len(sequence)} tokens; allowed: 1 to {max_length}, the context limit")
        check_token_ids(name, sequence, vocab_size)
    return [sequence for _, sequence in named]


def _sequence(line: str, where: str) -> list[int]:
    try:
        fields = _object(line)
        if "token_ids" not in fields:
            raise ValueError(f"no token_ids among its keys {sorted(fields)}")
        return list(_token_ids(fields["token_ids"]))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _safetensors_rows(path: pathlib.Path) -> list[list[int]]:
    import safetensors

    try:
        with safetensors.safe_open(path, "np") as file:
            if "input_ids" not in file.keys():  # noqa: SIM118 (the reader is no mapping)
                raise ValueError(f"{path} has no tensor input_ids, only {sorted(file.keys())[:8]}")
            ids = file.get_tensor("input_ids")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from None
    if ids.ndim != 2 or ids.dtype != "int64":
        raise ValueError(f"input_ids of {path} is {ids.dtype} {list(ids.shape)}; int64 [B, L] is expected")
    if not len(ids):
        raise ValueError(f"input_ids of {path} is {list(ids.shape)}: it has no rows")
    return ids.tolist()
