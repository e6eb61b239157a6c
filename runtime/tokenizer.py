"""Text to token ids and back, from a checkpoint's ``tokenizer.json``."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable

import tokenizers

MAX_FILE_BYTES = 256 << 20


class Tokenizer:
    """A ``tokenizer.json`` with the two things the model adds: its beginning-of-sequence id, and bytes of a token."""

    def __init__(self, backend: tokenizers.Tokenizer, bos_token_id: int | None) -> None:
        self.backend, self.bos_token_id = backend, bos_token_id
        state = json.loads(backend.to_str())
        self.special_ids = frozenset(token["id"] for token in state["added_tokens"] if token["special"])
        self.is_byte_level = (state.get("decoder") or {}).get("type") == "ByteLevel"
        self._byte_of_char = _byte_level_alphabet()

    @classmethod
    def load(cls, folder: str | pathlib.Path, bos_token_id: int | None) -> Tokenizer:
        """The tokenizer of the checkpoint in ``folder``; ``ValueError`` if its file is absent or broken."""
        path = pathlib.Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json, so it takes token ids only, no text and no stop strings")
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ValueError(f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are read")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every malformed file
            raise ValueError(f"{path} is not a tokenizer file: {error}") from error
        return cls(backend, bos_token_id)

    def encode(self, text: str) -> tuple[int, ...]:
        """The ids of a prompt: beginning-of-sequence first, unless the text already starts with it.

        Special tokens written out in the text (``<|user|>``) become their ids. Raises ``ValueError`` for text that is
        no Unicode (lone surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt is no valid Unicode at character {error.start}") from None
        ids = tuple(self.backend.encode(text).ids)
        if self.bos_token_id is None or ids[:1] == (self.bos_token_id,):
            return ids
        return (self.bos_token_id, *ids)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids`` at once; incomplete UTF-8 becomes U+FFFD."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token of a byte-level vocabulary stands for; empty for an id without a token."""
        assert self.is_byte_level
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(self._byte_of_char[char] for char in token)
        except KeyError:  # a token added by name, whose characters are meant as they are
            return token.encode("utf-8")


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies, inverted.

    Printable Latin-1 characters stand for themselves; the other 68 bytes, in order, are U+0100 onwards.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(plain))
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
