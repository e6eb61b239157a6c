"""Laws by which made-up tokens choose experts, and how likely they are to need one rank or one node.

Legend: E experts, k experts a token, P slots (copies of experts, P = E without redundant ones), T tokens, B blocks of
slots. Slot s holds expert s % E; a token takes any copy of an expert with equal chance.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import numpy as np

LAWS = ("uniform", "skewed", "group_limited")


@dataclass(frozen=True)
class RoutingLaw:
    """How a token chooses ``top_k`` different experts of ``num_experts``, and then one copy of each.

    - ``uniform``: every set of experts is equally likely.
    - ``skewed``: one after the other, expert of rank i with weight ``(i + 1) ** -skew`` among those left; ranks are
      dealt to experts by ``seed``.
    - ``group_limited``: first ``top_groups`` of ``num_groups`` equal runs of experts, then experts inside them.

    ``num_slots`` copies in all. Raises ``ValueError`` naming the numbers that do not fit.
    """

    num_experts: int
    top_k: int
    name: str = "uniform"
    num_slots: int = 0
    skew: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in LAWS:
            raise ValueError(f"routing law {self.name!r}; there are {', '.join(LAWS)}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"top-k {self.top_k} of {self.num_experts} experts; it must be from 1 to {self.num_experts}"
            )
        if self.num_slots == 0:
            object.__setattr__(self, "num_slots", self.num_experts)
        if self.num_slots < self.num_experts:
            raise ValueError(f"{self.num_slots} slots cannot hold {self.num_experts} experts")
        if self.name != "group_limited":
            object.__setattr__(self, "num_groups", 1)
            object.__setattr__(self, "top_groups", 1)
        if self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_experts} experts do not divide into {self.num_groups} groups")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"{self.top_groups} groups a token of {self.num_groups}; it must be from 1 to that")
        if self.top_k > self.top_groups * self.group_size:
            raise ValueError(
                f"top-k {self.top_k} is more than the {self.top_groups * self.group_size} experts in "
                f"{self.top_groups} groups of {self.group_size}"
            )

    @property
    def group_size(self) -> int:
        """Experts of one group."""
        return self.num_experts // self.num_groups

    @property
    def num_copies(self) -> np.ndarray:
        """Copies of each expert, [E] int64."""
        return np.bincount(np.arange(self.num_slots) % self.num_experts, minlength=self.num_experts)

    def draw(self, num_tokens: int, rng: np.random.Generator) -> np.ndarray:
        """The slots of ``num_tokens`` tokens, [T, k] int64."""
        if self.name == "skewed":
            weights = (np.arange(self.num_experts) + 1.0) ** -self.skew
            np.random.default_rng(self.seed).shuffle(weights)
            experts = _distinct(num_tokens, self.top_k, self.num_experts, rng, weights)
        else:
            groups = _distinct(num_tokens, self.top_groups, self.num_groups, rng)
            inside = _distinct(num_tokens, self.top_k, self.top_groups * self.group_size, rng)
            which, place = np.divmod(inside, self.group_size)
            experts = np.take_along_axis(groups, which, 1) * self.group_size + place
        if self.num_slots == self.num_experts:
            return experts
        return experts + self.num_experts * rng.integers(0, self.num_copies[experts])

    def touch(self, num_blocks: int) -> np.ndarray | None:
        """The chance that a token needs each of ``num_blocks`` equal runs of slots, [B] float64; None if skewed.

        A token misses a block with the mean, over its possible sets of experts, of the product over the set of the
        shares of copies that lie elsewhere. Sums of such products over all sets of k are elementary symmetric
        polynomials, built here group by group.
        """
        if self.name == "skewed":
            return None
        block = np.arange(self.num_slots) // (self.num_slots // num_blocks)
        here = np.zeros((num_blocks, self.num_experts))
        np.add.at(here, (block, np.arange(self.num_slots) % self.num_experts), 1.0)
        elsewhere = (1.0 - here / self.num_copies).reshape(num_blocks, self.num_groups, self.group_size)
        sets = np.zeros((num_blocks, self.top_groups + 1, self.top_k + 1))
        sets[:, 0, 0] = 1.0
        for group in range(self.num_groups):
            ways = np.zeros((num_blocks, self.top_k + 1))
            ways[:, 0] = 1.0
            for expert in range(self.group_size):
                ways[:, 1:] += ways[:, :-1] * elsewhere[:, group, expert, None]
            for chosen in range(self.top_groups, 0, -1):
                for degree in range(self.top_k + 1):
                    sets[:, chosen, degree:] += sets[:, chosen - 1, : self.top_k + 1 - degree] * ways[:, degree, None]
        all_sets = comb(self.num_groups, self.top_groups) * comb(self.top_groups * self.group_size, self.top_k)
        return 1.0 - sets[:, -1, -1] / all_sets


def _distinct(
    num_rows: int, num: int, bound: int, rng: np.random.Generator, weights: np.ndarray | None = None
) -> np.ndarray:
    """``num`` different numbers below ``bound`` in every row, drawn one after the other; repeats are drawn again."""
    edges = None if weights is None else np.cumsum(weights) / weights.sum()
    rows = np.empty((num_rows, num), np.int64)
    for column in range(num):
        again = np.arange(num_rows)
        while again.size:
            fresh = rng.random(again.size)
            drawn = (fresh * bound).astype(np.int64) if edges is None else np.searchsorted(edges, fresh, side="right")
            rows[again, column] = np.minimum(drawn, bound - 1)
            again = again[(rows[again, :column] == rows[again, column, None]).any(1)]
    return rows
