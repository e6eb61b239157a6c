"""Place experts for the given loads, from scratch or a few moves away from the live placement.

Writes the map (.json for sglang, .npz, .csv, .yaml for TensorRT-LLM, .jsonl for vLLM) and NAME.meta.json beside it.
With --current, as few experts as possible are moved, never more than --max-moves or --max-bytes allow.

Example: dspark eplb plan --load loads.npz --gpus 32 --nodes 4 --redundant 32 --out map.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import sys
from typing import Any

import numpy as np

from ..balance import default_effort, plan
from ..baseline import greedy_plan
from ..bounds import smallest_redundancy, upper_bounds
from ..cores import CORES
from ..files import read_map, write_map
from ..files.maps import deployment
from ..moves import difference, keep_slots
from ..placement import Placement
from ..replan import replan
from ..report import Spread, layer_figures, layer_lines, size_text, why_lines
from ..shape import Shape
from .flags import (
    add_deployment_flags,
    add_expert_flags,
    add_load_flags,
    add_output_flags,
    add_redundant_flag,
    expert_bytes_of,
    loads_of,
    parse_size,
)

TARGET = 0.98


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's flags."""
    add_load_flags(parser)
    add_deployment_flags(parser)
    add_redundant_flag(parser)
    parser.add_argument("--out", metavar="MAP", help="where to write the map; the suffix chooses the format")
    parser.add_argument("--current", metavar="MAP", help="the live map, to stay close to")
    parser.add_argument("--max-moves", type=int, metavar="K", help="with --current: move at most K experts in all")
    parser.add_argument("--max-bytes", type=parse_size, metavar="B", help="with --current: move at most so many bytes")
    parser.add_argument(
        "--target", type=float, metavar="X", help=f"with --current: balance of a layer to stop at ({TARGET})"
    )
    parser.add_argument("--min-balance", type=float, metavar="X", help="exit with 1 if a layer is less balanced")
    parser.add_argument("--first-layer", type=int, default=0, metavar="N", help="number of the first layer in the file")
    parser.add_argument("--long", action="store_true", help="search about ten times longer")
    parser.add_argument("--core", choices=["auto", *CORES], default="plain", help="implementation; same plan (plain)")
    parser.add_argument("--all-layers", action="store_true", help="a line for every layer")
    add_expert_flags(parser)
    add_output_flags(parser, "heat maps of the GPUs before and after, and the balance by layer")


def run(args: argparse.Namespace) -> int:
    """Plan, report, write; returns the exit status."""
    for name in ("max_moves", "max_bytes", "target"):
        if getattr(args, name) is not None and args.current is None:
            raise ValueError(f"--{name.replace('_', '-')} needs the live map, --current MAP")
    loads = loads_of(args)
    load = loads.total(args.decay)
    current = _current(args, load) if args.current else None
    placement, before = _plan(args, load, current)
    bounds = upper_bounds(load, placement.shape)
    result = _result(load, placement, before, bounds, current, expert_bytes_of(args))
    if args.out:
        meta = {**result, "sources": [_source(path) for path in args.load], "options": _options(args)}
        result["files"] = [
            str(path) for path in write_map(args.out, placement, meta=meta, first_layer=args.first_layer)
        ]
    if args.plot:
        from ..plot import plot_plan

        result.setdefault("files", []).append(
            str(plot_plan(args.plot, before.gpu_load(load), placement.gpu_load(load), [b.balance for b in bounds]))
        )
    print(json.dumps(result) if args.json else "\n".join(_lines(args, result, placement, load, bounds)))
    return _threshold(args, load, placement, bounds)


def _current(args: argparse.Namespace, load: np.ndarray) -> Placement:
    current = read_map(args.current).placement(args.gpus, args.nodes, args.groups, load.shape[1])
    if args.redundant is not None and args.redundant != current.shape.num_redundant:
        raise ValueError(
            f"--redundant {args.redundant} does not fit the live map of {current.shape.num_slots} slots, "
            f"{current.shape.num_redundant} of them redundant"
        )
    return current


