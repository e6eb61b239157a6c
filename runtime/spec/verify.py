"""Token-level verification: exact rejection sampling, and its greedy limit, over packed ragged blocks.

Shapes: R requests, γ drafts a block, T packed rows, V vocabulary. p is the law the target samples from (after
temperature and filters), q the law that a draft token was drawn from. Host arrays; the same on a device is in
``device_verify.py``. Here requests are taken one after the other: a step of few requests is all call overhead, and in a
step of many each row of p is still in the cache when it is needed again.

Why the output law is p: a draft x is kept with probability min(1, p(x) / q(x)), so x arrives by being kept with mass
min(p, q)(x); what is missing is p - min(p, q) = max(p - q, 0). Its total is the probability of a rejection, and it is
the law of the token drawn after one. This needs q to be the law that was sampled, bit for bit, and needs the draft's
noise, the coins and the last draw to be independent (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv
2302.01318).
"""

from __future__ import annotations

import numpy as np

from .rows import PackedRows
from .verdict import Verdict, make_verdict


def verify_greedy(rows: PackedRows, target_ids: np.ndarray, drafts: np.ndarray) -> Verdict:
    """Keep the longest prefix of drafts that equals the target's choices, then its choice behind it.

    ``target_ids`` [T] the target's argmax per row, ``drafts`` [R, γ] (any ids where not verified). What temperature 0
    makes of :func:`verify_tokens`, at the cost of integer comparisons only.
    """
    ids, blocks = target_ids.tolist(), []
    for length, first, block in zip(rows.lens.tolist(), rows.first.tolist(), drafts.tolist()):
        n = 0
        while n < length and block[n] == ids[first + n]:
            n += 1
        blocks.append(ids[first : first + n + 1])
    return make_verdict(rows.lens, blocks, rows.gamma)


def verify_tokens(
    rows: PackedRows,
    target_probs: np.ndarray,
    drafts: np.ndarray,
    accept_uniforms: np.ndarray,
    final_uniforms: np.ndarray,
    draft_probs: np.ndarray | None = None,
) -> Verdict:
    """Judge each draft by itself, left to right, and stop at the first rejection.

    Draft x_k is kept iff u_k·q(x_k) < p(x_k); behind a rejection the residual max(p - q, 0) is drawn from, behind ℓ
    kept drafts p itself (the bonus token). A request at temperature 0 has one-point rows of p and comes out greedy.

    Args:
        target_probs: p [T, V], rows with mass 1.
        drafts: [R, γ] int64, any ids where not verified.
        accept_uniforms: [R, γ] in [0, 1), the coins.
        final_uniforms: [R] float64 in [0, 1), for the last token; independent of the coins and of the draft's noise.
        draft_probs: q [R, γ, V]; ``None`` for greedy drafts, whose q has one point: kept with probability p(x).
    """
    blocks = []
    requests = zip(rows.lens.tolist(), rows.first.tolist(), drafts.tolist(), accept_uniforms.tolist())
    for r, (length, first, block, coins) in enumerate(requests):
        p, q = target_probs[first : first + length + 1], None if draft_probs is None else draft_probs[r]
        n = 0
        while n < length:
            x = block[n]
            if not coins[n] * (1.0 if q is None else q.item(n, x)) < p.item(n, x):
                break
            n += 1
        law = p[n] if n == length else residual(p[n], None if q is None else q[n], block[n])
        blocks.append([*block[:n], inverse_cdf(law, p[n], final_uniforms.item(r))])
    return make_verdict(rows.lens, blocks, rows.gamma)


def residual(p: np.ndarray, q: np.ndarray | None, x: int, weight: float = 1.0) -> np.ndarray:
    """max(w·p - q, 0) [V], not normalised, for the laws ``p`` and ``q`` [V] of the place where ``x`` was drafted.

    ``q=None`` has its one point at ``x``. ``weight`` w is 1 for token verification.
    """
    rest = p * weight
    if q is None:
        rest[x] = 0.0
        return rest
    rest -= q
    return np.maximum(rest, 0.0, out=rest)


def inverse_cdf(law: np.ndarray, stand_in: np.ndarray, uniform: float) -> int:
    """The first id whose cumulative mass exceeds u times the total, never one without mass.

    ``law`` [V] need not be normalised; if rounding has left it without mass, ``stand_in`` [V] is drawn from instead.
    """
    cumulative = law.cumsum(dtype=np.float64)
    if not cumulative[-1] > 0.0:
        cumulative = stand_in.cumsum(dtype=np.float64)
    return int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))
