"""The prompts that benchmarks decode: built-in texts or a file, cut to one length so that they can share a batch."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

MAX_FILE_BYTES = 64 << 20

TEXTS = (
    "<|user|>Anna has 14 apples and gives 5 of them to Ben. Then she buys twice as many as she has left. How many "
    "apples does Anna have in the end?<|assistant|>",
    "def moving_average(values, width):\n    total = 0.0\n    window = []\n    for value in values:\n        "
    "window.append(value)\n        total += value\n        if len(window) > width:\n",
    "<|user|>Good morning! I would like to learn how to bake bread at home, but I have very little time in the "
    "evenings. Where should I begin?<|assistant|>",
    "In the evening the wind went down, and the people of the village came out of their houses to look at the river, "
    "which had risen in the night and carried away the old bridge.",
    "<|user|>A train leaves at 9 o'clock and travels 60 miles every hour. How many miles has it travelled when it is "
    "half past 12 and it has not stopped on the way?<|assistant|>",
    "class Inventory:\n    def __init__(self, items=None):\n        self.items = dict(items or {})\n\n    def add("
    "self, name, count=1):\n        self.items[name] = self.items.get(name, 0) + count\n\n    def remove(self):\n",
    "<|user|>Can you explain to me in simple words why the sky is blue during the day and turns red when the sun goes "
    "down?<|assistant|>",
    "And when the king heard the words of the messenger he rose up from his seat, and called the elders together, and "
    "asked them what they would do in his place, for he feared for the city.",
)


class Prompts(NamedTuple):
    """``ids``: prompts of any length; ``about``: where they are from."""

    ids: tuple[tuple[int, ...], ...]
    about: str

    def cut(self, num_prompts: int, num_tokens: int) -> list[list[int]]:
        """The first ``num_prompts`` prompts that are long enough, cut to ``num_tokens``.

        Raises ``ValueError`` naming both numbers if there are fewer.
        """
        enough = [list(ids[:num_tokens]) for ids in self.ids if len(ids) >= num_tokens]
        if len(enough) < num_prompts:
            lengths = sorted((len(ids) for ids in self.ids), reverse=True)
            most = f"at most {lengths[num_prompts - 1]}" if len(lengths) >= num_prompts else "more prompts"
            raise ValueError(
                f"a batch of {num_prompts} needs {num_prompts} prompts of {num_tokens} tokens, but {len(enough)} of "
                f"the {self.about} are that long; choose --prompt-tokens {most}, or a smaller --batch"
            )
        return enough[:num_prompts]

    def joined(self, num_tokens: int) -> list[int]:
        """All prompts one after the other, again and again, up to ``num_tokens`` tokens."""
        pool = np.concatenate([np.asarray(ids, np.int64) for ids in self.ids])
        return np.resize(pool, num_tokens).tolist()


def builtin_prompts(encode: Callable[[str], Sequence[int]] | None, vocab_size: int, num_random: int) -> Prompts:
    """The built-in texts; random ids (seed 0) for a checkpoint without a tokenizer (``encode`` is None)."""
    if encode is None:
        rows = np.random.default_rng(0).integers(0, vocab_size, (len(TEXTS), num_random))
        return Prompts(tuple(map(tuple, rows.tolist())), f"{len(TEXTS)} prompts of random ids")
    return Prompts(tuple(tuple(encode(text)) for text in TEXTS), f"{len(TEXTS)} built-in prompts")


def prompts_from_file(
    path: str | pathlib.Path, encode: Callable[[str], Sequence[int]] | None, vocab_size: int
) -> Prompts:
    """``prompt`` or ``token_ids`` of every line of a ``.jsonl``; other keys do not matter here.

    Raises ``ValueError`` naming the line for one without a prompt, an empty one or an id outside the vocabulary.
    """
    path = pathlib.Path(path)
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; at most {MAX_FILE_BYTES} are read")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                prompts.append(_prompt(line, encode, vocab_size))
            except ValueError as error:
                raise ValueError(f"{path} line {number}: {error}") from None
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return Prompts(tuple(prompts), f"{len(prompts)} prompts of {path.name}")


def _prompt(line: str, encode: Callable[[str], Sequence[int]] | None, vocab_size: int) -> tuple[int, ...]:
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("a JSON object is expected")
    if isinstance(fields.get("token_ids"), list):
        ids = fields["token_ids"]
    elif not isinstance(fields.get("prompt"), str):
        raise ValueError("neither a text prompt nor a list token_ids")
    elif encode is None:
        raise ValueError("the checkpoint has no tokenizer.json: give token_ids instead of a prompt")
    else:
        ids = encode(fields["prompt"])
    if not ids:
        raise ValueError("the prompt is empty")
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise ValueError(f"a token id is no integer below {vocab_size}")
    return tuple(ids)
