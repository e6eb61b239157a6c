"""Dense attention spread over context-parallel ranks: ring, striped ring, zigzag ring and all-gather against one rank.

Examples:
  dspark bench ring
  dspark bench ring --ranks 8 --lengths 1531,2000 --heads 16 --key-heads 1 --key-dim 96 --value-dim 64
  dspark bench ring --full --json

Ranks are forked on this host; inputs are random. The baseline is dense attention of the same inputs on one rank, of the
same run. A line is one split of the tokens and one way for keys to travel:

  max/mean     query-key pairs that the busiest rank computes, over the mean; 1 is perfect balance
  wall pairs   pairs on the longest path, where in each step of the ring all wait for the slowest rank
  busy         seconds of processor time in attention kernels on the busiest rank
  path         the same along the longest path: what attention would take with a core for every rank
  speed-up     the baseline's seconds over that
  sent         bytes of keys and values that rank 0 sends
  error        largest difference from dense attention in float64

Exit status 1 if an error exceeds 1e-5 (of outputs of size about 1).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ...comm.ring import TRANSFERS
from ...layers.attention.ring import Blocks, RingPlan, build_ring_plan, ring_attention
from ...layers.kernels import Kernels
from ...layers.kernels.block_attention import merge
from ...parallel.context import Split, contiguous, striped, zigzag
from ...parallel.groups import Group, Groups
from ...parallel.local import run_forked
from ...parallel.topology import Topology
from ..cli import EXIT_FAILED, EXIT_OK, running
from . import flags
from .machine import machine_line
from .table import table

LIMIT = 1e-5
SPLITS: dict[str, Callable[[list[int], int], Split]] = {
    "contiguous": lambda lengths, ranks: contiguous(sum(lengths), ranks),
    "striped": lambda lengths, ranks: striped(sum(lengths), ranks),
    "zigzag": zigzag,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    count = {"type": flags.at_least_one, "metavar": "N"}
    parser.add_argument("--ranks", **count, default=4, help="default 4")
    parser.add_argument(
        "--lengths", type=counts, default=[2048], metavar="N,N", help="tokens of each sequence (default 2048)"
    )
    parser.add_argument("--heads", **count, default=8, help="query heads (default 8)")
    parser.add_argument("--key-heads", **count, default=2, help="key heads; 1 is MQA (default 2)")
    parser.add_argument("--key-dim", **count, default=64, help="width of queries and keys (default 64)")
    parser.add_argument("--value-dim", **count, default=64, help="width of values (default 64)")
    parser.add_argument("--full", action="store_true", help="every token sees all of its sequence (default: causal)")
    parser.add_argument("--rounds", **count, default=3, help="runs of each line, the medians count (default 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def counts(text: str) -> list[int]:
    """An argument that is one or several numbers of at least 1, with commas."""
    return [flags.at_least_one(part) for part in text.split(",")]


class Problem(NamedTuple):
    """Random inputs [T, heads, width] of sequences with ``lengths`` tokens."""

    lengths: list[int]
    causal: bool
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.q.shape[2] ** -0.5


class Timed:
    """The kernel with its processor seconds and its pairs by the shard it works on."""

    def __init__(self, scale: float, ranks: int) -> None:
        self._attend = Kernels("torch").bind("attend_block", scale=scale)
        self.seconds, self.pairs, self.source = [0.0] * ranks, [0] * ranks, 0

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None) -> Any:
        """The kernel."""
        start = time.thread_time()
        result = self._attend(q, k, v, visible)
        self.seconds[self.source] += time.thread_time() - start
        self.pairs[self.source] += q.shape[0] * k.shape[0] if visible is None else int(visible.sum())
        return result

    def arrived(self, source: int, _: Any) -> None:
        """What follows is work on the shard of ``source``."""
        self.source = source


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 if a result is wrong."""
    if args.heads % args.key_heads:
        raise ValueError(f"--heads {args.heads} is not a multiple of --key-heads {args.key_heads}")
    lengths: list[int] = args.lengths
    torch.set_num_threads(1)
    made = torch.Generator().manual_seed(0)
    shapes = [(args.heads, args.key_dim), (args.key_heads, args.key_dim), (args.key_heads, args.value_dim)]
    problem = Problem(lengths, not args.full, *(torch.randn(sum(lengths), *shape, generator=made) for shape in shapes))
    with running():
        wanted = exact(problem)
        alone = on_rank(problem, wanted, Group.alone(), "contiguous", "ring", args.rounds)
        names = [(split, transfer) for split in SPLITS for transfer in TRANSFERS]

        def all_lines(rank: int) -> list[dict[str, Any]]:
            group = Groups.build(Topology.make(args.ranks, cp=args.ranks), rank).attn_cp
            return [on_rank(problem, wanted, group, *name, args.rounds) for name in names]

        found = run_forked(all_lines, args.ranks) if args.ranks > 1 else [all_lines(0)]
    baseline = sum(alone["seconds"])
    lines = {" ".join(name): line([rank[i] for rank in found], baseline) for i, name in enumerate(names)}
    report(args, lines, baseline, alone["error"])
    return EXIT_OK if max(one["error"] for one in [alone, *lines.values()]) <= LIMIT else EXIT_FAILED


