"""From raw confidence logits to the probability that a draft survives verification.

Shapes: R requests, γ drafts a block; numpy on the host, float64, because lengths are decided there.

The confidence head reads the hidden state at k and the token at k-1, so c_k is a function of x_0..x_{k-1}: it must not
depend on x_k itself (paper section 3.2.1). Everything lossless about scheduling rests on that; a head that is fed x_k
makes the admission of x_k depend on x_k, and then even early stopping changes the output law.
"""

from __future__ import annotations

import numpy as np


def conditional(logits: np.ndarray, temperatures: np.ndarray | None = None) -> np.ndarray:
    """c_k [R, γ]: the estimated probability that draft k is kept when the drafts before it are.

    ``logits`` [R, γ] raw confidence logits, ``temperatures`` [γ] from STS (``None``: 1).
    """
    scaled = np.asarray(logits, dtype=np.float64)
    if temperatures is not None:
        scaled = scaled / temperatures
    # tanh form of the logistic function: exact at the ends, no overflow.
    return 0.5 * (1.0 + np.tanh(0.5 * scaled))


def survival(c: np.ndarray) -> np.ndarray:
    """a_{r,j} [R, γ] = Π_{i<=j} c_{r,i}: the estimated probability that drafts 1..j are all kept; falls along a block.

    Values outside [0, 1] are clipped; NaN counts as 0, so nothing behind a broken confidence is verified.
    """
    return np.multiply.accumulate(np.fmin(np.fmax(c, 0.0), 1.0), axis=1)


def threshold_lens(c: np.ndarray, threshold: float) -> np.ndarray:
    """[R] int64: the drafts before the first one whose confidence c_k is below ``threshold`` (0 keeps all)."""
    return np.logical_and.accumulate(c >= threshold, axis=1).sum(axis=1, dtype=np.int64)
