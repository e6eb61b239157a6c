"""Write a map or loads in another format, which the suffix of the new file or --to chooses.

Maps: .json (sglang), .npz, .csv, .yaml (trt: TensorRT-LLM), .jsonl (vllm). Loads: .npz, .json (logical_count), .csv.

Example: dspark eplb convert map.json map.yaml --gpus 32 --first-layer 3
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import pathlib

import numpy as np

from ..files import read_loads, read_map, write_map
from ..files.maps import FORMATS
from ..files.safe import replacing
from .flags import add_deployment_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's flags."""
    parser.add_argument("files", nargs="*", metavar="FILE NEW", help="the file to read and the file to write")
    parser.add_argument("--map", metavar="FILE", help="a map to read")
    parser.add_argument("--load", "--loads", nargs="+", metavar="FILE", help="loads to read")
    parser.add_argument("--out", metavar="NEW", help="the file to write")
    parser.add_argument("--to", choices=sorted({*FORMATS.values(), "trt-yaml"}), help="its format, if not by suffix")
    parser.add_argument("--fractions", action="store_true", help="allow counts that are not whole")
    add_deployment_flags(parser)
    parser.add_argument(
        "--experts", type=int, metavar="E", help="experts of a layer (the largest number in the map + 1)"
    )
    parser.add_argument("--first-layer", type=int, default=0, metavar="N", help="number of the first layer in the file")


def run(args: argparse.Namespace) -> int:
    """Convert; returns the exit status."""
    names = [*args.files]
    target = pathlib.Path(args.out or _take(names, -1, "the file to write: --out NEW"))
    if args.load:
        if names or args.map or args.to:
            raise ValueError("with --load, give nothing but the file to write")
        _write_loads(target, read_loads(args.load, fractions=args.fractions).load)
    else:
        found = read_map(args.map or _take(names, 0, "the map to read: --map FILE"))
        if names:
            raise ValueError(f"one map is converted at a time; {names} is too much")
        # Formats that say nothing of GPUs can be written without knowing them.
        kind = "trt" if args.to == "trt-yaml" else args.to or FORMATS.get(target.suffix)
        gpus = args.gpus or found.num_gpus or (None if kind in ("npz", "csv") else 1)
        placement = found.placement(gpus, args.nodes, args.groups, args.experts)
        write_map(target, placement, kind=kind, first_layer=args.first_layer)
    print(f"wrote {target}")
    return 0


def _take(names: list[str], place: int, what: str) -> str:
    if not names:
        raise ValueError(f"say {what}")
    return names.pop(place)


def _write_loads(target: pathlib.Path, load: np.ndarray) -> None:
    whole = load.astype(np.int64) if (load == np.floor(load)).all() else load
    if target.suffix not in (".npz", ".json", ".csv"):
        raise ValueError(f"{target}: loads are written as .npz, .json or .csv, not {target.suffix!r}")
    with replacing(target) as part:
        if target.suffix == ".npz":
            np.savez_compressed(part, load=whole)
        elif target.suffix == ".json":
            part.write_text(json.dumps({"logical_count": whole.tolist()}) + "\n", encoding="utf-8")
        else:
            out = io.StringIO()
            rows = csv.writer(out, lineterminator="\n")
            rows.writerow(["window", "layer", "expert", "count"])
            rows.writerows([*index, count] for index, count in np.ndenumerate(whole))
            part.write_text(out.getvalue(), encoding="utf-8")
