"""The engine and speculation flags that every verb with a model shares, and the config they make."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from ...parallel.launch import Limits
from ...parallel.topology import Topology
from ..draft import DRAFTERS
from ..engine_config import (
    DEVICES,
    DTYPES,
    EXPERT_FORMATS,
    KERNELS,
    KV_FORMATS,
    LINEAR_FORMATS,
    REPLICA_SPLITS,
    TREES,
    VERIFY_MODES,
    EngineConfig,
)
from ..job import Job
from ..progress import shown
from ..session import Session
from .layout import add_layout_flags, topology_from_args

_DEFAULT = EngineConfig()
_LIMITS = Limits()


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the layout, engine and speculation flags, with other engines' names as aliases."""
    add_layout_flags(parser)
    _add_engine_flags(parser)
    add_cache_flags(parser)
    _add_speculation_flags(parser)
    add_limit_flags(parser)
    _add_expert_flags(parser)


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model", "--model-path", metavar="DIR", help="checkpoint folder (default: the bundled small model)"
    )
    group.add_argument("--device", choices=DEVICES, default=_DEFAULT.device, help="default: a GPU if there is one")
    group.add_argument("--dtype", choices=DTYPES, default=_DEFAULT.dtype, help="default: float32 on CPU, else bfloat16")
    group.add_argument(
        "--kernels",
        choices=KERNELS,
        default=_DEFAULT.kernels,
        help="default: Triton's on a GPU, compiled ones for float32 on CPU, else plain torch",
    )
    group.add_argument(
        "--expert-format",
        choices=EXPERT_FORMATS,
        default=_DEFAULT.expert_format,
        help="how weights of routed experts are packed (default native: as --dtype)",
    )
    group.add_argument(
        "--linear-format",
        choices=LINEAR_FORMATS,
        default=_DEFAULT.linear_format,
        help="the same for output projections and the shared expert; fp8 packs their rows too",
    )
    group.add_argument(
        "--no-graphs",
        dest="graphs",
        action="store_false",
        help="do not record CUDA graphs of small steps (done for V4 with Triton's kernels, on one GPU or on ranks "
        "that share heads, where no row travels and no expert is counted)",
    )
    group.add_argument(
        *("--max-running", "--max-running-requests", "--max-num-seqs"),
        dest="max_running",
        type=int,
        default=_DEFAULT.max_running,
        metavar="N",
        help=f"requests in flight (default {_DEFAULT.max_running})",
    )
    group.add_argument(
        *("--max-context", "--context-length", "--max-model-len"),
        dest="max_context",
        type=int,
        metavar="N",
        help="tokens of prompt and continuation together (default: the model's own limit)",
    )
    group.add_argument("--seed", type=int, default=_DEFAULT.seed, metavar="N", help="of sampling (default 0)")
    group.add_argument(
        "--deterministic",
        action="store_true",
        help="bitwise the same results in any batch; with CPU kernels in any layout",
    )


def add_limit_flags(parser: argparse.ArgumentParser) -> None:
    """Add how long the ranks of a job wait for each other."""
    group = parser.add_argument_group("waiting (several ranks; seconds)")
    number = {"metavar": "S", "type": float}
    group.add_argument(
        "--timeout", **number, default=_LIMITS.timeout, help="for all ranks to start, and each collective (default 300)"
    )
    group.add_argument(
        "--failure-timeout",
        **number,
        help="the job has ended by then when a rank dies, fails, stops or is cut off; 0: nobody watches (default 15, "
        "on GPUs 60)",
    )
    group.add_argument(
        "--watchdog", **number, default=_LIMITS.watchdog, help="a step without progress ends the job (default 120)"
    )


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    """Add how large the cache is, who is admitted to it, and whether it keeps prefixes."""
    group = parser.add_argument_group("cache")
    add_kv_format(group)
    group.add_argument(
        "--cache-pages", type=int, metavar="N", help="pages of a DP rank (default: --max-running full contexts)"
    )
    group.add_argument(
        "--cache-bytes", type=num_bytes, metavar="N", help="the same in bytes a rank, e.g. 512M, with the rings"
    )
    group.add_argument(
        *("--gpu-memory-share", "--gpu-memory-utilization"),
        dest="gpu_memory_share",
        type=float,
        default=_DEFAULT.gpu_memory_share,
        metavar="X",
        help=f"of a GPU's memory, what weights and cache may take together (default {_DEFAULT.gpu_memory_share})",
    )
    group.add_argument(
        "--admission",
        default=_DEFAULT.admission,
        metavar="HOW",
        help="worst_case: admit a request when all it may need is free (default); optimistic, or a share from 0 to 1: "
        "when that share of its new tokens has room",
    )
    group.add_argument("--prefix-cache", action="store_true", help="keep prefixes for requests that begin alike")
    group.add_argument(
        "--prefix-pages", type=int, metavar="N", help="most pages of prefixes kept (default: --max-running)"
    )


def add_kv_format(parser: argparse._ActionsContainer) -> None:
    """Add ``--kv-format``."""
    parser.add_argument(
        *("--kv-format", "--kv-cache-dtype"),
        dest="kv_format",
        choices=KV_FORMATS,
        default=_DEFAULT.kv_format,
        help="fp8: sliding and compressed keys of DeepSeek-V4 as 8-bit floats with scales, as its release keeps them, "
        "their rotated part as bfloat16 (default native: as --dtype)",
    )


