"""Training text: files of documents, cut into token sequences that never cross a document.

A text file (``.txt``, ``.txt.gz``) holds documents that end in a line with the end-of-sequence token written out, such
as ``<|eos|>``. A ``.jsonl`` file holds one object a line: ``text``, or ``prompt`` and ``completion`` (then only the
completion is learned). Every sequence starts with the beginning-of-sequence id, because the target has seen no other.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..tokenizer import Tokenizer

MAX_FILE_BYTES = 4 << 30


class TextDocument(NamedTuple):
    """``prompt`` is context only; ``text`` is learned. ``complete``: the end-of-sequence token follows."""

    prompt: str
    text: str
    complete: bool = True


class TokenSequence(NamedTuple):
    """Token ids of one training sequence.

    ``first_label``: index of the first token that is learned (at least 1, behind the beginning-of-sequence id).
    ``source``: the file's stem. ``held_out``: kept for evaluation.
    """

    ids: np.ndarray
    first_label: int
    source: str
    held_out: bool


def source_name(path: str | pathlib.Path) -> str:
    """The file's name without ``.gz``, ``.txt``, ``.jsonl``: what results are reported under."""
    name = pathlib.Path(path).name
    for suffix in (".gz", ".txt", ".jsonl"):
        name = name.removesuffix(suffix)
    return name


def read_documents(path: str | pathlib.Path, eos_text: str) -> Iterator[TextDocument]:
    """The documents of one file, in order.

    Raises ``ValueError`` naming the file, and for JSON lines the line, of anything that is not training text.
    """
    path = pathlib.Path(path)
    name = path.name.removesuffix(".gz")
    if not path.is_file():
        raise ValueError(f"--text {path}: no such file")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"--text {path} has {path.stat().st_size} bytes; at most {MAX_FILE_BYTES} are read")
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as stream:
        if name.endswith(".jsonl"):
            yield from _json_documents(stream, path)
        elif name.endswith(".txt"):
            yield from (TextDocument("", part) for part in _split(stream.read(), eos_text))
        else:
            raise ValueError(f"--text {path}: expected a .txt, .txt.gz, .jsonl or .jsonl.gz file")


def _split(text: str, eos_text: str) -> Iterator[str]:
    """Parts between separator lines; a newline on either side of the separator belongs to it."""
    for part in text.split(eos_text):
        part = part.removeprefix("\n").removesuffix("\n")
        if part.strip():
            yield part


def _json_documents(stream, path: pathlib.Path) -> Iterator[TextDocument]:
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} line {number}: not JSON ({error})") from None
        fields = value if isinstance(value, dict) else {}
        prompt, text = fields.get("prompt", ""), fields.get("text", fields.get("completion"))
        if not isinstance(prompt, str) or not isinstance(text, str):
            raise ValueError(f'{path} line {number}: needs "text", or "prompt" and "completion", as strings')
        yield TextDocument(prompt, text, bool(fields.get("complete", True)))


def is_held_out(document: TextDocument, share: float) -> bool:
    """Whether a document is kept for evaluation: decided by its text alone, so equal documents stay together."""
    digest = hashlib.blake2b((document.prompt + "\0" + document.text).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def cut(
    document: TextDocument, tokenizer: Tokenizer, eos_token_id: int, max_length: int, source: str, held_out: bool
) -> list[TokenSequence]:
    """The sequences of one document: pieces of at most ``max_length`` tokens, the first ids counted.

    Later pieces of a long document start in the middle of it, with the beginning-of-sequence id in front. Pieces with
    fewer than two tokens to learn are left out.
    """
    prompt = tokenizer.encode(document.prompt)
    bos = prompt[:1] if tokenizer.bos_token_id is not None else ()
    body = tokenizer.backend.encode(document.text).ids if document.text else []
    ids = [*prompt, *body, *((eos_token_id,) if document.complete else ())]
    first_label = max(len(prompt), 1)
    pieces, start = [], len(bos)
    while start < len(ids):
        piece = ids[start : start + max_length - len(bos)]
        label = max(first_label - start + len(bos), 1)
        if len(piece) + len(bos) - label >= 2:
            pieces.append(TokenSequence(np.array([*bos, *piece], np.int32), label, source, held_out))
        start += len(piece)
    return pieces


def load_sequences(
    paths: Sequence[str | pathlib.Path],
    tokenizer: Tokenizer,
    eos_token_id: int,
    *,
    max_length: int,
    held_out_share: float,
    max_tokens: int | None = None,
    seed: int = 0,
) -> list[TokenSequence]:
    """All training and held-out sequences of ``paths``.

    ``max_tokens`` limits each file; documents are then drawn in an order that depends on ``seed`` alone. Raises
    ``ValueError`` for unreadable files, and when either part of the split would be empty.
    """
    eos_text = tokenizer.backend.id_to_token(eos_token_id)
    result: list[TokenSequence] = []
    for path in paths:
        documents = list(read_documents(path, eos_text))
        order = np.random.default_rng(seed).permutation(len(documents)) if max_tokens else range(len(documents))
        num_tokens, source = 0, source_name(path)
        for index in order:
            document = documents[index]
            pieces = cut(document, tokenizer, eos_token_id, max_length, source, is_held_out(document, held_out_share))
            for piece in pieces:
                if max_tokens and num_tokens >= max_tokens:
                    break
                result.append(piece)
                num_tokens += len(piece.ids)
    for held_out, name in ((False, "training"), (True, "held-out")):
        if not any(sequence.held_out == held_out for sequence in result):
            raise ValueError(f"{len(result)} sequences of {len(paths)} files leave no {name} text")
    return result