def _plan(args: argparse.Namespace, load: np.ndarray, current: Placement | None) -> tuple[Placement, Placement]:
    """The new placement and the one that it is compared with."""
    if current is not None:
        found = replan(
            load,
            current,
            target=args.target or max(TARGET, args.min_balance or 0),
            max_moves=args.max_moves,
            max_bytes=args.max_bytes,
            expert_bytes=expert_bytes_of(args),
        )
        return keep_slots(current, found.placement), current
    if args.gpus is None:
        raise ValueError("for how many GPUs? give --gpus G")
    redundant, nodes, groups = args.redundant or 0, args.nodes or 1, args.groups or 1
    shape = Shape(load.shape[1], load.shape[1] + redundant, args.gpus, nodes, groups)
    if shape.num_forced_copies:
        print(
            f"eplb: warning: {shape.slots_per_gpu} slots on a GPU are more than the experts in reach; "
            f"{shape.num_forced_copies} slots per layer can only hold useless copies",
            file=sys.stderr,
        )
    effort = default_effort(shape)
    if args.long:
        cycles = 10 * effort.num_cycles
        effort = effort._replace(num_cycles=cycles, num_close_cycles=cycles, patience=cycles // 4)
    placement = plan(
        load, args.gpus, num_redundant=redundant, num_nodes=nodes, num_groups=groups, core=args.core, effort=effort
    )
    return placement, Placement(greedy_plan(load, shape), shape)


def _result(
    load: np.ndarray, placement: Placement, before: Placement, bounds: list, current: Placement | None, size: int | None
) -> dict[str, Any]:
    result: dict[str, Any] = {
        "deployment": {**deployment(placement), "num_slots": placement.shape.num_slots},
        "balance": Spread.of(placement.balance(load))._asdict(),
        "live_balance" if current else "greedy_balance": Spread.of(before.balance(load))._asdict(),
        "best_possible": Spread.of(np.array([bound.balance for bound in bounds]))._asdict(),
        "layers": layer_figures(placement, load, bounds),
    }
    if current:
        moved = difference(current, placement).moved
        result["moved_experts"] = int(moved.sum())
        result["moved_share"] = float(moved.sum() / placement.slots.size)
        if size:
            result["moved_bytes"] = int(moved.sum()) * size
    return result


def _lines(
    args: argparse.Namespace, result: dict[str, Any], placement: Placement, load: np.ndarray, bounds: list
) -> list[str]:
    shape = placement.shape
    compared = "live map" if "live_balance" in result else "published greedy"
    lines = [
        f"{placement.num_layers} layers x {shape.num_experts} experts on {shape.num_gpus} GPUs in {shape.num_nodes} "
        f"node{'s' if shape.num_nodes > 1 else ''}: {shape.slots_per_gpu} slots a GPU, {shape.num_redundant} redundant"
        + (f", {shape.num_groups} groups kept on nodes" if shape.hierarchical else ""),
        f"balance (mean GPU load / fullest): {Spread(**result['balance']).text()}",
        f"{compared + ':':<35}{Spread(**result.get('live_balance', result.get('greedy_balance'))).text()}",
        f"{'no placement can beat:':<35}{Spread(**result['best_possible']).text()}",
    ]
    if "moved_experts" in result:
        size = f", {size_text(result['moved_bytes'])}" if "moved_bytes" in result else ""
        lines.append(
            f"moved: {result['moved_experts']} experts ({100 * result['moved_share']:.2f} % of the slots{size})"
        )
    lines += ["", *layer_lines(result["layers"], None if args.all_layers else 8)]
    why = why_lines(bounds, placement.balance(load))
    lines += ["", *why] if why else []
    lines += [f"wrote {path}" for path in result.get("files", [])]
    return lines


def _threshold(args: argparse.Namespace, load: np.ndarray, placement: Placement, bounds: list) -> int:
    if args.min_balance is None:
        return 0
    if not 0 < args.min_balance <= 1:
        raise ValueError(f"--min-balance must lie above 0 and at most at 1, not {args.min_balance}")
    balance = placement.balance(load)
    worst = int(balance.argmin())
    if balance[worst] >= args.min_balance:
        return 0
    advice = _advice(args, load, placement, bounds[worst])
    print(
        f"eplb: layer {worst} has a balance of {balance[worst]:.4f}, below {args.min_balance}: {advice}",
        file=sys.stderr,
    )
    return 1


def _advice(args: argparse.Namespace, load: np.ndarray, placement: Placement, bound: Any) -> str:
    if args.current:
        return "allow more moves or a higher --target, or plan without --current"
    if bound.balance >= args.min_balance:
        return "no limit is proven, try --long or more --redundant"
    needed = smallest_redundancy(load, placement.shape, args.min_balance, core=args.core)
    way = (
        f"--redundant {needed.found} reaches {needed.best:.4f}"
        if needed.found is not None
        else "more slots do not help"
    )
    return f"at most {bound.balance:.4f} is possible, because {bound.detail}; {way}"


def _source(path: str) -> dict[str, str]:
    return {"path": path, "sha256": hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()}


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in sorted(vars(args).items()) if value not in (None, False)}
