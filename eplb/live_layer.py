"""One layer of a live placement while it is improved, and the changes that may improve it.

Loads are in units of the mean load of a GPU. Shapes: E experts, G GPUs, K slots of a GPU, P = G * K.
"""

from __future__ import annotations

import numpy as np

from .placement import Placement
from .plain.copies import spread_copies

Change = tuple[tuple[int, int], ...]
"""Slots and the experts that they get."""

# GPUs are penalised by the square of what they hold above this.
REST = 0.97
# How many of the best changes by estimate are weighed exactly.
WEIGHED = 6
DONORS = 24


class LiveLayer:
    """Loads, copies and hosts of one layer; ``moved`` counts its (GPU, expert) pairs that the start did not have."""

    def __init__(self, load: np.ndarray, start: Placement, layer: int) -> None:
        shape = start.shape
        self.load, self.shape = load, shape
        self.slot = start.slots[layer].astype(np.int64)
        self.host = np.repeat(np.arange(shape.num_gpus), shape.slots_per_gpu)
        self.count = start.counts[layer].copy()
        self.on = np.zeros((shape.num_gpus, shape.num_experts), bool)
        self.on[self.host, self.slot] = True
        self.had = self.on.copy()
        self.allowed = np.ones_like(self.on)
        if shape.hierarchical:
            # An expert may only go where its group lives.
            lives = self.had.reshape(shape.num_nodes, shape.gpus_per_node, -1).any(1)
            self.allowed = np.repeat(lives, shape.gpus_per_node, axis=0)
        self._fair: float | None = None
        self._refresh()

    def _refresh(self) -> None:
        self.share = self.load / self.count
        self.gpu_load = np.bincount(self.host, self.share[self.slot], self.shape.num_gpus)
        self.top = float(self.gpu_load.max())
        self.moved = int((self.on & ~self.had).sum())

    def apply(self, change: Change) -> None:
        """Put experts into slots."""
        for place, expert in change:
            self.count[self.slot[place]] -= 1
            self.count[expert] += 1
            self.slot[place] = expert
        self.on[:] = False
        self.on[self.host, self.slot] = True
        self._refresh()

    def after(self, change: Change) -> tuple[float, float]:
        """The penalty of all GPUs and the load of the fullest one after a change."""
        slot, count = self.slot.copy(), self.count.copy()
        for place, expert in change:
            count[slot[place]] -= 1
            count[expert] += 1
            slot[place] = expert
        gpu_load = np.bincount(self.host, (self.load / count)[slot], self.shape.num_gpus)
        return float(_penalty(gpu_load).sum()), float(gpu_load.max())

    def evener_copies(self, uneven: float) -> Change | None:
        """A copy for the expert with the largest share if that exceeds ``uneven`` times the largest it need be.

        It comes from an expert whose share stays below that too, in the slot where it leaves the loads most even.
        ``None`` where no expert needs or can spare one.
        """
        if self._fair is None:
            self._fair = self._fair_share()
        x = int(self.share.argmax())
        limit = uneven * self._fair
        fewer = self.load / np.maximum(self.count - 1, 1)
        spare = (self.count > 1) & (fewer <= limit)
        places = np.flatnonzero(spare[self.slot] & ~self.on[self.host, x] & self.allowed[self.host, x])
        if self.share[x] <= limit or not places.size:
            return None
        places = places[np.argsort(fewer[self.slot[places]], kind="stable")[:DONORS]]
        changes = [((int(place), x),) for place in places]
        return min(changes, key=lambda change: self.after(change)[0])

    def _fair_share(self) -> float:
        """The largest share under the best copies; per node where groups are pinned to nodes."""
        shape = self.shape.node_shape() if self.shape.hierarchical else self.shape
        nodes = self.shape.num_nodes if self.shape.hierarchical else 1
        lives = self.allowed[:: self.shape.gpus_per_node][:nodes]
        own = np.stack([self.load[lives[node]] for node in range(nodes)]) if nodes > 1 else self.load[None]
        most = max(shape.num_gpus, -(-shape.num_slots // shape.num_experts))
        return float((own / spread_copies(own, shape.num_slots, most)).max())

    def lighter_top(self) -> Change | None:
        """The change of the fullest GPU that lowers the penalty most per moved expert and leaves no GPU as full.

        Swaps come first; only where none helps, an expert there gains a copy elsewhere or gives one up.
        """
        g = int(self.gpu_load.argmax())
        before = float(_penalty(self.gpu_load).sum())
        for kind in (self._swaps, self._new_experts):
            best, worth = None, 0.0
            for change, price in kind(g):
                penalty, top = self.after(change)
                if top < self.top - 1e-12 and (before - penalty) / price > worth + 1e-12:
                    best, worth = change, (before - penalty) / price
            if best is not None:
                return best
        return None

    def _price(self, gpu: np.ndarray | int, comes: np.ndarray, goes: np.ndarray) -> np.ndarray:
        """Experts moved by a slot's change: one that was not there counts 1, one that goes again counts it back."""
        return (~self.had[gpu, comes]).astype(np.int64) - ~self.had[gpu, goes]

    def _swaps(self, g: int) -> list[tuple[Change, float]]:
        mine = np.flatnonzero(self.host == g)
        x, y, h = self.slot[mine][:, None], self.slot[None], self.host[None]
        moved = self.share[x] - self.share[y]
        lowered = _penalty(self.gpu_load[g] - moved) + _penalty(self.gpu_load[h] + moved)
        lowered -= _penalty(self.gpu_load[g]) + _penalty(self.gpu_load[h])
        legal = (moved > 0) & ~self.on[h, x] & ~self.on[g, y] & self.allowed[h, x] & self.allowed[g, y]
        price = np.maximum(self._price(h, x, y) + self._price(g, y, x), 0.5)
        found = _lowest(np.where(legal, lowered / price, np.inf))
        return [
            (((int(mine[i]), int(self.slot[p])), (int(p), int(self.slot[mine[i]]))), float(price[i, p]))
            for i, p in found
        ]

    def _new_experts(self, g: int) -> list[tuple[Change, float]]:
        mine = self.slot[self.host == g]
        anyone = np.arange(self.shape.num_experts)
        gains = self._one_slot(mine, np.flatnonzero(self.host != g))
        return gains + self._one_slot(anyone, np.flatnonzero(self.host == g))

    def _one_slot(self, experts: np.ndarray, places: np.ndarray) -> list[tuple[Change, float]]:
        """Changes of one of ``places`` to one of ``experts``."""
        load, host, num_experts = self.gpu_load, self.host, self.shape.num_experts
        fewer = self.load / np.maximum(self.count - 1, 1)
        more = self.load / (self.count + 1)
        now = _penalty(load)
        # What the hosts of an expert gain in penalty when it loses a copy, and lose when it gets one more.
        rise = _penalty(load[host] + (fewer - self.share)[self.slot]) - now[host]
        drop = _penalty(load[host] + (more - self.share)[self.slot]) - now[host]
        loses, gains = (np.bincount(self.slot, change, num_experts) for change in (rise, drop))
        y, h, x = self.slot[places][None], host[places][None], experts[:, None]
        here = _penalty(load[h] - self.share[y] + more[x]) - now[h]
        lowered = gains[x] + loses[y] - rise[places] + here
        legal = ~self.on[h, x] & self.allowed[h, x] & (self.count[y] > 1) & (self.count[x] < self.shape.num_gpus)
        price = np.maximum(self._price(h, x, y), 0.5)
        found = _lowest(np.where(legal, lowered / price, np.inf))
        return [(((int(places[p]), int(experts[i])),), float(price[i, p])) for i, p in found]


def _penalty(load: np.ndarray) -> np.ndarray:
    return np.maximum(load - REST, 0) ** 2


def _lowest(value: np.ndarray) -> list[tuple[int, int]]:
    """Where the lowest negative entries are, the first of equal ones first."""
    flat = value.ravel()
    few = np.argsort(flat, kind="stable")[:WEIGHED]
    return [divmod(int(n), value.shape[1]) for n in few if flat[n] < -1e-12]
