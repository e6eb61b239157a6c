"""What each attention kind keeps and costs: cache bytes per token, operations per token by context, and measured time.

Examples:
  dspark bench kinds
  dspark bench kinds --contexts 512,2048,8192 --json

Bytes, keys and operations are of one layer with the sizes of a released model. Operations are the multiplications and
additions that depend on the context: scores, weighted sums, an indexer. Keys are those that a token attends to, as a
share of its context, compressed ones included. Time is of one token through one layer on the
CPU, behind a context of made-up keys, with 16 query heads and a width of 1024, so that what differs is the kind; the
baseline is the same with keys per head (mha). Best of several runs. V4's kinds are timed by bench decode --contexts.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import NamedTuple

import torch

from ...comm.collectives import Pending, start_all_reduce
from ...layers.attention import AttentionSizes, make_attention
from ...layers.attention.dsa import DSASizes
from ...layers.attention.gqa import GQASizes
from ...layers.attention.mla import MLASizes
from ...layers.attention.nsa import NSASizes
from ...layers.attention.v4 import V4AttentionSizes
from ...layers.kernels import Kernels
from ...layers.params import Scope
from ...layers.probe import ignore
from ...layers.rope import build_rope_table
from ...layers.stages import drain
from ...parallel.groups import Group
from ..cache import Cache, CacheLayout
from ..cli import EXIT_OK, running
from ..models.decoder_spec import ATTENTION_PARTS
from ..step import Span, build_step
from . import flags
from .machine import Setting, machine_line
from .table import table

CONTEXTS = (4096, 65536, 1 << 20)
NUM_HEADS, HIDDEN = 16, 1024


class Kind(NamedTuple):
    """``released``: whose sizes these are; ``sizes`` of one of its layers; ``small``: the same kind for timing."""

    released: str
    sizes: AttentionSizes | V4AttentionSizes
    small: AttentionSizes | None


def kinds() -> dict[str, Kind]:
    """By what people call it."""

    def heads(num_heads: int, num_kv_heads: int, head_dim: int = 128, hidden: int = 4096) -> GQASizes:
        return GQASizes(hidden, num_heads, num_kv_heads, head_dim, 1e-6)

    latent = MLASizes(7168, 128, 1536, 512, 128, 64, 128, 1e-6, 192**-0.5)
    small = latent._replace(hidden_size=HIDDEN, num_heads=NUM_HEADS)
    sparse = NSASizes(2560, 64, 4, 128, 32, 16, 64, 16, 512)
    few = {"hidden_size": HIDDEN, "num_heads": NUM_HEADS, "num_kv_heads": NUM_HEADS // 4}
    v4 = {
        "hidden_size": 4096,
        "num_heads": 64,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "rope_dim": 64,
    }
    v4 |= {"window": 128, "index_num_heads": 64, "index_head_dim": 128, "index_topk": 512, "norm_eps": 1e-6}
    return {
        "mha": Kind("Llama-2-7B", heads(32, 32), heads(NUM_HEADS, NUM_HEADS, hidden=HIDDEN)),
        "gqa": Kind("Qwen3-8B", heads(32, 8), heads(NUM_HEADS, NUM_HEADS // 4, hidden=HIDDEN)),
        "mqa": Kind("Qwen3-8B, one key head", heads(32, 1), heads(NUM_HEADS, 1, hidden=HIDDEN)),
        "mla": Kind("DeepSeek-V3", latent, small),
        "dsa": Kind("DeepSeek-V3.2", DSASizes(latent, 64, 128, 2048), DSASizes(small, NUM_HEADS, 128, 2048)),
        "nsa": Kind("the paper's blocks, heads of 128", sparse, sparse._replace(**few)),
        "csa": Kind("V4-Flash sizes", V4AttentionSizes(kind="csa", ratio=4, **v4), None),
        "hca": Kind("V4-Flash sizes", V4AttentionSizes(kind="hca", ratio=128, **v4), None),
        "sliding": Kind("V4-Flash sizes", V4AttentionSizes(kind="sliding", ratio=0, **v4), None),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--contexts", type=contexts, default=(512, 2048, 8192), metavar="N[,N...]", help="default 512,2048,8192"
    )
    parser.add_argument("--repeats", type=flags.at_least_one, default=5, metavar="N", help="runs of each (default 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def contexts(text: str) -> tuple[int, ...]:
    """An argument that is one or several context lengths, with commas."""
    return tuple(flags.at_least_one(part) for part in text.split(","))


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    found = {}
    with running():
        for name, kind in kinds().items():
            rows = kind.sizes if isinstance(kind.sizes, V4AttentionSizes) else kind.sizes.cache(1)
            layout = CacheLayout((rows,), 1, 2)
            found[name] = {
                "released": kind.released,
                "bytes_per_token": layout.bytes_per_token,
                "bytes_per_request": layout.bytes_per_slot,
                "keys_read_share": {str(n): kind.sizes.keys_read(n) / n for n in CONTEXTS},
                "operations_per_token": {str(n): kind.sizes.operations(n) for n in CONTEXTS},
                "milliseconds": {} if kind.small is None else timed(kind.small, args.contexts, args.repeats),
            }
    machine = machine_line(torch.device("cpu"))
    how = f"one token through one layer of {NUM_HEADS} heads, best of {args.repeats}; bytes at 2 a value"
    setting = Setting("attention kinds, float32 on cpu", "mha", how, torch.get_num_threads(), machine)
    if args.json:
        print(json.dumps({"kinds": found, "setting": setting.to_json()}))
        return EXIT_OK
    shares = " / ".join(f"{n >> 10}k" for n in CONTEXTS)
    head = (
        "kind",
        "sizes of",
        "bytes a token",
        "ring bytes",
        f"% of keys at {shares}",
        *(f"Mop at {n >> 10}k" for n in CONTEXTS),
    )
    lines = []
    for name, one in found.items():
        cells = [" / ".join(f"{100 * one['keys_read_share'][str(n)]:.3g}" for n in CONTEXTS)]
        cells += [f"{one['operations_per_token'][str(n)] / 1e6:.1f}" for n in CONTEXTS]
        cells += [f"{one['milliseconds'][str(n)]:.2f}" if one["milliseconds"] else "-" for n in args.contexts]
        lines.append((name, one["released"], f"{one['bytes_per_token']:.0f}", str(one["bytes_per_request"]), *cells))
    print("\n".join([*setting.lines(), "", table((*head, *(f"ms at {n}" for n in args.contexts)), lines)]))
    return EXIT_OK


class _Made:
    """Made-up weights of one attention layer."""

    def __init__(self, sizes: AttentionSizes) -> None:
        self._parts = ATTENTION_PARTS[sizes.kind](HIDDEN, sizes)
        self._generator = torch.Generator().manual_seed(0)

    def take(
        self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """As :meth:`~dspark.layers.params.ParamSource.take`."""
        shape, _ = self._parts[name]
        if len(shape) == 1:
            return torch.ones(shape)
        return (
            torch.randn(shape, generator=self._generator)
            .mul_(shape[-1] ** -0.5)
            .narrow(dim, start, (shape[dim] if stop is None else stop) - start)
        )


@torch.inference_mode()
def timed(sizes: AttentionSizes, lengths: tuple[int, ...], repeats: int) -> dict[str, float]:
    """Milliseconds of one token by context."""
    alone, device = Group.alone(), torch.device("cpu")
    rope = build_rope_table(sizes.rope_dim, 1e4, max(lengths) + 1)
    layer = make_attention(Scope(_Made(sizes)), sizes, rope, alone, Kernels("torch"), 0)
    layout, result = CacheLayout((sizes.cache(1),), 1, 4), {}

    def start_sum(x: torch.Tensor) -> Pending:
        return start_all_reduce(x, alone)

    for length in lengths:
        cache = Cache(layout, 1, layout.pages_for(length + 1), length + 1, device, torch.float32)
        assert cache.reserve(cache.acquire(), length + 1)
        for pool in (cache.layers[0].entries, cache.layers[0].index_entries):
            pool.normal_()
        plan = build_step([Span(0, length, [0], 1)], cache.page_table, layout.ratios, 1).plan
        x, best = torch.randn(1, HIDDEN), float("inf")
        for _ in range(repeats + 1):
            start = time.perf_counter()
            drain(layer.stages(x, cache.layers[0], plan, start_sum, ignore))
            best = min(best, time.perf_counter() - start)
        result[str(length)] = 1e3 * best
    return result
