"""The compiled core, imported only where numba is installed: the plain core's placements, bit for bit, sooner.

Modules mirror those of ``plain``.
"""

from .baseline import flat_greedy
from .pairs import search as search_copies
from .search import refine
from .split import level_out
from .start import deal, spread_copies

__all__ = ["deal", "flat_greedy", "level_out", "refine", "search_copies", "spread_copies"]
