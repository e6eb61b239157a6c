"""What each way of dispatching tokens to experts moves, against a flat all-to-all: copies, bytes, buffers, time.

Examples:
  dspark bench dispatch --simulate --nodes 2 --gpus-per-node 8 --experts 256 --topk 8 --tokens 128
  dspark bench dispatch --simulate --sizes v4-pro --nodes 8 --tokens 4096 --dtype fp8 --json
  dspark bench dispatch --nodes 2 --gpus-per-node 2 --experts 32 --hidden 512
  sudo dspark bench dispatch --namespaces --nodes 4 --gpus-per-node 1

--simulate counts made-up tokens without any process; the model behind it is in docs/dispatch.md. Without it ranks are
forked on this host and move tokens by the torch dispatchers; bytes are those that the collectives count, which the
model must give exactly (exit status 1 if not). With --namespaces every node is a network namespace (Linux, root), and
the bytes its interface sends are shown beside those counted.

Baseline: flat, one all-to-all with a copy of a token for each of its experts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch

from ...parallel.namespaces import why_not
from ..cli import EXIT_FAILED, EXIT_OK, running
from . import dispatch_model as model
from . import flags
from .dispatch_measured import MEASURED, TOLERANCE, Load, measure
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
    parser.add_argument("--gpus-per-node", **number, help="ranks of a node (default 8, or 2 when measured)")
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
    parser.add_argument("--rounds", default=5, **number, help="measured: exchanges that are timed (default 5)")
    parser.add_argument("--namespaces", action="store_true", help="measured: every node a network namespace (root)")
    parser.add_argument("--rate", metavar="RATE", help="with --namespaces: slow the links, e.g. 200mbit")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--picture", metavar="FILE.png", help="also draw the bytes (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Count or measure, and print; raises ``ValueError`` for sizes that do not fit each other."""
    check_picture(args.picture)
    if args.rate is not None and not args.namespaces:
        raise ValueError(f"--rate {args.rate} needs --namespaces")
    if args.simulate and args.namespaces:
        raise ValueError("--simulate counts without processes; leave --namespaces out")
    if args.namespaces and why_not() is not None:
        raise ValueError(f"--namespaces: {why_not()}")
    load = load_of(args)
    if args.simulate:
        result, modes, text = simulate(load, args), model.MODES, as_text
    else:
        result, modes, text = measured(load, args), MEASURED, as_measured_text
    print(json.dumps(result) if args.json else text(result))
    if args.picture:
        draw(args.picture, result, modes)
    return EXIT_OK if all(result[mode].get("agrees", True) for mode in modes) else EXIT_FAILED


