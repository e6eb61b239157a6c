"""Times of the GPU kernels at V4-Flash sizes against the memory and arithmetic floor of an H200; or, without a GPU,
what they compile to for Hopper.

Examples: dspark bench kernels
          dspark bench kernels --compile --rows 64
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch

from ...layers.kernels import Kernels, choose
from ..cli import EXIT_OK
from .flags import numbers
from .kernel_cases import BLOCK, FAMILIES, HALF, Case, Scene
from .kernel_compile import Compiled, compile_calls
from .machine import machine_line
from .table import table

NUM_RUNS, FLUSH_BYTES = 20, 256 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's flags."""
    parser.add_argument("--rows", type=numbers, default=(64,), metavar="N,..", help="rows of the step (default 64)")
    parser.add_argument("--context", type=int, default=8192, metavar="N", help="tokens behind each row (default 8192)")
    parser.add_argument("--compile", action="store_true", help="compile for sm_90 instead; needs no GPU")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the table; raises ``ValueError`` without a GPU unless ``--compile`` is given."""
    if args.context < 2 * BLOCK:
        raise ValueError(f"--context is {args.context}; allowed: at least {2 * BLOCK}")
    if args.compile:
        result, lines = _compile(args.rows, args.context)
    else:
        result, lines = _measure(args.rows, args.context)
    print(json.dumps(result) if args.json else "\n".join(lines))
    return EXIT_OK


def _cases(kernels: Kernels, device: torch.device, num_rows: int, context: int) -> list[Case]:
    scene = Scene(device, num_rows, context)
    return [case for family in FAMILIES for case in family(kernels, scene)]


def _compile(all_rows: tuple[int, ...], context: int) -> tuple[dict[str, object], list[str]]:
    kernels, result, rows = Kernels("triton"), {}, []
    for num_rows in all_rows:
        cases = _cases(kernels, torch.device("meta"), num_rows, context)
        for name, found in compile_calls({case.name: case.call for case in cases}).items():
            result.setdefault(f"rows_{num_rows}", {})[name] = [kernel._asdict() for kernel in found]
            rows += [(f"{name}, {num_rows} rows", *_cells(kernel)) for kernel in found]
    header = ("operation", "kernel", "warps", "registers", "spilled", "shared KiB", "cubin KiB", "wgmma")
    return result, [table(header, rows)]


def _cells(kernel: Compiled) -> tuple[str, ...]:
    sizes = f"{kernel.shared / 1024:.0f}", f"{kernel.cubin_bytes / 1024:.0f}"
    yes = "yes" if kernel.wgmma else "no"
    return kernel.name, str(kernel.num_warps), str(kernel.registers), str(kernel.spilled), *sizes, yes


def _measure(all_rows: tuple[int, ...], context: int) -> tuple[dict[str, object], list[str]]:
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU to measure on; --compile needs none")
    device, result, rows = torch.device("cuda"), {}, []
    kernels = choose(device, HALF)
    for num_rows in all_rows:
        for case in _cases(kernels, device, num_rows, context):
            seconds = _seconds(case)
            figures = {
                "us": 1e6 * seconds,
                "floor_us": 1e6 * case.floor,
                "share_of_floor": case.floor / seconds,
                "gb_per_s": case.num_bytes / seconds / 1e9,
                "tflop_per_s": case.operations / seconds / 1e12,
            }
            result.setdefault(f"rows_{num_rows}", {})[case.name] = figures
            rows.append((f"{case.name}, {num_rows} rows", *(f"{value:.2f}" for value in figures.values())))
    header = ("operation", "us", "floor us", "floor / time", "GB/s", "TFLOP/s")
    return result, [f"machine: {machine_line(device)}; {kernels.backend} kernels", table(header, rows)]


def _seconds(case: Case) -> float:
    """The median time of a call whose operands are not in the L2 cache."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    times = []
    for i in range(NUM_RUNS + 3):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        case.call()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:  # the first calls compile
            times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)
