"""Block verification: the whole block is judged jointly, which keeps at least as many drafts in expectation.

Source: Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444. Shapes as in ``verify.py``.

Let w_0 = 1 and w_k = min(w_{k-1}·p(x_k)/q(x_k), 1). The rule makes the probability that at least k drafts are kept,
given x_1..x_k, equal to w_k. Backwards: at k = ℓ the coin itself has that probability. For k < ℓ drafts x_1..x_{k+1}
are kept with probability Σ min(w_k·p, q) = w_k - r, where r = Σ max(w_k·p - q, 0); so, not having kept more, exactly k
must be kept with probability r / (1 - w_k + r), and the next token has the law max(w_k·p - q, 0) / r. The step from k+1
to k uses nothing about ℓ but that it is at least k+1, so a length that was chosen by looking at x_1..x_k only (see
``schedule.py``) leaves the rule exact.
"""

from __future__ import annotations

import numpy as np

from .rows import PackedRows
from .verdict import Verdict, make_verdict
from .verify import inverse_cdf, residual


def verify_blocks(
    rows: PackedRows,
    target_probs: np.ndarray,
    drafts: np.ndarray,
    accept_uniforms: np.ndarray,
    final_uniforms: np.ndarray,
    draft_probs: np.ndarray | None = None,
) -> Verdict:
    """Keep the longest prefix whose coin succeeds, whatever the coins before it did.

    Arguments as in :func:`~.verify.verify_tokens`; reads whole rows of p and q, not only the drafts' entries.
    """
    blocks = []
    requests = zip(rows.lens.tolist(), rows.first.tolist(), drafts.tolist(), accept_uniforms.tolist())
    for r, (length, first, block, coins) in enumerate(requests):
        p, q = target_probs[first : first + length + 1], None if draft_probs is None else draft_probs[r]
        weights = _joint_weights(p, q, block[:length])
        n, law = length, p[length]
        if length and not coins[length - 1] < weights[length]:
            n, law = _longest_kept(p, q, block[:length], weights, coins)
        blocks.append([*block[:n], inverse_cdf(law, p[n], final_uniforms.item(r))])
    return make_verdict(rows.lens, blocks, rows.gamma)


def _joint_weights(p: np.ndarray, q: np.ndarray | None, drafts: list[int]) -> list[float]:
    """w_0..w_ℓ."""
    weights = [1.0]
    for k, x in enumerate(drafts):
        drawn_with = 1.0 if q is None else q.item(k, x)
        assert drawn_with > 0, f"draft {k + 1} is token {x}, which its law never draws"
        weights.append(min(weights[-1] * p.item(k, x) / drawn_with, 1.0))
    return weights


def _longest_kept(
    p: np.ndarray, q: np.ndarray | None, drafts: list[int], weights: list[float], coins: list[float]
) -> tuple[int, np.ndarray]:
    """The number of drafts kept when not all are, by the coins of places ℓ-1..1, and the law behind them."""
    for k in range(len(drafts) - 1, -1, -1):
        law = residual(p[k], None if q is None else q[k], drafts[k], weights[k])
        mass = float(law.sum())
        # Without room, w = 1 and p = q at the next place: keeping k or more is certain. So it is for k = 0.
        room = 1.0 - weights[k] + mass
        if k == 0 or room <= 0.0 or coins[k - 1] < mass / room:
            return k, law
    raise AssertionError("place 0 is always kept")