def load_of(args: argparse.Namespace) -> Load:
    """The ranks, tokens and routing of the flags."""
    hidden, experts, top_k = (
        given if given is not None else usual
        for given, usual in zip((args.hidden, args.experts, args.topk), SIZES[args.sizes])
    )
    for name in ("inside_gb_s", "across_gb_s"):
        if getattr(args, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
    per_node = args.gpus_per_node or (8 if args.simulate else 2)
    speeds = (args.inside_gb_s * 1e9, args.across_gb_s * 1e9, args.latency_us * 1e-6)
    law = RoutingLaw(
        experts, top_k, args.routing, experts + args.redundant, args.skew, args.groups, args.topk_groups, args.seed
    )
    return Load(Cluster(args.nodes, per_node, *speeds), law, hidden, args.tokens, args.dtype, args.seed)


def setting_of(load: Load) -> dict[str, Any]:
    """What was counted or measured."""
    return {
        "nodes": load.cluster.num_nodes,
        "gpus_per_node": load.cluster.per_node,
        "ranks": load.cluster.num_ranks,
        "experts": load.law.num_experts,
        "slots": load.law.num_slots,
        "topk": load.law.top_k,
        "hidden": load.hidden_size,
        "tokens_per_rank": load.num_tokens,
        "dtype": load.dtype,
        "routing": load.law.name,
        "seed": load.seed,
        "baseline": "flat: one all-to-all with a copy of a token for each of its experts",
    }


def simulate(load: Load, args: argparse.Namespace) -> dict[str, Any]:
    """Figures by mode, and ``setting``."""
    max_tokens = args.tokens if args.max_tokens is None else args.max_tokens
    if max_tokens < args.tokens:
        raise ValueError(f"--max-tokens {max_tokens} is less than --tokens {args.tokens}")
    cluster, law = load.cluster, load.law
    counts = load.expected()
    exact = model.expected_copies(cluster, law)
    result: dict[str, Any] = {}
    for mode in model.MODES:
        sizes = model.message_bytes(mode, load.hidden_size, load.dtype, law.top_k)
        result[mode] = figures(counts, mode, sizes)
        if exact is not None:
            result[mode]["remote_copies_per_token_exact"], result[mode]["local_copies_per_token_exact"] = exact[mode]
        result[mode]["buffer_bytes"] = model.buffer_bytes(
            counts, mode, load.hidden_size, load.dtype, law.top_k, max_tokens
        )
        for way, seconds in model.seconds(counts, mode, *sizes).items():
            result[mode][f"{way}_us"] = seconds * 1e6
    result["setting"] = setting_of(load) | {
        "max_tokens_per_rank": max_tokens,
        "inside_gb_s": args.inside_gb_s,
        "across_gb_s": args.across_gb_s,
        "latency_us": args.latency_us,
        "busiest_rank_tokens": int(counts.per_rank.max()),
        "mean_rank_tokens": float(counts.per_rank.mean()),
    }
    return result


def measured(load: Load, args: argparse.Namespace) -> dict[str, Any]:
    """Figures by mode as the ranks counted them, whether the model gives the same, and ``setting``."""
    torch.set_num_threads(1)
    counts, result = load.expected(), {}
    with running():
        lines = measure(load, args.rounds, args.namespaces, args.rate)
    for mode, line in lines.items():
        out, back = model.message_bytes(mode, load.hidden_size, load.dtype, load.law.top_k, "torch")
        want = [sum(getattr(hop, way) for hop in counts.hops[mode]) for way in ("across", "inside")]
        found = [line[f"{way}_{where}"] for way in ("dispatch", "combine") for where in ("across", "inside")]
        tokens, exact = counts.num_tokens, [copies * size for size in (out, back) for copies in want]
        result[mode] = {
            "remote_copies_per_token": found[0] / out / tokens,
            "local_copies_per_token": found[1] / out / tokens,
            "model_remote_copies_per_token": want[0] / tokens,
            "model_local_copies_per_token": want[1] / tokens,
            "dispatch_remote_bytes_per_token": found[0] / tokens,
            "dispatch_local_bytes_per_token": found[1] / tokens,
            "combine_remote_bytes_per_token": found[2] / tokens,
            "combine_local_bytes_per_token": found[3] / tokens,
            "sizes_remote_bytes_per_token": line["other_across"] / tokens,
            "exchange_us": line["seconds"] * 1e6,
            "worst_error": line["worst_error"],
            "agrees": found == exact and line["worst_error"] <= TOLERANCE[load.dtype],
        }
        if args.namespaces:
            counted = found[0] + found[2] + line["other_across"]
            sent = sum(line["interface_bytes"])
            result[mode] |= {"interface_bytes_per_token": sent / tokens, "interface_ratio": sent / max(counted, 1)}
    result["setting"] = setting_of(load) | {"rounds": args.rounds, "namespaces": args.namespaces, "rate": args.rate}
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
        rows.append(
            [
                mode,
                f"{line['remote_copies_per_token']:.4f}",
                "-" if exact is None else f"{exact:.4f}",
                "-" if ratio is None else f"{ratio:.2f}",
                f"{line['local_copies_per_token']:.4f}",
                f"{both_ways(line, 'remote') / 1e3:.1f}",
                f"{both_ways(line, 'local') / 1e3:.1f}",
                f"{line['buffer_bytes'] / 1e6:.1f}",
                f"{line['dispatch_us'] + line['combine_us']:.0f}",
                f"{line['dispatch_pipelined_us'] + line['combine_pipelined_us']:.0f}",
            ]
        )
    return f"{title}\n{table(header, rows)}"


def as_measured_text(result: dict[str, Any]) -> str:
    """The measured figures as a table."""
    setting = result["setting"]
    title = (
        f"{setting['nodes']} nodes x {setting['gpus_per_node']} ranks, {setting['experts']} experts, top "
        f"{setting['topk']} ({setting['routing']}), hidden {setting['hidden']}, {setting['tokens_per_rank']} tokens a "
        f"rank in {setting['dtype']}; a token and layer, counted by the collectives of forked ranks"
    )
    header = ["", "copies across", "inside", "KB across", "KB inside", "sizes B", "ms", "model"]
    header += ["interface KB", "of counted"] if setting["namespaces"] else []
    rows = []
    for mode in MEASURED:
        line = result[mode]
        row = [mode, f"{line['remote_copies_per_token']:.4f}", f"{line['local_copies_per_token']:.4f}"]
        row += [f"{both_ways(line, where) / 1e3:.2f}" for where in ("remote", "local")]
        row += [f"{line['sizes_remote_bytes_per_token']:.1f}", f"{line['exchange_us'] / 1e3:.1f}"]
        row += ["same" if line["agrees"] else "DIFFERS"]
        if setting["namespaces"]:
            row += [f"{line['interface_bytes_per_token'] / 1e3:.2f}", f"{line['interface_ratio']:.3f}"]
        rows.append(row)
    return f"{title}\n{table(header, rows)}"


def both_ways(line: dict[str, Any], where: str) -> float:
    """Bytes a token there and back, ``remote`` or ``local``."""
    return line[f"dispatch_{where}_bytes_per_token"] + line[f"combine_{where}_bytes_per_token"]


def draw(path: str, result: dict[str, Any], modes: Sequence[str]) -> None:
    """Bytes a token across nodes and inside them, by mode."""
    places = {"across nodes": "remote", "inside nodes": "local"}
    series = {name: [both_ways(result[mode], where) / 1e3 for mode in modes] for name, where in places.items()}
    names = ("nodes", "gpus_per_node", "experts", "topk", "hidden", "dtype")
    note = ", ".join(f"{name} {result['setting'][name]}" for name in names)
    save_bars(path, "Bytes of a token and layer, there and back", "KB", modes, series, note)
