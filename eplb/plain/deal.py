"""A first placement without a second copy on any GPU, in as many sorts as a GPU has slots.

Copies are laid out from the most loaded share down and dealt in waves of one slot a GPU; each wave gives its heaviest
copy to the GPU that is lightest so far. Copies of one expert are neighbours in that order, so within a wave they go to
different GPUs, and only the expert that straddles two waves can meet itself: in the second wave its copies go to the
lightest GPUs without one. An expert has at most one copy a GPU, so there always are enough.

Shapes: B rows, E experts, G GPUs, K slots of a GPU, P = G * K.
"""

from __future__ import annotations

import numpy as np


def deal(share: np.ndarray, count: np.ndarray, num_gpus: int) -> np.ndarray:
    """Experts of the slots, [B, G, K] int32, from ``share`` [B, E] (load of one copy) and ``count`` [B, E] copies.

    ``count`` must sum to the same P = G * K on every row, with no expert above G. Deterministic; ties go to the lowest
    expert and the lowest GPU.
    """
    num_rows = len(share)
    order = np.argsort(-share, axis=1, kind="stable")
    copies = np.repeat(order.ravel(), np.take_along_axis(count, order, 1).ravel()).reshape(num_rows, -1)
    pieces = np.take_along_axis(share, copies, 1).astype(np.int64)
    num_slots = copies.shape[1] // num_gpus
    slots = np.empty((num_rows, num_gpus, num_slots), np.int32)
    load = np.zeros((num_rows, num_gpus), np.int64)
    for wave in range(num_slots):
        here = slice(wave * num_gpus, (wave + 1) * num_gpus)
        lightest = np.argsort(load, axis=1, kind="stable")
        if wave:
            lightest = _past_holders(lightest, slots[:, :, wave - 1], copies[:, here])
        np.put_along_axis(slots[:, :, wave], lightest, copies[:, here].astype(np.int32), 1)
        added = np.empty_like(load)
        np.put_along_axis(added, lightest, pieces[:, here], 1)
        load = load + added
    return slots


def _past_holders(lightest: np.ndarray, last_wave: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """``lightest`` [B, G] reordered: first, for the copies of the wave's first expert, GPUs that do not hold it yet."""
    first = copies[:, :1]
    free = np.take_along_axis(last_wave != first, lightest, 1)
    taken = free & (free.cumsum(1) <= (copies == first).sum(1, keepdims=True))
    return np.take_along_axis(lightest, np.argsort(~taken, axis=1, kind="stable"), 1)
