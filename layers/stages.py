"""Layers as generators that yield where a collective is in flight, and how two of them are interleaved.

A block is written once. What a yield is good for depends on the step: a :class:`StagePlan` names the points at which
two half batches take turns, and how many stages the first is ahead.
"""

from __future__ import annotations

import enum
from collections.abc import Generator
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Point(enum.Enum):
    """Where a layer yields: after attention's projections, with attention's sum in flight, after routing, with rows on
    their way to experts, with sums on their way back, and when those are complete."""

    PREPARED = "prepared"
    SUMMING = "summing"
    ROUTED = "routed"
    SENT = "sent"
    RETURNING = "returning"
    RETURNED = "returned"


Stages = Generator[Point, None, T]


class StagePlan(NamedTuple):
    """``points``: where a stage ends. ``lag``: stages that the first half is ahead of the second."""

    points: frozenset[Point]
    lag: int


def stage_plan(has_prefill: bool, sums: bool) -> StagePlan:
    """The plan of a step. ``sums``: whether attention's sum travels.

    With prefill a layer is two stages, each ending with rows in flight; without it is five, and the first half is two
    ahead, so that its rows travel while the second half attends.
    """
    points = {Point.SENT, Point.RETURNING}
    if not has_prefill:
        points |= {Point.PREPARED, Point.ROUTED, Point.RETURNED}
    if sums:
        points.add(Point.SUMMING)
    return StagePlan(frozenset(points), 0 if has_prefill else 2)


def drain(stages: Stages[T]) -> T:
    """Run stages one after the other, without overlap, and return their result."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            return end.value


class _Half:
    """One of two interleaved generators."""

    def __init__(self, stages: Stages[T], points: frozenset[Point]) -> None:
        self._stages, self._points = stages, points
        self.result, self.is_done = None, False

    def advance(self) -> None:
        """Run one stage."""
        try:
            while next(self._stages) not in self._points:
                pass
        except StopIteration as end:
            self.result, self.is_done = end.value, True


def interleave(first: Stages[T], second: Stages[T], plan: StagePlan) -> tuple[T, T]:
    """Run both in turns, a stage each, ``first`` by ``plan.lag`` stages ahead; their results.

    The order depends on the plan alone, so all ranks run their collectives alike.
    """
    halves = _Half(first, plan.points), _Half(second, plan.points)
    for _ in range(plan.lag):
        halves[0].advance()
    while not all(half.is_done for half in halves):
        for half in halves:
            if not half.is_done:
                half.advance()
    return halves[0].result, halves[1].result
