"""Times and balances of plans beside the published greedy, in one process and on one thread.

Example: OMP_NUM_THREADS=1 python -m dspark.eplb.bench --kinds logn0.8 zipf1.2
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .balance import plan
from .baseline import greedy_plan
from .cores import CORES, load_core
from .dispatch import ReplicaSplit
from .placement import Placement, balance_of
from .replan import replan
from .shape import Shape
from .synthetic import drifting_loads, synthetic_loads

DEPLOYMENTS = ("8+16", "32+32", "32+64", "72+32", "72+104", "144+176", "320+384")
DRIFTS = {"slow": 0.995, "mid": 0.95, "fast": 0.8}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmark's flags."""
    parser.add_argument("--num-layers", type=int, default=58)
    parser.add_argument("--num-experts", type=int, default=256)
    parser.add_argument("--deployments", nargs="+", default=list(DEPLOYMENTS), metavar="GPUS+REDUNDANT")
    parser.add_argument("--kinds", nargs="+", default=["logn0.8"], help="kinds of loads, see eplb/synthetic.py")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5, help="the best of so many runs counts")
    parser.add_argument("--only-plans", action="store_true", help="leave out drift and splits")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Measure and print; returns the exit status."""
    cores = [name for name in CORES if _available(name)]
    result: dict[str, Any] = {"plans": {}}
    if not args.json:
        print(
            f"{'loads':<8} {'deployment':<10} {'K':>3} {'baseline':>21} {'plan':>15} {'ms: base':>9} "
            + " ".join(f"{name:>9}" for name in cores)
        )
    for kind in args.kinds:
        load = synthetic_loads(kind, args.num_layers, args.num_experts, args.seed)
        for deployment in args.deployments:
            one = bench_plan(load, deployment, cores, args.repeat)
            result["plans"].setdefault(kind, {})[deployment] = one
            if not args.json:
                print(_plan_line(kind, deployment, one, cores), flush=True)
    if not args.only_plans:
        result["drift"] = {name: bench_drift(keep, args) for name, keep in DRIFTS.items()}
        result["split"] = bench_split(args)
        if not args.json:
            _print_rest(result)
    if args.json:
        print(json.dumps(result))
    return 0


def _available(name: str) -> bool:
    try:
        load_core(name)
    except ValueError:
        return False
    return True


def _best_ms(call: Callable[[], Any], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def bench_plan(load: np.ndarray, deployment: str, cores: Sequence[str], repeat: int) -> dict[str, Any]:
    """Balances and milliseconds for the whole model; compilation is not counted."""
    num_gpus, redundant = map(int, deployment.split("+"))
    shape = Shape(load.shape[1], load.shape[1] + redundant, num_gpus)
    baseline = Placement(greedy_plan(load, shape), shape)
    one: dict[str, Any] = {"baseline_ms": _best_ms(lambda: greedy_plan(load, shape), repeat)}
    for name in cores:
        placement = plan(load, num_gpus, num_redundant=redundant, core=name)
        one[f"{name}_ms"] = _best_ms(lambda name=name: plan(load, num_gpus, num_redundant=redundant, core=name), repeat)
    for name, found in (("baseline", baseline), ("plan", placement)):
        balance = found.balance(load)
        one[f"{name}_balance_mean"], one[f"{name}_balance_worst"] = float(balance.mean()), float(balance.min())
        one[f"{name}_wasted_slots"] = int(found.num_duplicates.sum())
    one["layers_below_baseline"] = int((placement.balance(load) < baseline.balance(load)).sum())
    one["slots_per_gpu"] = shape.slots_per_gpu
    return one


def _plan_line(kind: str, deployment: str, one: dict[str, Any], cores: Sequence[str]) -> str:
    wasted = f"{one['baseline_wasted_slots']} wasted"
    return (
        f"{kind:<8} {deployment:<10} {one['slots_per_gpu']:>3} "
        f"{one['baseline_balance_mean']:.4f}/{one['baseline_balance_worst']:.4f} {wasted:>11} "
        f"{one['plan_balance_mean']:.4f}/{one['plan_balance_worst']:.4f} {one['baseline_ms']:>9.1f} "
        + " ".join(f"{one[f'{name}_ms']:>9.1f}" for name in cores)
    )


def bench_drift(keep: float, args: argparse.Namespace) -> dict[str, float]:
    """Balance of the next window when every window is planned anew, or re-planned from the live map; moved slots."""
    loads = drifting_loads(6, args.num_layers, args.num_experts, keep, args.seed)
    full = [plan(load, 32, num_redundant=32) for load in loads[:-1]]
    shape = full[0].shape
    live, lives, moved, seconds = full[0], [], [], 0.0
    for load in loads[1:-1]:
        start = time.process_time()
        found = replan(load, live)
        seconds += time.process_time() - start
        live = found.placement
        lives.append(live)
        moved.append(found.moved.sum() / live.slots.size)
    score = lambda maps: float(np.mean([one.balance(load).mean() for one, load in zip(maps, loads[2:])]))
    return {
        "baseline_next": score([Placement(greedy_plan(load, shape), shape) for load in loads[1:-1]]),
        "full_next": score(full[1:]),
        "incremental_next": score(lives),
        "stay_next": score([full[0]] * len(lives)),
        "moved_share": float(np.mean(moved)),
        "replan_ms": 1e3 * seconds / len(lives),
    }


def bench_split(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Balance of the next window by split, 32 GPUs, middling drift; milliseconds of a weighted split of one layer."""
    loads = drifting_loads(2, args.num_layers, args.num_experts, DRIFTS["mid"], args.seed)
    found = {}
    for redundant in (32, 64, 128):
        placement = plan(loads[0], 32, num_redundant=redundant)
        splits = [ReplicaSplit(placement, layer) for layer in range(placement.num_layers)]
        quotas = {
            "even": [split.even(load) for split, load in zip(splits, loads[1])],
            "weighted": [split.weighted(load) for split, load in zip(splits, loads[1])],
        }
        one = {
            name: float(np.mean([balance_of(split.gpu_load(quota)) for split, quota in zip(splits, rows)]))
            for name, rows in quotas.items()
        }
        one["weighted_ms"] = _best_ms(lambda splits=splits: [s.weighted(w) for s, w in zip(splits, loads[1])], 3)
        one["weighted_ms"] /= len(splits)
        found[f"32+{redundant}"] = one
    return found


def _print_rest(result: dict[str, Any]) -> None:
    print(f"\n{'drift, 32+32':<14} {'baseline':>9} {'full':>7} {'live + moves':>13} {'stay':>7} {'moved':>8} {'ms':>7}")
    for name, one in result["drift"].items():
        print(
            f"{name:<14} {one['baseline_next']:>9.4f} {one['full_next']:>7.4f} {one['incremental_next']:>13.4f} "
            f"{one['stay_next']:>7.4f} {100 * one['moved_share']:>6.2f} % {one['replan_ms']:>7.1f}"
        )
    print(f"\n{'split, mid':<14} {'even':>7} {'weighted':>9} {'ms a layer':>11}")
    for name, one in result["split"].items():
        print(f"{name:<14} {one['even']:>7.4f} {one['weighted']:>9.4f} {one['weighted_ms']:>11.3f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
