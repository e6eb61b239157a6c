"""From what each request runs to the steps of all ranks: one, or the two halves of one that take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..parallel.groups import Groups
from .agreement import Agreement, Shapes, split_rows
from .cache import Cache
from .engine_config import EngineConfig
from .overlap import Rule, find_cut, halve
from .step import Span, Split, Step, build_step


class Steps(NamedTuple):
    """``steps``: one, or two halves. ``in_pieces``: whether experts send back results while they compute others."""

    steps: tuple[Step, ...]
    shapes: Shapes
    in_pieces: bool


class StepMaker:
    """Builds steps for one engine on this rank."""

    def __init__(
        self, config: EngineConfig, groups: Groups, cache: Cache, agreement: Agreement, vocab_size: int
    ) -> None:
        self._config, self._groups, self._cache, self._agreement = config, groups, cache, agreement
        self._vocab_size = vocab_size
        self._rule = Rule(config.overlap, config.overlap_min_rows, groups.tp.size)

    def __call__(self, spans: Sequence[Span], num_requests: int, has_prefill: bool) -> Steps:
        """The step of ``spans`` with ``num_requests`` that get tokens. Collective over the row owners."""
        halves = halve(spans, find_cut([len(span.tokens) for span in spans], has_prefill))
        wholes = [spans, *(halves if self._rule.wants_halves else ())]
        splits = [self._split(part, has_prefill) for part in wholes]
        own = [_rows_here(part, split) for part, split in zip(wholes, splits)]
        shapes, *rows = self._agreement.shapes(own, num_requests, has_prefill)
        chosen = [(spans, splits[0], shapes.rows)]
        if rows and self._rule.in_halves(shapes.rows, *rows):
            chosen = list(zip(halves, splits[1:], rows))
        steps = tuple(self._build(*one, shapes.has_prefill) for one in chosen)
        return Steps(steps, shapes, self._rule.in_pieces(shapes.rows))

    def _split(self, spans: Sequence[Span], has_prefill: bool) -> Split | None:
        replicate = self._config.cp_decode == "replicate" and not has_prefill
        return split_rows([len(span.tokens) for span in spans], self._config.cp_split, self._groups, replicate)

    def _build(self, spans: Sequence[Span], split: Split | None, counts: tuple[int, ...], has_prefill: bool) -> Step:
        sizes = {"split": split, "counts": counts, "has_prefill": has_prefill}
        sizes["pass_keys"] = self._config.cp_keys == "ring"
        return build_step(spans, self._cache.page_table, self._cache.layout.ratios, self._vocab_size, **sizes)


def _rows_here(spans: Sequence[Span], split: Split | None) -> int:
    if split is None:
        return sum(len(span.tokens) for span in spans)
    return len(split.owned[split.group.rank])
