"""Plan the exchange of weights from one map to another: who sends what, in which batches, and what it costs.

Prints bytes within and across nodes, the extra memory of the busiest GPU, the time on the given links and, with loads
and the experts' time of a step, after how many steps the exchange has paid.

Example: dspark eplb migrate --from old.json --to new.json --gpus 32 --nodes 4 --expert-bytes 44MB --out moves.json
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib

from ..files.safe import replacing
from ..moves import Links, batches, break_even_steps, cost, transfers
from ..report import size_text
from .diff import read_pair
from .flags import (
    add_deployment_flags,
    add_expert_flags,
    add_load_flags,
    add_output_flags,
    expert_bytes_of,
    loads_of,
    parse_size,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's flags."""
    parser.add_argument("--from", dest="first", required=True, metavar="MAP", help="the live map")
    parser.add_argument("--to", dest="second", required=True, metavar="MAP", help="the wanted map")
    add_deployment_flags(parser)
    add_expert_flags(parser)
    parser.add_argument(
        "--within-node",
        type=parse_size,
        default=400_000_000_000,
        metavar="B/s",
        help="link of a GPU in its node (400GB)",
    )
    parser.add_argument(
        "--across-nodes", type=parse_size, default=50_000_000_000, metavar="B/s", help="link of a GPU to others (50GB)"
    )
    parser.add_argument("--batch-latency-ms", type=float, default=0.1, metavar="MS", help="fixed time of a batch (0.1)")
    parser.add_argument(
        "--per-gpu", type=int, default=2, metavar="N", help="experts that a GPU sends or receives in a batch (2)"
    )
    parser.add_argument(
        "--step-ms", type=float, metavar="MS", help="time of all expert layers in a step, for break-even"
    )
    parser.add_argument("--out", metavar="FILE.json", help="write the batches")
    add_load_flags(parser, required=False)
    add_output_flags(parser, "moved experts by layer, and who sends to whom")


def run(args: argparse.Namespace) -> int:
    """Plan and report; returns the exit status."""
    size = expert_bytes_of(args)
    if size is None:
        raise ValueError("how large is an expert? give --expert-bytes SIZE or --model DIR")
    old, new = read_pair(args.first, args.second, args)
    moves = transfers(old, new)
    plan = batches(moves, args.per_gpu)
    total = cost(plan, size, Links(args.within_node, args.across_nodes, args.batch_latency_ms / 1e3))
    result = {**total._asdict(), "expert_bytes": size, "layers_touched": len({move.layer for move in moves})}
    lines = [
        f"{total.num_transfers} experts of {size_text(size)} in {result['layers_touched']} layers, "
        f"{total.num_batches} batches",
        f"within nodes {size_text(total.bytes_within_node)}, across nodes {size_text(total.bytes_across_nodes)}",
        f"extra memory of the busiest GPU: {size_text(total.peak_extra_bytes)} (a layer's new experts until it flips)",
        f"time on these links: {1e3 * total.seconds:.1f} ms",
    ]
    if args.load:
        _break_even(args, old, new, total.seconds, result, lines)
    elif args.step_ms is not None:
        raise ValueError("--step-ms needs --load: what a map gains depends on the loads")
    if args.out:
        path = pathlib.Path(args.out)
        with replacing(path) as part:
            part.write_text(
                json.dumps({**result, "batches": [[move._asdict() for move in batch] for batch in plan]}) + "\n",
                encoding="utf-8",
            )
        result["files"] = [str(path)]
    if args.plot:
        from ..plot import plot_moves

        result.setdefault("files", []).append(str(plot_moves(args.plot, moves, old.num_layers, old.shape)))
    lines += [f"wrote {path}" for path in result.get("files", [])]
    print(json.dumps(result) if args.json else "\n".join(lines))
    return 0


def _break_even(args: argparse.Namespace, old, new, seconds: float, result: dict, lines: list[str]) -> None:
    load = loads_of(args).total(args.decay)
    before, after = (float(placement.gpu_load(load).max(1).sum()) for placement in (old, new))
    result["fullest_gpu_change"] = after / before - 1
    lines.append(f"load of the fullest GPUs, all layers: {100 * (after / before - 1):+.2f} %")
    if args.step_ms is None:
        return
    steps = break_even_steps(before, after, seconds, args.step_ms / 1e3)
    result["break_even_steps"] = None if math.isinf(steps) else steps
    lines.append("it never pays on these loads" if math.isinf(steps) else f"it has paid after {math.ceil(steps)} steps")
