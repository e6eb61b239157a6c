"""Whether to go on drafting, or not drafting, without asking in every step."""

from __future__ import annotations

from collections.abc import Callable, Hashable

ASKED_EVERY = 8
"""Steps until it is asked again whether drafting pays, while it does."""

TRY_SHARE, MAX_PATIENCE = 0.01, 512
"""While drafting does not pay, it is tried now and then to see whether it does by now: so seldom that this costs at
most this share of the time, and half as often whenever it did not, down to once in so many steps."""

MAX_DOUBLINGS = 9
"""2 to this power is ``MAX_PATIENCE``."""


class Habit:
    """Asks again in a step of another shape, every few steps while it drafts, and after a try."""

    def __init__(self) -> None:
        self.is_trying = False
        """Whether the step drafts only to see whether that pays by now."""
        self._shape: Hashable = None
        self._drafts, self._steps = True, 0  # the last answer, and steps since then
        self._undrafted, self._patience, self._failed = 0, 0, 0  # steps since the last try, the most of them, and tries

    def goes_on(self, shape: Hashable, pays: Callable[[], bool], cost_of_try: Callable[[], float]) -> bool:
        """Whether the next step, of some ``shape``, drafts. ``pays`` says whether that is expected to pay,
        ``cost_of_try`` what a try costs in steps that do not draft."""
        if shape != self._shape or self.is_trying or (self._drafts and self._steps >= ASKED_EVERY):
            self._ask(shape, pays, cost_of_try)
        self._steps += 1
        self._undrafted += not self._drafts
        self.is_trying = self._undrafted > self._patience
        if self.is_trying:
            self._undrafted, self._failed = 0, min(self._failed + 1, MAX_DOUBLINGS)
        return self._drafts or self.is_trying

    def _ask(self, shape: Hashable, pays: Callable[[], bool], cost_of_try: Callable[[], float]) -> None:
        self._shape, self._steps, self._drafts = shape, 0, pays()
        if self._drafts:
            self._undrafted, self._failed, self._patience = 0, 0, 0
        else:
            wait = max(cost_of_try(), 0.0) / TRY_SHARE * 2**self._failed
            self._patience = int(min(wait, MAX_PATIENCE))
