"""Rows of one request that follow one another: they share keys. Legend: R vectors, d numbers of each."""

from __future__ import annotations

from .jit import jit

# At most so many rows of a request share the keys that are gathered for them.
MOST_SHARING = 8


@jit
def run_length(queries, i, last):
    """How many rows from ``i`` on, before ``last``, are neighbours: of one request in one step, at consecutive
    positions."""
    n = 1
    while n < MOST_SHARING and i + n < last:
        same = queries[1, i + n] == queries[1, i] and queries[2, i + n] == queries[2, i]
        if not same or queries[0, i + n] != queries[0, i] + n:
            break
        n += 1
    return n


@jit
def across(rows, factor, columns):
    """``columns`` [d, >= R] of ``rows`` [R, d] times ``factor``; what lies behind column R is left alone."""
    for r in range(rows.shape[0]):
        for j in range(rows.shape[1]):
            columns[j, r] = rows[r, j] * factor
