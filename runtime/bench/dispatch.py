"""What each way of dispatching tokens to experts moves, against a flat all-to-all: copies, bytes, buffers, time.

Examples:
  dspark bench dispatch --simulate --nodes 2 --gpus-per-node 8 --experts 256 --topk 8 --tokens 128
  dspark bench dispatch --simulate --sizes v4-pro --nodes 8 --tokens 4096 --dtype fp8 --json

--simulate counts made-up tokens without any process; the model behind it is in docs/dispatch.md. Baseline: flat, one
all-to-all with a copy of a token for each of its experts.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..cli import EXIT_OK
from . import dispatch_model as model
from . import flags
from .dispatch_model import Cluster, Counts
from .picture import check_picture, save_bars
from .routing_laws import LAWS, RoutingLaw
from .table import table

# name -> (hidden size, routed experts, experts a token)
SIZES = {"v4-flash": (4096, 256, 6), "v4-pro": (7168, 384, 6), "v3": (7168, 256, 8)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    number = {"type": flags.at_least_one, "metavar": "N"}
    parser.add_argument("--simulate", action="store_true", help="count without processes, for any number of ranks")
    parser.add_argument("--nodes", default=2, **number, help="default 2")
    parser.add_argument("--gpus-per-node", default=8, **number, help="ranks of a node (default 8)")
    parser.add_argument("--sizes", choices=SIZES, default="v3", help="hidden size, experts and top-k (default v3)")
    parser.add_argument("--experts", **number, help="routed experts (default: of --sizes)")
    parser.add_argument("--redundant", type=int, default=0, metavar="N", help="further copies of experts (default 0)")
    parser.add_argument("--topk", **number, help="experts a token (default: of --sizes)")
    parser.add_argument("--hidden", **number, help="hidden size (default: of --sizes)")
    parser.add_argument("--tokens", default=128, **number, help="tokens a rank (default 128)")
    parser.add_argument("--max-tokens", **number, help="rows a rank that buffers are for (default: --tokens)")
    parser.add_argument("--dtype", choices=model.ITEM_BYTES, default="bfloat16", help="of dispatched rows")
    parser.add_argument("--routing", choices=LAWS, default="uniform", help="how made-up tokens choose experts")
    parser.add_argument("--skew", type=float, default=1.0, metavar="X", help="skewed: weights fall as rank^-X (1)")
    parser.add_argument("--groups", default=8, **number, help="group_limited: groups of experts (default 8)")
    parser.add_argument("--topk-groups", default=4, **number, help="group_limited: groups a token uses (default 4)")
    parser.add_argument("--inside-gb-s", type=float, default=160.0, metavar="X", help="link inside a node, GB/s (160)")
    parser.add_argument("--across-gb-s", type=float, default=50.0, metavar="X", help="link across nodes, GB/s (50)")
    parser.add_argument("--latency-us", type=float, default=5.0, metavar="X", help="of one hop (5)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of made-up tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--picture", metavar="FILE.png", help="also draw the bytes (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Count and print; raises ``ValueError`` for sizes that do not fit each other."""
    check_picture(args.picture)
    result = simulate(args)
    print(json.dumps(result) if args.json else as_text(result))
    if args.picture:
        draw(args.picture, result)
    return EXIT_OK


