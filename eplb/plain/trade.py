"""Moves of the plain core that change more than one pair of loads at a time: trades of copies, shakes and kicks.

Shapes: B rows, E experts, G GPUs, K slots of a GPU, P = G * K.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..rows import NEVER, Rows
from ..schedule import draw_kick, draw_shake


def swap(rows: Rows, row: np.ndarray, g: np.ndarray, i: np.ndarray, h: np.ndarray, j: np.ndarray) -> None:
    """Exchange slot ``i`` of GPU ``g`` with slot ``j`` of GPU ``h`` on each listed row; no GPU is listed twice."""
    x, y = rows.slot[row, g, i], rows.slot[row, h, j]
    a, b = rows.piece[row, g, i], rows.piece[row, h, j]
    rows.slot[row, g, i], rows.slot[row, h, j] = y, x
    rows.piece[row, g, i], rows.piece[row, h, j] = b, a
    rows.load[row, g] += b - a
    rows.load[row, h] += a - b


class _Hosts(NamedTuple):
    """Of every expert's GPUs, per row: the fullest one's slot [B, E], its load, and the load of the next."""

    slot: np.ndarray
    first: np.ndarray
    second: np.ndarray


def _hosts(rows: Rows) -> _Hosts:
    num_rows, num_experts = rows.weight.shape
    num_slots = rows.slot[0].size
    expert = (rows.slot.reshape(num_rows, -1) + np.arange(num_rows)[:, None] * num_experts).ravel()
    load = np.repeat(rows.load.ravel(), rows.slot.shape[2])
    place = np.tile(np.arange(num_slots), num_rows)
    first = np.full(num_rows * num_experts, -1, np.int32)
    np.maximum.at(first, expert, load)
    slot = np.full(num_rows * num_experts, num_slots, np.int64)
    fullest = load == first[expert]
    np.minimum.at(slot, expert[fullest], place[fullest])
    second = np.full(num_rows * num_experts, -1, np.int32)
    others = place != slot[expert]
    np.maximum.at(second, expert[others], load[others])
    return _Hosts(*(array.reshape(num_rows, num_experts) for array in (slot, first, second)))


def trade(rows: Rows) -> np.ndarray:
    """On each row, the best change of one slot's expert that makes the fullest GPU lighter and none as full as it was.

    Either an expert x of the fullest GPU gains a copy in a slot elsewhere, whose expert y has other copies; or an
    expert y of the fullest GPU gives its slot there to an expert x. Returns which rows changed, [B] bool.
    """
    num_rows, num_gpus, num_slots = rows.slot.shape
    num_experts = rows.weight.shape[1]
    at = np.arange(num_rows)
    g = rows.load.argmax(1)
    top = rows.load[at, g]
    fewer = rows.weight // np.maximum(rows.count - 1, 1)
    more = rows.weight // (rows.count + 1)
    may_lose, may_gain = rows.count > 1, rows.count < num_gpus
    hosts = _hosts(rows)
    own = rows.slot[at, g]
    on_top = np.zeros((num_rows, num_experts), bool)
    np.put_along_axis(on_top, own, True, 1)

    # What the other hosts of a slot's expert come to if it loses that slot.
    flat = rows.slot.reshape(num_rows, -1)
    other = np.where(
        np.take_along_axis(hosts.slot, flat, 1) == np.arange(flat.shape[1]),
        np.take_along_axis(hosts.second, flat, 1),
        np.take_along_axis(hosts.first, flat, 1),
    )
    rise = np.take_along_axis(fewer - rows.share, flat, 1)
    after = np.where(np.take_along_axis(may_lose, flat, 1), other + rise, NEVER)
    elsewhere = np.where(np.take_along_axis(on_top, flat, 1), NEVER, after)

    mine = np.take_along_axis(more, own, 1)
    lighter = top[:, None] + mine - rows.piece[at, g]
    taken = (rows.load[:, :, None] - rows.piece).reshape(num_rows, 1, -1) + mine[:, :, None]
    gain = np.maximum(np.maximum(lighter[:, :, None], taken), elsewhere[:, None])
    gain[~np.take_along_axis(may_gain, own, 1)] = NEVER
    gain = gain.reshape(num_rows, num_slots, num_gpus, num_slots)
    row, gpu, place = np.nonzero(np.take_along_axis(on_top, flat, 1).reshape(rows.slot.shape))
    # A GPU that holds x already takes no second copy, whatever the slot.
    gain[row, (own[row] == rows.slot[row, gpu, place][:, None]).argmax(1), gpu] = NEVER

    given = after.reshape(rows.slot.shape)[at, g]
    give = np.maximum(given[:, :, None], (top[:, None] - rows.piece[at, g])[:, :, None] + more[:, None])
    give = np.where((on_top | ~may_gain)[:, None], NEVER, give)

    gain, give = gain.reshape(num_rows, -1), give.reshape(num_rows, -1)
    best_gain, best_give = gain.argmin(1), give.argmin(1)
    gains = gain[at, best_gain] <= give[at, best_give]
    changed = np.where(gains, gain[at, best_gain], give[at, best_give]) < top
    own_slot, place = np.divmod(best_gain, num_gpus * num_slots)
    own_place, expert = np.divmod(best_give, num_experts)
    place = np.where(gains, place, g * num_slots + own_place)
    expert = np.where(gains, own[at, own_slot], expert)
    change_slot(rows, np.flatnonzero(changed), place[changed], expert[changed])
    return changed


def change_slot(rows: Rows, row: np.ndarray, place: np.ndarray, expert: np.ndarray) -> None:
    """Put ``expert`` into slot ``place`` (0..P-1) on each listed row, with every share and load that follows."""
    num_rows, num_gpus, num_slots = rows.slot.shape
    flat = rows.slot.reshape(num_rows, num_gpus * num_slots)
    loser = flat[row, place]
    flat[row, place] = expert
    rows.count[row, expert] += 1
    rows.count[row, loser] -= 1
    for who in (expert, loser):
        rows.share[row, who] = rows.weight[row, who] // rows.count[row, who]
    rows.piece[row] = np.take_along_axis(rows.share[row], flat[row], 1).reshape(-1, num_gpus, num_slots)
    rows.load[row] = rows.piece[row].sum(-1, dtype=np.int32)


def shake_limit(load: np.ndarray, room: int) -> np.ndarray:
    """Up to where a shake may fill a GPU, [B] int32 (see ``Effort``)."""
    mean = load.sum(1, dtype=np.int64) // load.shape[1]
    return (mean + np.maximum(mean // room, (load.max(1) - mean) * 4 // 5)).astype(np.int32)


def shake(rows: Rows, cycle: int, num_shakes: int, room: int) -> None:
    """Make the swaps that a hash draws wherever they leave both GPUs at or below the limit."""
    num_gpus, num_slots = rows.slot.shape[1:]
    limit = shake_limit(rows.load, room)[:, None]
    for one in range(num_shakes):
        g, i, h, j = draw_shake(cycle * num_shakes + one, num_gpus, num_slots)
        moved = rows.piece[:, g, i] - rows.piece[:, h, j]
        row, pair = np.nonzero((rows.load[:, g] - moved <= limit) & (rows.load[:, h] + moved <= limit))
        g, i, h, j = g[pair], i[pair], h[pair], j[pair]
        met = (rows.slot[row, h] == rows.slot[row, g, i][:, None]).any(1)
        met |= (rows.slot[row, g] == rows.slot[row, h, j][:, None]).any(1)
        free = ~met
        swap(rows, row[free], g[free], i[free], h[free], j[free])


def kick(rows: Rows, cycle: int) -> None:
    """On each row, give the first drawn slot that may change to the drawn expert of the fullest GPU."""
    at = np.arange(len(rows))[:, None]
    num_gpus, num_slots = rows.slot.shape[1:]
    place, own = draw_kick(cycle, num_gpus, num_slots)
    gains = rows.slot[at[:, 0], rows.load.argmax(1)][:, own]
    hosts = rows.slot[:, place // num_slots]
    loses = hosts[:, np.arange(len(place)), place % num_slots]
    legal = (rows.count[at, loses] > 1) & (rows.count[at, gains] < num_gpus)
    legal &= ~(hosts == gains[:, :, None]).any(2)
    first = legal.argmax(1)
    row = np.flatnonzero(legal.any(1))
    change_slot(rows, row, place[first[row]], gains[row, first[row]])
