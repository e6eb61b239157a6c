"""One forward's worth of tokens, flattened, and how it is built from what the scheduler asks for.

Legend: K token rows of the attention DP rank, T of them on this rank (all, unless context parallelism splits them),
N rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..comm.context import RowGather, whole
from ..layers.attention.plan import AttentionPlan, Branches, RingRows, Run, build_plan, to_device
from ..layers.attention.ring import build_ring_plan
from ..parallel.groups import Group
from .spec.tree import DraftTree


class Span(NamedTuple):
    """Consecutive tokens of one request in a step: a prefill chunk, one decoded token, or a block to verify.

    ``slot``: the request's cache slot. ``start``: absolute position of the first token. ``num_logits``: of how many of
    the last tokens logits are wanted. ``tree``: whose nodes the tokens are, where they do not follow one another.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    num_logits: int
    tree: DraftTree | None = None


class Split(NamedTuple):
    """How context parallelism cuts a step: the places that each rank of ``group`` holds, in its order."""

    group: Group
    owned: Sequence[np.ndarray]


class Step(NamedTuple):
    """``tokens`` int64 [T]; ``logit_rows`` int64, the rows here whose logits are wanted, or None for all; ``plan``:
    where each row sits; ``gather_logit_rows``: brings the wanted rows of all context-parallel ranks together
    [N, ...], in order.

    ``num_logits``: N. ``counts``: rows of every row owner of the tp group, in order; ``has_prefill``: whether any rank
    prefills; ``is_split``: whether context parallelism splits the rows; ``longest``: tokens of the longest span.
    """

    tokens: torch.Tensor
    logit_rows: torch.Tensor | None
    plan: AttentionPlan
    counts: tuple[int, ...]
    has_prefill: bool
    gather_logit_rows: Callable[[torch.Tensor], torch.Tensor]
    num_logits: int
    is_split: bool = False
    longest: int = 1


def build_step(
    spans: Sequence[Span],
    page_table: torch.Tensor,
    ratios: tuple[int, ...],
    vocab_size: int,
    *,
    split: Split | None = None,
    counts: tuple[int, ...] | None = None,
    has_prefill: bool = True,
    pass_keys: bool = False,
) -> Step:
    """The step of ``spans``, on the page table's device.

    ``counts`` may be left out when one owner has all rows, ``has_prefill`` where rows are many. ``pass_keys``: keys of
    split rows are passed from rank to rank, not brought together. Raises ``ValueError`` for a token id outside
    ``[0, vocab_size)``; requests are checked before they come here.
    """
    rows, tokens, wanted, branches = _flatten(spans)
    if tokens.shape[0] and not (tokens.min() >= 0 and tokens.max() < vocab_size):
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise ValueError(f"token id {bad} is outside the vocabulary of {vocab_size}")
    device = page_table.device
    logit_rows, gather_logit_rows = wanted, whole
    if split is None:
        plan = build_plan(rows, page_table, ratios, branches=branches)
    else:
        owned = split.owned[split.group.rank]
        gather = RowGather(split.group, split.owned, device)
        plan = build_plan(rows, page_table, ratios, owned=owned, gather=gather, branches=branches)
        if pass_keys:
            plan = plan._replace(ring=_ring_rows(spans, split, plan))
        tokens = tokens[owned]
        logit_rows, places = _split_wanted(wanted, split)
        gather_logit_rows = RowGather(split.group, places, device)
    token_ids, at = to_device([tokens, logit_rows], device)
    at = None if len(logit_rows) == len(tokens) and split is None else at
    counts = (len(tokens),) if counts is None else counts
    longest = max((len(span.tokens) for span in spans), default=0)
    return Step(token_ids, at, plan, counts, has_prefill, gather_logit_rows, len(wanted), split is not None, longest)


def _ring_rows(spans: Sequence[Span], split: Split, plan: AttentionPlan) -> RingRows:
    group, device = split.group, plan.page_table.device
    lengths, starts = [len(span.tokens) for span in spans], [span.start for span in spans]
    ring = build_ring_plan(split.owned, group.rank, lengths, device, past_lengths=starts)
    rows = tuple(plan.token_rows[torch.from_numpy(tokens).to(device)] for tokens in split.owned)
    nowhere = slice(0, 0)
    past = tuple(
        None if piece is None else Run(span.slot, 0, span.start, nowhere, nowhere, False)
        for span, piece in zip(spans, ring.past)
    )
    return RingRows(group, ring, rows, past)


class Flat(NamedTuple):
    """The fields of ``Rows`` int64 [5, K], the tokens [K], the rows whose logits are wanted [N], and trees by slot."""

    rows: np.ndarray
    tokens: np.ndarray
    wanted: np.ndarray
    branches: dict[int, Branches]


def _flatten(spans: Sequence[Span]) -> Flat:
    num_rows = sum(len(span.tokens) for span in spans)
    rows, tokens = np.empty((5, num_rows), np.int64), np.empty(num_rows, np.int64)
    wanted, branches = [np.empty(0, np.int64)], {}
    at = 0
    for span in spans:
        length = len(span.tokens)
        stop = at + length
        if span.tree is None:
            rows[0, at:stop] = np.arange(span.start, span.start + length)
        else:
            rows[0, at:stop] = span.start + span.tree.depths
            branches[span.slot] = Branches(at, span.tree.sees)
        rows[1, at:stop] = span.slot
        rows[2, at:stop] = span.start
        rows[3, at:stop] = rows[0, at:stop].max(initial=span.start - 1) + 1
        tokens[at:stop] = span.tokens
        if span.num_logits:
            wanted.append(np.arange(stop - span.num_logits, stop))
        at = stop
    rows[4] = np.arange(num_rows)
    return Flat(rows, tokens, np.concatenate(wanted), branches)


def _split_wanted(wanted: np.ndarray, split: Split) -> tuple[np.ndarray, list[np.ndarray]]:
    """This rank's rows whose logits are wanted, and for each rank the places of its rows among all wanted rows."""
    here, places = np.empty(0, np.int64), []
    for rank, owned in enumerate(split.owned):
        held = np.flatnonzero(np.isin(owned, wanted))
        places.append(np.searchsorted(wanted, owned[held]))
        if rank == split.group.rank:
            here = held
    return here, places
