"""Expert placement: plans, bounds, loads, files, moves, splits of tokens over copies. Plans and files need only numpy.

``plan`` and ``rebalance_experts`` place experts, ``replan`` moves a live placement, ``upper_bounds`` says what is
possible, ``ReplicaSplit`` chooses copies batch by batch, ``LoadRecorder`` counts. ``python -m dspark.eplb`` does the
same with files.
"""

from .balance import plan, rebalance_experts
from .bounds import smallest_redundancy, upper_bounds
from .dispatch import ReplicaSplit
from .loads import LoadRecorder
from .placement import Placement
from .replan import replan
from .shape import Shape

__all__ = [
    "LoadRecorder",
    "Placement",
    "ReplicaSplit",
    "Shape",
    "plan",
    "rebalance_experts",
    "replan",
    "smallest_redundancy",
    "upper_bounds",
]
