"""Experts kept even while requests run: where they start, what is recorded, and how they move."""

from .keeper import ExpertKeeper as ExpertKeeper
from .keeper import make_keeper as make_keeper
from .placement import ExpertLinks as ExpertLinks
from .placement import ExpertPlacements as ExpertPlacements
from .placement import PlacedExperts as PlacedExperts
from .placement import expert_links as expert_links
from .placement import expert_placements as expert_placements
