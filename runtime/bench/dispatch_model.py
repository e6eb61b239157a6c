"""What each way of dispatching moves, counted without processes: copies of tokens, bytes, buffers, predicted time.

Legend: N nodes of G ranks, R = N G ranks, T tokens a rank, k experts a token, H hidden width. Slots lie on ranks in
equal runs, ranks on nodes likewise. A copy is one row on its way to one receiver; a row that stays on its rank is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .routing_laws import RoutingLaw

FLAT, BY_RANK, STANDARD, NORMAL, LOW_LATENCY = "flat", "flat_by_rank", "standard", "normal", "low_latency"
MODES = (FLAT, BY_RANK, STANDARD, NORMAL, LOW_LATENCY)
BLOCK = 128  # numbers that share one fp8 scale
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1}


@dataclass(frozen=True)
class Cluster:
    """``num_nodes`` nodes of ``per_node`` ranks and their links: bytes a second of one rank each way, and seconds
    before the first byte of a hop arrives. Copies inside a node and across nodes use different links at once."""

    num_nodes: int
    per_node: int
    inside_speed: float = 160e9
    across_speed: float = 50e9
    latency: float = 5e-6

    @property
    def num_ranks(self) -> int:
        """R."""
        return self.num_nodes * self.per_node


@dataclass
class Hop:
    """Copies that one hop moves, by rank, [R] int64 each; ``kept`` rows that the hop leaves where they are."""

    num_ranks: int
    kept: int = 0
    sent_inside: np.ndarray = field(init=False)
    sent_across: np.ndarray = field(init=False)
    received_inside: np.ndarray = field(init=False)
    received_across: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        for name in ("sent_inside", "sent_across", "received_inside", "received_across"):
            setattr(self, name, np.zeros(self.num_ranks, np.int64))

    @property
    def inside(self) -> int:
        """Copies that stay in their node."""
        return int(self.sent_inside.sum())

    @property
    def across(self) -> int:
        """Copies that cross nodes."""
        return int(self.sent_across.sum())

    def add(self, source: int, counts: np.ndarray, per_node: int) -> None:
        """Count ``counts`` [R] rows from ``source`` straight to each rank."""
        first = source // per_node * per_node
        near = slice(first, first + per_node)
        self.kept += int(counts[source])
        self.sent_inside[source] += counts[near].sum() - counts[source]
        self.sent_across[source] += counts.sum() - counts[near].sum()
        remote = counts.copy()
        remote[near] = 0
        local = counts - remote
        local[source] = 0
        self.received_inside += local
        self.received_across += remote

    def fan_out(self, place: int, counts: np.ndarray, per_node: int) -> None:
        """Count ``counts`` [R] rows that reach each rank from the rank at ``place`` of its own node."""
        by_node = counts.reshape(-1, per_node)
        others = by_node.copy()
        others[:, place] = 0
        self.kept += int(by_node[:, place].sum())
        self.sent_inside[place::per_node] += others.sum(1)
        self.received_inside += others.reshape(-1)

    def seconds(self, cluster: Cluster, row_bytes: int) -> float:
        """The time of the busiest link, one way, if anything moves: every rank sends and receives at once."""
        if not (self.inside or self.across):
            return 0.0
        inside = max(self.sent_inside.max(), self.received_inside.max()) * row_bytes / cluster.inside_speed
        across = max(self.sent_across.max(), self.received_across.max()) * row_bytes / cluster.across_speed
        return cluster.latency + float(max(inside, across))


class Counts:
    """Copies of every mode, added up rank by rank from the slots of each rank's tokens."""

    def __init__(self, cluster: Cluster, num_slots: int) -> None:
        if num_slots % cluster.num_ranks:
            raise ValueError(
                f"{num_slots} slots (experts with copies) do not divide over {cluster.num_ranks} ranks; add redundant "
                f"ones up to {-(-num_slots // cluster.num_ranks) * cluster.num_ranks}, or take fewer ranks"
            )
        self.cluster, self.num_slots, self.num_tokens = cluster, num_slots, 0
        num_hops = {FLAT: 1, BY_RANK: 1, STANDARD: 1, NORMAL: 2, LOW_LATENCY: 1}
        self.hops = {mode: [Hop(cluster.num_ranks) for _ in range(num)] for mode, num in num_hops.items()}
        self.per_slot = np.zeros(num_slots, np.int64)
        self.per_rank = np.zeros(cluster.num_ranks, np.int64)

    def add(self, source: int, slots: np.ndarray) -> None:
        """Count the tokens of rank ``source``; ``slots`` [T, k], each of a row different, -1 for none."""
        num_ranks, per_node = self.cluster.num_ranks, self.cluster.per_node
        slots = np.sort(slots, axis=1)
        ranks = np.where(slots < 0, -1, slots // (self.num_slots // num_ranks))
        by_slot = np.bincount(ranks[ranks >= 0], minlength=num_ranks)
        by_rank = _different(ranks, num_ranks)
        by_node = _different(np.where(ranks < 0, -1, ranks // per_node), self.cluster.num_nodes)
        self.num_tokens += len(slots)
        self.per_slot += np.bincount(slots[slots >= 0], minlength=self.num_slots)
        self.per_rank += by_rank
        self.hops[FLAT][0].add(source, by_slot, per_node)
        self.hops[LOW_LATENCY][0].add(source, by_slot, per_node)
        self.hops[BY_RANK][0].add(source, by_rank, per_node)
        self.hops[STANDARD][0].add(source, np.full(num_ranks, len(slots)), per_node)
        place = source % per_node
        first = np.zeros(num_ranks, np.int64)
        first[place::per_node] = by_node  # to the rank in the same place of each node
        self.hops[NORMAL][0].add(source, first, per_node)
        self.hops[NORMAL][1].fan_out(place, by_rank, per_node)

    @classmethod
    def simulate(cls, cluster: Cluster, law: RoutingLaw, num_tokens: int, seed: int = 0) -> Counts:
        """The counts of ``num_tokens`` made-up tokens on every rank."""
        counts, rng = cls(cluster, law.num_slots), np.random.default_rng(seed)
        for source in range(cluster.num_ranks):
            counts.add(source, law.draw(num_tokens, rng))
        return counts


def _different(targets: np.ndarray, num_targets: int) -> np.ndarray:
    """How many rows of ``targets`` (sorted rows, -1 for none) have each target, however often: [num_targets]."""
    first = targets >= 0
    first[:, 1:] &= targets[:, 1:] != targets[:, :-1]
    return np.bincount(targets[first], minlength=num_targets)


def expected_copies(cluster: Cluster, law: RoutingLaw) -> dict[str, tuple[float, float]] | None:
    """Mean copies a token (across nodes, inside a node) by mode, exactly, with as many tokens on every rank.

    None where no formula is known (skewed routing).
    """
    nodes, ranks = law.touch(cluster.num_nodes), law.touch(cluster.num_ranks)
    if nodes is None or ranks is None:
        return None
    num_ranks, per_node, num_nodes = cluster.num_ranks, cluster.per_node, cluster.num_nodes
    far, near = (num_ranks - per_node) / num_ranks, (per_node - 1) / num_ranks
    by_slot = (law.top_k * far, law.top_k * near)
    return {
        FLAT: by_slot,
        BY_RANK: (float(ranks.sum()) * far, float(ranks.sum()) * near),
        STANDARD: (float(num_ranks - per_node), float(per_node - 1)),
        NORMAL: (float(nodes.sum()) * (num_nodes - 1) / num_nodes, float(ranks.sum()) * (per_node - 1) / per_node),
        LOW_LATENCY: by_slot,
    }


def row_bytes(hidden_size: int, dtype: str) -> int:
    """Bytes of one row; fp8 has a float32 scale for every 128 numbers. ``ValueError`` for a width without whole
    blocks."""
    if dtype == "fp8" and hidden_size % BLOCK:
        raise ValueError(f"hidden size {hidden_size} is no multiple of {BLOCK}, which fp8 scales need")
    return hidden_size * ITEM_BYTES[dtype] + (hidden_size // BLOCK * 4 if dtype == "fp8" else 0)


def message_bytes(mode: str, hidden_size: int, dtype: str, top_k: int, wire: str = "deep_ep") -> tuple[int, int]:
    """Bytes of one copy on the way out and back, in the formats of ``deep_ep`` or of this project's ``torch`` backend.

    Rows for several experts bring their k experts and weights along, 12 bytes each in deep_ep, 8 and another 4 in
    torch; low-latency messages have a header of 16 in deep_ep, none in torch. Only torch's low latency sends fp8, its
    other modes bfloat16 instead. Results come back in bfloat16, or in float32 if that is the dtype.
    """
    routed = 12 * top_k if wire == "deep_ep" else 8 * top_k + 4
    extra = {FLAT: 0, BY_RANK: routed, STANDARD: routed, NORMAL: routed, LOW_LATENCY: 16 if wire == "deep_ep" else 0}
    if wire == "torch" and mode != LOW_LATENCY and dtype == "fp8":
        dtype = "bfloat16"
    back = row_bytes(hidden_size, "float32" if dtype == "float32" else "bfloat16")
    return row_bytes(hidden_size, dtype) + extra[mode], back


def low_latency_buffer_bytes(max_tokens: int, hidden_size: int, num_experts: int) -> int:
    """Bytes of DeepEP's low-latency buffers on one rank, as its size hint counts them.

    Two sets each of sending, receiving and signal buffers, for the larger of both ways: out, a 16-byte header and a
    bfloat16 row (or fp8 with scales); back, a bfloat16 row and 4 bytes for every 128 numbers. Sending holds every
    expert's rows on the way back; signals are 4 bytes an expert, in steps of 128. Another 128 is added and the sum
    rounded down to a multiple of 128. The number of ranks does not matter: more of them have fewer experts each.
    """
    scales = hidden_size // BLOCK * 4
    out = 16 + max(2 * hidden_size, hidden_size + scales)
    back = 2 * hidden_size + scales
    sending = max(max_tokens * out, num_experts * max_tokens * back)
    receiving = num_experts * max_tokens * max(out, back)
    signals = -(-num_experts * 4 // 128) * 128
    return (2 * (sending + receiving + signals) + 128) // 128 * 128


def buffer_bytes(counts: Counts, mode: str, hidden_size: int, dtype: str, top_k: int, max_tokens: int) -> int:
    """Bytes that the fullest rank holds of rows received: fixed in low latency, else as many as came."""
    if mode == LOW_LATENCY:
        return low_latency_buffer_bytes(max_tokens, hidden_size, counts.num_slots)
    out, _ = message_bytes(mode, hidden_size, dtype, top_k)
    rows = sum((hop.received_inside + hop.received_across).max() for hop in counts.hops[mode])
    return int(rows) * out


def seconds(counts: Counts, mode: str, out_bytes: int, back_bytes: int) -> dict[str, float]:
    """Predicted seconds of dispatch and combine: hops one after the other, and hops that overlap (the slowest)."""
    ways = {}
    for way, size in (("dispatch", out_bytes), ("combine", back_bytes)):
        hops = [hop.seconds(counts.cluster, size) for hop in counts.hops[mode]]
        ways[way], ways[f"{way}_pipelined"] = sum(hops), max(hops)
    return ways
