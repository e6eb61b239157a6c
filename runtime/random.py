"""One counter-based random generator for everything that samples.

A number is a pure function of (seed, request key, position, purpose): it needs no state, so a run repeats whatever
else shares the batch, however a block is cut, and wherever it is computed. The purposes never share a counter, which
keeps draft noise, acceptance coins and target draws independent; speculative decoding is only lossless if they are.

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
# Row 0 belongs to counter word 0 and its multiplier, row 1 to counter word 2.
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
# Round r uses key + r * Weyl constant, mod 2^32, for both key words: [rounds, 2, 1].
_WEYL = (np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)) & _LOW


class Purpose(enum.IntEnum):
    """What a number decides; each purpose is a stream of its own."""

    TARGET = 0
    """A token drawn from the target's law: plain sampling, the bonus token, the residual after a rejection."""
    DRAFT = 1
    """A token proposed by a draft."""
    ACCEPT = 2
    """Whether a drafted token is accepted."""


def philox4x32(counter: NDArray[np.uint32], key: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The Philox4x32-10 block function of N counters: ``counter`` [4, N], ``key`` [2, N], result [4, N], all uint32."""
    even = counter[0::2].astype(np.uint64)
    odd = counter[1::2].astype(np.uint64)
    keys = (key.astype(np.uint64)[None] + _WEYL) & _LOW
    for round_key in keys:
        product = even * _MULTIPLIERS
        even = (product >> _SHIFT)[::-1] ^ odd ^ round_key
        odd = (product & _LOW)[::-1]
    out = np.empty((4, even.shape[1]), dtype=np.uint32)
    out[0::2], out[1::2] = even, odd
    return out


def uniforms(
    seeds: ArrayLike, request_keys: ArrayLike, positions: ArrayLike, purpose: Purpose, places: ArrayLike = 0
) -> NDArray[np.float64]:
    """N independent numbers in [0, 1), float64 with 53 random bits.

    Args:
        seeds: [N] 64-bit seeds; the Philox key.
        request_keys: [N] 64-bit keys of the requests (``request.random_key``).
        positions: [N] absolute positions of the tokens that are decided, below 2^32.
        purpose: the stream.
        places: [N] place in a block that starts at the position, below 2^24; 0 for a single token.

    The counter is (position, purpose and place, low and high word of the request key).
    """
    seed, request = np.asarray(seeds, dtype=np.uint64), np.asarray(request_keys, dtype=np.uint64)
    position = np.asarray(positions, dtype=np.uint64)
    assert position.ndim == 1 and not (position >> _SHIFT).any(), "positions are [N] and below 2^32"
    counter = np.empty((4, position.size), dtype=np.uint32)
    counter[0], counter[1] = position, int(purpose) + (np.asarray(places, dtype=np.uint32) << np.uint32(8))
    counter[2], counter[3] = request & _LOW, request >> _SHIFT
    key = np.empty((2, position.size), dtype=np.uint32)
    key[0], key[1] = seed & _LOW, seed >> _SHIFT
    word = philox4x32(counter, key).astype(np.uint64)
    # The high 27 bits of one word above the high 26 of the next: 53 bits, as many as a double holds.
    bits = ((word[0] >> np.uint64(5)) << np.uint64(26)) | (word[1] >> np.uint64(6))
    return bits * 2.0**-53
