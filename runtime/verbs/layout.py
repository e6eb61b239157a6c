"""The layout flags that every verb with ranks shares, and the topology they describe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ...comm.dispatch import dispatcher_class
from ...parallel.topology import Topology
from ..engine_config import CP_DECODES, CP_KEYS, CP_SPLITS, DISPATCH_BACKENDS, DISPATCHERS, OVERLAP_MODES


def _size(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def add_layout_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--tp``, ``--pp``, ... to ``parser``, with other engines' names as aliases."""
    group = parser.add_argument_group("layout")

    def size(*names: str, help: str, default: int | None = 1) -> None:
        dest = names[0].lstrip("-").replace("-", "_")
        group.add_argument(*names, dest=dest, type=_size, default=default, metavar="N", help=help)

    size(
        *("--tp", "--tp-size", "--tensor-parallel-size"),
        default=None,
        help="ranks of one pipeline stage (default: all ranks / pp)",
    )
    size("--pp", "--pp-size", "--pipeline-parallel-size", help="pipeline stages (default 1)")
    size("--dp", "--attn-dp-size", help="attention data parallelism inside tp (default 1)")
    size("--cp", "--attn-cp-size", help="attention context parallelism inside tp (default 1)")
    size(
        *("--ep", "--ep-size", "--expert-parallel-size"),
        default=None,
        help="expert parallelism inside tp (default 1; with an all-to-all dispatcher all of tp)",
    )
    size("--moe-dp", "--moe-dp-size", help="replicas of the experts inside tp (default 1)")
    group.add_argument("--cp-split", choices=CP_SPLITS, default="interleave", help="rows of a step over the cp ranks")
    group.add_argument(
        "--cp-decode", choices=CP_DECODES, default="split", help="steps without prefill: split rows too, or repeat them"
    )
    group.add_argument(
        "--cp-keys",
        choices=CP_KEYS,
        default="gather",
        help="keys of split rows: brought together, or passed from rank to rank (dense attention kinds only)",
    )
    group.add_argument(
        "--dispatcher",
        choices=DISPATCHERS,
        default="standard",
        help="how tokens reach their experts: standard moves none; normal, low_latency and auto are all-to-all",
    )
    group.add_argument(
        "--dispatch-backend",
        choices=DISPATCH_BACKENDS,
        default="auto",
        help="who moves them: torch.distributed, or the library deep_ep by its class Buffer or ElasticBuffer",
    )
    size(
        "--max-tokens-per-rank",
        default=None,
        help="rows a rank may send to experts at once where buffers are fixed (default: what the run can need)",
    )
    group.add_argument(
        "--fp8-dispatch", action="store_true", help="low_latency and auto: rows of decode steps travel as 8-bit floats"
    )
    group.add_argument(
        "--overlap",
        choices=OVERLAP_MODES,
        default="none",
        help="hide communication: tbo runs two half batches in turns, sbo sends rows while others are computed",
    )
    size("--overlap-min-rows", default=256, help="overlap steps with at least so many rows on a rank (default 256)")
    size("--gpus-per-node", default=None, help="ranks of a node (default: from the launcher)")


def topology_from_args(
    args: argparse.Namespace, world: int, gpus_per_node: int | None, nodes: Sequence[int] | None = None
) -> Topology:
    """The topology of ``world`` ranks that the layout flags describe.

    Nodes: ``--gpus-per-node`` if given, else ``nodes`` (the node of every world rank, as the ranks found it), else
    ``gpus_per_node`` ranks each (None: one node). Raises ``ValueError`` naming both numbers for an impossible layout.
    """
    if args.gpus_per_node is not None:
        gpus_per_node, nodes = args.gpus_per_node, None
    return Topology.make(
        world,
        tp=args.tp,
        pp=args.pp,
        dp=args.dp,
        cp=args.cp,
        ep=args.ep,
        moe_dp=args.moe_dp,
        all_to_all=dispatcher_class(args.dispatcher).all_to_all,
        gpus_per_node=gpus_per_node,
        nodes=nodes,
    )
