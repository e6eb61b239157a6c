"""Flags that several verbs share, and what they say turned into objects."""

from __future__ import annotations

import argparse
import re

import numpy as np

from ..files import Loads, read_loads
from ..model_sizes import ModelSizes, read_model_sizes

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def add_redundant_flag(parser: argparse.ArgumentParser) -> None:
    """``--redundant``, 0 where it is not given."""
    names = ("--redundant", "--num-redundant", "--ep-num-redundant-experts")
    parser.add_argument(*names, type=int, metavar="R", help="slots beyond one per expert, all GPUs together (0)")


def add_load_flags(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """``--load`` and how its windows are read."""
    parser.add_argument(
        "--load", nargs="+", metavar="FILE", required=required, help="expert loads: .npz .json .csv .pt .jsonl"
    )
    add_reading_flags(parser)


def add_reading_flags(parser: argparse.ArgumentParser) -> None:
    """How windows of loads are read and added up."""
    parser.add_argument("--decay", type=float, default=1.0, metavar="X", help="weight of a window to the next (1)")
    parser.add_argument("--layers", metavar="A-B", help="only these layers of the loads, counted from 0")
    parser.add_argument("--fractions", action="store_true", help="allow counts that are not whole")


def add_deployment_flags(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """GPUs, nodes and groups."""
    parser.add_argument(
        "--gpus", "--ep-size", type=int, metavar="G", required=required, help="GPUs that share the experts"
    )
    parser.add_argument("--nodes", "--nnodes", type=int, metavar="N", help="nodes of these GPUs (1)")
    parser.add_argument(
        "--groups", "--num-groups", type=int, metavar="g", help="expert groups that stay on one node each (1: none)"
    )


def add_output_flags(parser: argparse.ArgumentParser, picture: str | None = None) -> None:
    """``--json`` and, where there is something to see, ``--plot``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    if picture:
        parser.add_argument("--plot", metavar="PNG", help=picture)


def loads_of(args: argparse.Namespace, files: list[str] | None = None) -> Loads:
    """The windows that the flags name, cut to the layers asked for."""
    loads = read_loads(args.load if files is None else files, fractions=args.fractions)
    chosen = layers_of(args.layers, loads.load.shape[1])
    return Loads(np.ascontiguousarray(loads.load[:, chosen.start : chosen.stop]))


def layers_of(text: str | None, num_layers: int) -> range:
    """``A-B`` or ``A`` as a range within ``num_layers``; all without a text."""
    if text is None:
        return range(num_layers)
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if not match:
        raise ValueError(f"--layers takes A or A-B, not {text!r}")
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < num_layers:
        raise ValueError(f"--layers {text} does not fit {num_layers} layers, 0-{num_layers - 1}")
    return range(first, last + 1)


def parse_size(text: str) -> int:
    """A number of bytes: ``44000000``, ``44MB``, ``13.4 MB``, ``1GiB``. For argparse's ``type``."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e\+?\d+)?)\s*([kmgt]i?)?(?:b(?:/s)?)?\s*", text, re.IGNORECASE)
    try:
        size = float(match[1]) * _UNITS[(match[2] or "").lower()] if match else -1.0
    except ValueError:
        size = -1.0
    if not 1 <= size < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, such as 44MB or 1GiB")
    return int(size)


def add_expert_flags(parser: argparse.ArgumentParser) -> None:
    """How many bytes an expert of one layer has: said, or from a model's configuration."""
    parser.add_argument("--expert-bytes", type=parse_size, metavar="SIZE", help="weights of one expert, e.g. 44MB")
    parser.add_argument("--model", metavar="DIR", help="a checkpoint folder or config.json to take sizes from")


def model_of(args: argparse.Namespace) -> ModelSizes | None:
    """The sizes of ``--model``, if it was given."""
    return read_model_sizes(args.model) if args.model else None


def expert_bytes_of(args: argparse.Namespace) -> int | None:
    """``--expert-bytes``, else the model's, else ``None``."""
    if args.expert_bytes is not None:
        return args.expert_bytes
    model = model_of(args)
    return model.expert_bytes if model else None
