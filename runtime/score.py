"""Logits of given tokens: the same forward as decoding, over chunks of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .agreement import split_rows
from .engine import Engine
from .step import Span, Step, build_step


def score(
    engine: Engine,
    sequences: Sequence[Sequence[int]],
    chunks: Sequence[int] | None,
    on_logits: Callable[[int, int, torch.Tensor], None],
) -> None:
    """Run every sequence through the model and hand over the logits of all its tokens. Collective.

    ``chunks``: tokens of successive steps, the last repeated; None for whole sequences. As many sequences as the
    engine may run share a step, each with its own chunk. ``on_logits(index, start, logits)`` gets float32 [T, V] for
    tokens ``start .. start + T`` of sequence ``index``, in order of ``start``. Sequences must be valid and fit the
    context.
    """
    cache = engine.cache
    for first in range(0, len(sequences), cache.num_free_slots):
        batch = range(first, min(first + cache.num_free_slots, len(sequences)))
        slots = {index: cache.acquire() for index in batch}
        try:
            for index in batch:
                if not cache.reserve(slots[index], len(sequences[index])):
                    raise ValueError(f"sequence {index} of {len(sequences[index])} tokens does not fit the cache")
            _run(engine, {index: sequences[index] for index in batch}, slots, chunks, on_logits)
        finally:
            for slot in slots.values():
                cache.release(slot)


def _run(engine: Engine, sequences: dict[int, Sequence[int]], slots, chunks, on_logits) -> None:
    longest = max(len(tokens) for tokens in sequences.values())
    start, turn = 0, 0
    while start < longest:
        size = longest if chunks is None else chunks[min(turn, len(chunks) - 1)]
        running = {index: tokens[start : start + size] for index, tokens in sequences.items() if start < len(tokens)}
        spans = [Span(slots[index], start, tokens, len(tokens)) for index, tokens in running.items()]
        logits = engine.logits(_step(engine, spans))
        at = 0
        for index, tokens in running.items():
            on_logits(index, start, logits[at : at + len(tokens)])
            at += len(tokens)
        start, turn = start + size, turn + 1


def _step(engine: Engine, spans: list[Span]) -> Step:
    """The step of ``spans``, which every DP rank runs and context parallelism splits."""
    groups, lengths = engine.groups, [len(span.tokens) for span in spans]
    split = split_rows(lengths, engine.config.cp_split, groups, replicate=False)
    rows = [sum(lengths)] if split is None else [len(owned) for owned in split.owned]
    counts = tuple(rows * (groups.attn_rows.size // len(rows)))
    ring = engine.config.cp_keys == "ring"
    vocab_size, ratios = engine.model.config.vocab_size, engine.cache.layout.ratios
    return build_step(spans, engine.cache.page_table, ratios, vocab_size, split=split, counts=counts, pass_keys=ring)