def simulate(args: argparse.Namespace) -> dict[str, Any]:
    """Figures by mode, and ``setting``."""
    hidden, experts, top_k = (
        given if given is not None else usual
        for given, usual in zip((args.hidden, args.experts, args.topk), SIZES[args.sizes])
    )
    cluster = Cluster(
        args.nodes, args.gpus_per_node, args.inside_gb_s * 1e9, args.across_gb_s * 1e9, args.latency_us * 1e-6
    )
    for name in ("inside_gb_s", "across_gb_s"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
    law = RoutingLaw(
        experts, top_k, args.routing, experts + args.redundant, args.skew, args.groups, args.topk_groups, args.seed
    )
    max_tokens = args.tokens if args.max_tokens is None else args.max_tokens
    if max_tokens < args.tokens:
        raise ValueError(f"--max-tokens {max_tokens} is less than --tokens {args.tokens}")
    counts = Counts.simulate(cluster, law, args.tokens, args.seed)
    exact = model.expected_copies(cluster, law)
    result: dict[str, Any] = {}
    for mode in model.MODES:
        sizes = model.message_bytes(mode, hidden, args.dtype, top_k)
        result[mode] = figures(counts, mode, sizes)
        if exact is not None:
            result[mode]["remote_copies_per_token_exact"], result[mode]["local_copies_per_token_exact"] = exact[mode]
        result[mode]["buffer_bytes"] = model.buffer_bytes(counts, mode, hidden, args.dtype, top_k, max_tokens)
        for way, seconds in model.seconds(counts, mode, *sizes).items():
            result[mode][f"{way}_us"] = seconds * 1e6
    result["setting"] = {
        "nodes": cluster.num_nodes,
        "gpus_per_node": cluster.per_node,
        "ranks": cluster.num_ranks,
        "experts": experts,
        "slots": law.num_slots,
        "topk": top_k,
        "hidden": hidden,
        "tokens_per_rank": args.tokens,
        "max_tokens_per_rank": max_tokens,
        "dtype": args.dtype,
        "routing": args.routing,
        "inside_gb_s": args.inside_gb_s,
        "across_gb_s": args.across_gb_s,
        "latency_us": args.latency_us,
        "seed": args.seed,
        "busiest_rank_tokens": int(counts.per_rank.max()),
        "mean_rank_tokens": float(counts.per_rank.mean()),
        "baseline": "flat: one all-to-all with a copy of a token for each of its experts",
    }
    return result


def figures(counts: Counts, mode: str, sizes: tuple[int, int]) -> dict[str, Any]:
    """Copies and bytes a token of one layer; ``sizes``: bytes of a copy on the way out and back."""
    tokens, hops = counts.num_tokens, counts.hops[mode]
    across, inside = sum(hop.across for hop in hops) / tokens, sum(hop.inside for hop in hops) / tokens
    flat = counts.hops[model.FLAT][0]
    out, back = sizes
    return {
        "remote_copies_per_token": across,
        "local_copies_per_token": inside,
        "remote_copies_ratio": across * tokens / flat.across if flat.across else None,
        "dispatch_remote_bytes_per_token": across * out,
        "dispatch_local_bytes_per_token": inside * out,
        "combine_remote_bytes_per_token": across * back,
        "combine_local_bytes_per_token": inside * back,
        "hops": [
            {
                "remote_copies_per_token": hop.across / tokens,
                "local_copies_per_token": hop.inside / tokens,
                "dispatch_remote_bytes_per_token": hop.across * out / tokens,
                "dispatch_local_bytes_per_token": hop.inside * out / tokens,
                "combine_remote_bytes_per_token": hop.across * back / tokens,
                "combine_local_bytes_per_token": hop.inside * back / tokens,
            }
            for hop in hops
        ],
    }


def as_text(result: dict[str, Any]) -> str:
    """The figures as a table."""
    setting = result["setting"]
    redundant = f" in {setting['slots']} slots" if setting["slots"] > setting["experts"] else ""
    title = (
        f"{setting['nodes']} nodes x {setting['gpus_per_node']} ranks, {setting['experts']} experts{redundant}, top "
        f"{setting['topk']} ({setting['routing']}), hidden {setting['hidden']}, {setting['tokens_per_rank']} tokens a "
        f"rank in {setting['dtype']}; a token and layer, counted without processes"
    )
    header = [
        "",
        "copies across",
        "(exact)",
        "of flat",
        "inside",
        "KB across",
        "KB inside",
        "buffer MB",
        "us",
        "pipelined",
    ]
    rows = []
    for mode in model.MODES:
        line = result[mode]
        exact, ratio = line.get("remote_copies_per_token_exact"), line["remote_copies_ratio"]
        ways = {
            where: sum(line[f"{way}_{where}_bytes_per_token"] for way in ("dispatch", "combine"))
            for where in ("remote", "local")
        }
        rows.append(
            [
                mode,
                f"{line['remote_copies_per_token']:.4f}",
                "-" if exact is None else f"{exact:.4f}",
                "-" if ratio is None else f"{ratio:.2f}",
                f"{line['local_copies_per_token']:.4f}",
                f"{ways['remote'] / 1e3:.1f}",
                f"{ways['local'] / 1e3:.1f}",
                f"{line['buffer_bytes'] / 1e6:.1f}",
                f"{line['dispatch_us'] + line['combine_us']:.0f}",
                f"{line['dispatch_pipelined_us'] + line['combine_pipelined_us']:.0f}",
            ]
        )
    return f"{title}\n{table(header, rows)}"


def draw(path: str, result: dict[str, Any]) -> None:
    """Bytes a token across nodes and inside them, by mode."""
    setting = result["setting"]
    series = {
        name: [
            sum(result[mode][f"{way}_{where}_bytes_per_token"] for way in ("dispatch", "combine")) / 1e3
            for mode in model.MODES
        ]
        for name, where in (("across nodes", "remote"), ("inside nodes", "local"))
    }
    note = ", ".join(
        f"{name} {setting[name]}" for name in ("nodes", "gpus_per_node", "experts", "topk", "hidden", "dtype")
    )
    save_bars(path, "Bytes of a token and layer, there and back", "KB", model.MODES, series, note)
