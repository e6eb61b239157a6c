"""The plain core, in numpy: always there, and what the compiled core is held to."""

from ..baseline import flat_greedy
from .copies import spread_copies
from .deal import deal
from .pairs import search as search_copies
from .search import refine
from .split import level_out

__all__ = ["deal", "flat_greedy", "level_out", "refine", "search_copies", "spread_copies"]