def num_bytes(text: str) -> int:
    """An argument that is a number of bytes, with K, M or G for powers of 1024."""
    digits, unit = (text[:-1], text[-1]) if text[-1:] in ("K", "M", "G") else (text, "")
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes; examples: 1048576, 512M, 2G")
    return int(digits) * {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[unit]


def add_chunk_size(parser: argparse.ArgumentParser) -> None:
    """Add ``--chunk-size`` as one number."""
    parser.add_argument(
        *("--chunk-size", "--chunked-prefill-size"),
        dest="chunk_size",
        type=int,
        default=_DEFAULT.chunk_size,
        metavar="N",
        help=f"prefill tokens per step (default {_DEFAULT.chunk_size})",
    )
    parser.add_argument(
        "--mixed-chunk",
        type=int,
        metavar="N",
        help="prefill tokens per step beside up to 8 decoding requests, in proportion with more, so that these do not "
        "wait long between two tokens (default: 24 on CPU, else --chunk-size)",
    )


def _add_speculation_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--draft",
        default=_DEFAULT.draft,
        metavar="NAME",
        help=f"auto (--draft-model's, else the checkpoint's own; the default), {', '.join(DRAFTERS)}",
    )
    group.add_argument("--draft-model", metavar="DIR", help="folder of a draft that is a checkpoint of its own")
    group.add_argument(
        *("--gamma", "--tree-depth"),
        dest="gamma",
        type=int,
        metavar="N",
        help="drafted tokens a round, or levels of a tree (default: as trained)",
    )
    add_tree_flags(group)
    group.add_argument("--verify", choices=VERIFY_MODES, default=_DEFAULT.verify, help="how many drafts are verified")
    group.add_argument("--sps-table", metavar="FILE", help="measured steps per second, for --verify sync and async")
    group.add_argument("--sts", metavar="FILE", help="temperatures that calibrate the draft's confidences")
    group.add_argument(
        "--confidence-threshold", type=float, metavar="X", help="verify drafts before the first less confident (static)"
    )
    group.add_argument("--block-verify", action="store_true", help="judge a block jointly instead of token by token")


def add_tree_flags(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the size of draft trees."""
    group.add_argument(
        "--tree",
        choices=TREES,
        default=_DEFAULT.tree,
        help="draft a tree: dynamic, by the draft's probabilities (EAGLE-2), or static, always of the same shape "
        "(default none: one draft behind the other)",
    )
    add_tree_sizes(group)


def add_tree_sizes(group: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add how many nodes draft trees have."""
    group.add_argument("--tree-nodes", type=int, metavar="N", help="drafts of a tree (default 59)")
    group.add_argument("--tree-topk", type=int, metavar="K", help="drafts that may follow each of them (default 10)")


def _add_expert_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("placement of experts (docs/eplb.md)")
    group.add_argument(
        *("--num-redundant-experts", "--ep-num-redundant-experts"),
        dest="num_redundant_experts",
        type=int,
        default=0,
        metavar="R",
        help="slots of a layer beyond one per expert, all ranks together (0)",
    )
    group.add_argument(
        "--init-expert-location", metavar="MAP", help="which expert each slot holds, as dspark eplb plan writes it"
    )
    group.add_argument(
        "--num-redundant-draft-experts", type=int, default=0, metavar="R", help="the same of the draft's own experts"
    )
    group.add_argument("--init-draft-expert-location", metavar="MAP", help="the same of the draft's own experts")
    group.add_argument(
        "--replica-split",
        choices=REPLICA_SPLITS,
        default=_DEFAULT.replica_split,
        help="copy of an expert that a pick goes to: in turn, the nearest, or weighted so that ranks get alike (even)",
    )
    group.add_argument("--eplb-record", metavar="FILE.npz", help="count expert picks into this file")
    group.add_argument("--eplb-draft-record", metavar="FILE.npz", help="the same of the draft's own experts")
    group.add_argument(
        *("--eplb-interval", "--eplb-rebalance-num-iterations"),
        dest="eplb_interval",
        type=int,
        metavar="N",
        help="rebalance after every N steps, while decoding goes on (default: never)",
    )
    group.add_argument(
        *("--eplb-threshold", "--eplb-min-rebalancing-utilization-threshold"),
        dest="eplb_threshold",
        type=float,
        default=_DEFAULT.eplb_threshold,
        metavar="X",
        help="only where the mean balance of the layers was below X (1: always)",
    )
    group.add_argument(
        "--eplb-target", type=float, default=_DEFAULT.eplb_target, metavar="X", help="balance to stop at (%(default)s)"
    )
    group.add_argument("--eplb-max-moves", type=int, metavar="K", help="move at most K experts each time")
    group.add_argument(
        *("--eplb-layers-per-step", "--eplb-rebalance-layers-per-chunk"),
        dest="eplb_layers_per_step",
        type=int,
        default=_DEFAULT.eplb_layers_per_step,
        metavar="N",
        help="layers whose experts move at a time (1)",
    )


def join_job(args: argparse.Namespace, **overrides: object) -> Job:
    """The job of the parsed flags; ``overrides`` are fields of :class:`EngineConfig` that the verb sets itself.

    SIGINT and SIGTERM to any of its ranks stop all of them.
    """
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    values = {name: value for name, value in vars(args).items() if name in names}
    config = EngineConfig(**(values | overrides))

    def make_topology(world: int, nodes: Sequence[int] | None) -> Topology:
        return topology_from_args(args, world, None, nodes)

    job = Job.join(config, make_topology, limits_of(args))
    job.listen_for_signals()
    return job


def limits_of(args: argparse.Namespace) -> Limits:
    """How long the ranks wait for each other."""
    return Limits(args.timeout, args.failure_timeout, args.watchdog)


def open_session(args: argparse.Namespace, **overrides: object) -> Session:
    """The session of the parsed flags, see :func:`join_job`."""
    job = join_job(args, **overrides)
    try:
        return Session.load(job, shown)
    except BaseException as error:
        job.close(error)
        raise
