"""Verification of draft trees: greedy, and exact rejection sampling over siblings.

Shapes: R requests, n nodes of a tree, T packed rows, V vocabulary, γ the longest path. p is the target's law behind a
node, after temperature and filters.

Sampled: the walk starts at the anchor and tries a node's children in order. A child x is kept with probability p(x) and
the walk goes on there; else p(x) becomes 0, p is normalised, and the next child is tried. What is left of p when no
child was kept gives the last token. Every child was chosen with certainty, by what stood before the anchor alone: its
law has one point, so p without x is the residual max(p - q, 0) of rejection sampling, and the emitted law is p whatever
the children are (Miao et al., arXiv 2305.09781; Li et al., arXiv 2406.16858). Had children been drawn, a tree of the
likeliest of them would be chosen by what was drawn, and that would not be exact.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...layers.kernels.rejection import draw
from .rows import PackedRows
from .tree import DraftTree
from .verdict import Verdict, make_verdict


def verify_greedy_trees(rows: PackedRows, target_ids: np.ndarray) -> Verdict:
    """Walk down from each anchor as long as there is a child with the target's choice, ``target_ids`` [T]."""
    ids, blocks = target_ids.tolist(), []
    for tree, first in zip(rows.trees, rows.first.tolist()):
        node, block = 0, []
        while node is not None:
            block.append(ids[first + node])
            node = tree.child(node, block[-1])
        blocks.append(block)
    return make_verdict(rows.lens, blocks, rows.gamma)


def verify_trees(rows: PackedRows, target_probs: Tensor, coins: np.ndarray, final_uniforms: Tensor) -> Verdict:
    """See above.

    Args:
        target_probs: p [T, V] float64 on any device, rows with mass 1.
        coins: [R, N] in [0, 1), one for each child that is tried, in the order of the walk.
        final_uniforms: [R] float64 in [0, 1) on that device, for the last token; independent of the coins.
    """
    ends = [_walk(tree, chances, own) for tree, chances, own in zip(rows.trees, _chances(rows, target_probs), coins)]
    at = rows.first + np.array(ends, dtype=np.int64)
    law = target_probs[torch.from_numpy(at).to(target_probs.device)]
    rest = law.clone()
    for row, tree, node in zip(rest, rows.trees, ends):
        row[tree.tokens[tree.children[node]].tolist()] = 0.0
    law = torch.where(rest.sum(1, keepdim=True) > 0, rest, law)
    last = draw(law, final_uniforms).tolist()
    paths = [tree.tokens[tree.path(node)[1:]].tolist() for tree, node in zip(rows.trees, ends)]
    return make_verdict(rows.lens, [[*path, token] for path, token in zip(paths, last)], rows.gamma)


def _chances(rows: PackedRows, target_probs: Tensor) -> list[list[float]]:
    """Of each request, the probability [n] of every draft behind its parent; of the anchor, nothing that means
    anything."""
    judges = np.concatenate([first + np.maximum(tree.parents, 0) for tree, first in zip(rows.trees, rows.first)])
    tokens = np.concatenate([tree.tokens for tree in rows.trees])
    judges, tokens = (torch.from_numpy(x).to(target_probs.device) for x in (judges, tokens))
    chances = target_probs[judges, tokens].tolist()
    return [chances[first : first + n] for first, n in zip(rows.first.tolist(), (rows.lens + 1).tolist())]


def _walk(tree: DraftTree, chances: list[float], coins: np.ndarray) -> int:
    """The node at which the walk ends."""
    node, tried = 0, 0
    while True:
        left = 1.0
        for child in tree.children[node]:
            tried += 1
            if coins.item(tried - 1) * left < chances[child]:
                node = child
                break
            left -= chances[child]
        else:
            return node