def exact(problem: Problem) -> torch.Tensor:
    """Dense attention in float64, one head at a time, [T, H, e]."""
    out, start = [], 0
    group = problem.q.shape[1] // problem.k.shape[1]
    for length in problem.lengths:
        rows = slice(start, start + length)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1) if problem.causal else None
        heads = []
        for head in range(problem.q.shape[1]):
            scores = problem.q[rows, head].double() @ problem.k[rows, head // group].double().T * problem.scale
            if hidden is not None:
                scores.masked_fill_(hidden, float("-inf"))
            heads.append(scores.softmax(-1) @ problem.v[rows, head // group].double())
        out.append(torch.stack(heads, dim=1))
        start += length
    return torch.cat(out)


def on_rank(
    problem: Problem, wanted: torch.Tensor, group: Group, split_name: str, transfer: str, num_rounds: int
) -> dict[str, Any]:
    """Of this rank: median kernel seconds and the pairs by shard, the error, bytes sent, and seconds of the clock."""
    split = SPLITS[split_name](problem.lengths, group.size)
    own = torch.from_numpy(split.owned[group.rank])
    plan: RingPlan = build_ring_plan(split.owned, group.rank, problem.lengths, torch.device("cpu"), problem.causal)
    q, k, v = problem.q[own], problem.k[own], problem.v[own]
    seconds, clock = [], []
    for _ in range(1 + num_rounds):  # the first warms up
        timed = Timed(problem.scale, group.size)
        group.traffic.reset()
        start = time.perf_counter()
        blocks = Blocks(timed, merge)
        out = ring_attention(q, k, v, plan, group, blocks, transfer=TRANSFERS[transfer], keep=timed.arrived)
        clock.append(time.perf_counter() - start)
        seconds.append(timed.seconds)
    return {
        "seconds": [statistics.median(of_shard) for of_shard in zip(*seconds[1:])],
        "pairs": timed.pairs,
        "error": float((out - wanted[own]).abs().max()) if len(own) else 0.0,
        "sent_bytes": group.traffic.total().sent_bytes,
        "clock_s": statistics.median(clock[1:]),
    }


def line(ranks: list[dict[str, Any]], baseline: float) -> dict[str, Any]:
    """The figures of one line from those of all ranks."""
    seconds, pairs = (np.array([rank[name] for rank in ranks]) for name in ("seconds", "pairs"))
    place = np.arange(len(ranks))
    steps = [(place, (place - step) % len(ranks)) for step in range(len(ranks))]
    work, path = pairs.sum(1), float(sum(seconds[step].max() for step in steps))
    return {
        "pairs_by_rank": work.tolist(),
        "balance": float(work.max() / work.mean()),
        "wall_pairs": int(sum(pairs[step].max() for step in steps)),
        "busy_s": float(seconds.sum(1).max()),
        "path_s": path,
        "speed_up": baseline / path,
        "sent_bytes": ranks[0]["sent_bytes"],
        "clock_s": max(rank["clock_s"] for rank in ranks),
        "error": max(rank["error"] for rank in ranks),
    }


def report(args: argparse.Namespace, lines: dict[str, dict[str, Any]], baseline: float, error: float) -> None:
    """A table, or JSON."""
    kind = "full" if args.full else "causal"
    machine = machine_line(torch.device("cpu"))
    about = (
        f"{kind} attention, {args.heads} heads on {args.key_heads}, keys {args.key_dim}, values {args.value_dim}, "
        f"sequences of {', '.join(map(str, args.lengths))} tokens, {args.ranks} ranks"
    )
    if args.json:
        print(json.dumps({**lines, "dense": {"seconds": baseline, "error": error}, "setting": [about, machine]}))
        return
    print(f"{about}\nmachine:  {machine}\nbaseline: dense attention on one rank, {baseline:.3f} s, error {error:.1e}\n")
    header = ["split and transfer", "max/mean", "wall pairs", "busy s", "path s", "speed-up", "sent", "error"]
    rows = [
        [
            name,
            f"{one['balance']:.3f}",
            f"{one['wall_pairs']:,}",
            f"{one['busy_s']:.3f}",
            f"{one['path_s']:.3f}",
            f"{one['speed_up']:.2f}",
            f"{one['sent_bytes']:,}",
            f"{one['error']:.1e}",
        ]
        for name, one in lines.items()
    ]
    print(table(header, rows))
