"""Memory per token of context: what requests really take, against the formula that ``dspark check`` prints.

Examples:
  dspark bench memory
  dspark bench memory --tokens 2048 --requests 32 --json

In a fresh process on the CPU, requests are prefilled and kept; two things are counted per token: what the cache says
they hold, and by how much the resident memory of the process grew, as the operating system counts it. Both leave out
the part that does not depend on length, which is shown by itself. Pages of the cache hold whole multiples of tokens, so
lengths that are none show what is lost at the end of the last page.
"""

from __future__ import annotations

import argparse
import json
from typing import NamedTuple

import torch

from ..cache import CacheLayout
from ..cli import EXIT_OK, running
from ..load import cache_layout
from ..model_config import Config
from . import flags
from .machine import Setting, machine_line
from .picture import save_bars
from .residence import Residence, Task, can_measure, residence
from .table import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument(
        "--tokens", type=flags.at_least_one, default=1024, metavar="N", help="a request's (default 1024)"
    )
    parser.add_argument("--requests", type=flags.at_least_one, default=16, metavar="N", help="default 16")
    parser.add_argument(
        "--chunk-size", type=flags.at_least_one, default=512, metavar="N", help="tokens a step (default 512)"
    )
    flags.add_bench_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print; raises ``ValueError`` where it cannot be measured or the length does not fit the model."""
    flags.check_output(args)
    if args.device == "cuda" or not can_measure():
        raise ValueError("bench memory reads /proc of a Linux process and measures on the CPU; give --device cpu there")
    folder, config = flags.model_of(args)
    if args.tokens > config.max_position_embeddings:
        raise ValueError(f"--tokens is {args.tokens}, but the model has {config.max_position_embeddings} positions")
    dtype = "float32" if args.dtype == "auto" else args.dtype
    layout = layout_of(config, dtype)
    if not layout.bytes_per_token:
        raise ValueError("no layer of this model keeps anything per token of context; there is nothing to measure")
    machine = machine_line(torch.device("cpu"))
    with running():
        taken = residence(Task(str(folder), dtype, args.chunk_size, args.tokens, args.requests, num_before=1))
    setting = Setting(
        f"dspark without a draft, {folder.name}, {dtype} on cpu",
        "the formula that dspark check prints: bytes of compressed entries per token of context",
        f"{args.requests} requests of {args.tokens} tokens prefilled one after the other and kept, in a fresh process",
        1,
        machine,
    )
    report(args, setting, figures(layout, taken, args.requests * args.tokens))
    return EXIT_OK


def layout_of(config: Config, dtype: str) -> CacheLayout:
    """The cache of a model without a draft."""
    return cache_layout(config, range(config.num_layers), 1, getattr(torch, dtype).itemsize)


class Figures(NamedTuple):
    """Bytes per token by the formula, as the cache counts them and as resident memory grew; bytes per request that do
    not depend on length."""

    formula: float
    in_use: float
    resident: float
    per_request: int

    def to_json(self) -> dict[str, dict[str, float]]:
        """By what was counted."""
        return {
            "formula": {"bytes_per_token": self.formula, "bytes_per_request": self.per_request},
            "in_use": {"bytes_per_token": self.in_use, "ratio": self.in_use / self.formula},
            "resident": {"bytes_per_token": self.resident, "ratio": self.resident / self.formula},
        }


def figures(layout: CacheLayout, taken: Residence, num_tokens: int) -> Figures:
    """Per token of ``num_tokens`` tokens in all."""
    in_use = (taken.in_use - taken.slots) / num_tokens
    return Figures(layout.bytes_per_token, in_use, taken.growth / num_tokens, layout.bytes_per_slot)


def report(args: argparse.Namespace, setting: Setting, found: Figures) -> None:
    """Print a table or JSON, and draw the picture if one is wanted."""
    values = found.to_json()
    if args.json:
        print(json.dumps(values | {"setting": setting.to_json()}))
    else:
        names = {"formula": "formula", "in_use": "pages the cache has given out", "resident": "resident memory"}
        rows = [
            (names[key], f"{v['bytes_per_token']:.1f}", f"{v['bytes_per_token'] / found.formula:.3f}")
            for key, v in values.items()
        ]
        print("\n".join([*setting.lines(), "", table(("counted", "bytes per token", "of the formula"), rows)]))
        print(f"besides, {found.per_request} bytes a request, whatever its length")
    if args.picture:
        series = {"bytes per token": [v["bytes_per_token"] for v in values.values()]}
        save_bars(
            args.picture, "Memory per token of context", "bytes", list(values), series, "\n".join(setting.lines())
        )
