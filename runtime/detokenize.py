"""Text as tokens arrive: whole characters only, and nothing that a stop string may still take back.

The cost of a token does not depend on how much text came before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from .request import SamplingParams
from .tokenizer import Tokenizer


class StreamDecoder(Protocol):
    """Turns one request's tokens into text, token by token."""

    def push(self, token_id: int) -> str:
        """The characters that ``token_id`` completes."""
        ...

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character."""
        ...


class ByteDecoder:
    """For byte-level vocabularies: bytes of a token through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """See :class:`StreamDecoder`."""
        return "" if token_id in self._skipped else self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """See :class:`StreamDecoder`."""
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For every other vocabulary: decodes the last few tokens again and gives what was added.

    Text depends on neighbouring tokens (spaces, byte fallback), so a window that starts at an earlier token is decoded
    with and without the new one. A window that ends in half a character waits, for at most ``MAX_WAIT`` tokens.
    """

    MAX_WAIT = 8

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        self._shown: list[int] = []
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        """See :class:`StreamDecoder`."""
        self._waiting.append(token_id)
        added = self._added()
        if not added or (added.endswith("\ufffd") and len(self._waiting) < self.MAX_WAIT):
            return ""
        self._shown, self._waiting = self._waiting, []
        return added

    def finish(self) -> str:
        """See :class:`StreamDecoder`."""
        added = self._added()
        self._shown, self._waiting = self._waiting, []
        return added

    def _added(self) -> str:
        return self._decode(self._shown + self._waiting)[len(self._decode(self._shown)) :]


class Stop(NamedTuple):
    """A stop string was completed: the characters before ``start`` (an absolute offset) are the text."""

    start: int


class StopMatcher:
    """Finds the first completed of several stop strings in a text that arrives in pieces.

    Several that end at the same character: the longest. Knuth-Morris-Pratt, so each character is looked at once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._tables = tuple(_failure_table(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._offset = 0

    def push(self, text: str) -> Stop | None:
        """Look at the next characters; a :class:`Stop` at the first completion (later characters are not read)."""
        if not self._stops:
            return None
        for char in text:
            self._offset += 1
            longest = 0
            for i, (stop, table) in enumerate(zip(self._stops, self._tables)):
                length = self._matched[i]
                while length and stop[length] != char:
                    length = table[length - 1]
                length += stop[length] == char
                self._matched[i] = length
                if length == len(stop):
                    longest = max(longest, length)
            if longest:
                return Stop(self._offset - longest)
        return None

    @property
    def num_held(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return max(self._matched, default=0)


def _failure_table(pattern: str) -> tuple[int, ...]:
    """For each prefix of ``pattern`` the length of its longest proper border."""
    table, length = [0] * len(pattern), 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        length += pattern[i] == pattern[length]
        table[i] = length
    return tuple(table)


class _TextState:
    """One request: its decoder and matcher, characters not shown yet, and how many were shown."""

    def __init__(self, decoder: StreamDecoder, stops: Sequence[str]) -> None:
        self.decoder, self.matcher = decoder, StopMatcher(stops)
        self.pending, self.num_taken, self.stopped = "", 0, False

    def append(self, text: str) -> bool:
        """Add decoded text; whether a stop string was completed, which is then cut away and ends the request."""
        assert not self.stopped, "text after a stop string"
        self.pending += text
        stop = self.matcher.push(text)
        if stop is not None:
            self.pending, self.stopped = self.pending[: stop.start - self.num_taken], True
        return self.stopped

    def take(self, *, everything: bool) -> str:
        shown = len(self.pending) - (0 if everything or self.stopped else self.matcher.num_held)
        text, self.pending = self.pending[:shown], self.pending[shown:]
        self.num_taken += shown
        return text


class TextTracker:
    """The text of every running request; decides where stop strings end one. Lives on the deciding rank only.

    ``tokenizer=None`` (a checkpoint without one) gives empty text; stop strings are then a ``ValueError``.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, _TextState] = {}

    def add(self, request_id: str, params: SamplingParams) -> None:
        """Start a request. Raises ``ValueError`` for stop strings without a tokenizer."""
        assert request_id not in self._states, f"request {request_id!r} was added twice"
        if self._tokenizer is None:
            if params.stop:
                raise ValueError(f"request {request_id!r}: stop strings need a checkpoint with a tokenizer.json")
            return
        kind = ByteDecoder if self._tokenizer.is_byte_level else WindowDecoder
        decoder = kind(self._tokenizer, params.skip_special_tokens)
        self._states[request_id] = _TextState(decoder, params.stop)

    def push(self, request_id: str, token_ids: Iterable[int]) -> int | None:
        """Add emitted tokens, in order.

        Returns ``None``, or how many of them are kept because the last kept one completed a stop string: the tokens
        after it were never emitted.
        """
        state = self._states.get(request_id)
        if state is None:
            return None
        for count, token_id in enumerate(token_ids, start=1):
            if state.append(state.decoder.push(token_id)):
                return count
        return None

    def take(self, request_id: str, *, finished: bool) -> str:
        """The characters that became certain since the last call; with ``finished`` all that is left, and forget it."""
        state = self._states.get(request_id)
        if state is None:
            return ""
        if not finished:
            return state.take(everything=False)
        del self._states[request_id]
        if not state.stopped:
            state.append(state.decoder.finish())
        return state.take(everything=True)
