"""What a figure was measured on and against, printed above every table."""

from __future__ import annotations

import os
import pathlib
import platform
from typing import NamedTuple

import torch


class Setting(NamedTuple):
    """``measured``: the system of interest; ``baseline``: what it is compared with; ``how``: the procedure."""

    measured: str
    baseline: str
    how: str
    num_threads: int
    machine: str

    def lines(self) -> list[str]:
        """For people."""
        threads = f"{self.num_threads} thread{'s' if self.num_threads > 1 else ''}, one rank"
        return [
            f"measured: {self.measured}",
            f"baseline: {self.baseline}",
            f"how:      {self.how}",
            f"machine:  {threads}; {self.machine}",
        ]

    def to_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "measured": self.measured,
            "baseline": self.baseline,
            "how": self.how,
            "threads": self.num_threads,
            "ranks": 1,
            "machine": self.machine,
        }


def machine_line(device: torch.device) -> str:
    """Processor, operating system, versions, and the load when the benchmark began."""
    parts = [f"{_processor()}, {os.cpu_count()} cores"]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    parts += [f"{platform.system()} {platform.machine()}", f"Python {platform.python_version()}"]
    parts.append(f"torch {torch.__version__}")
    if hasattr(os, "getloadavg"):
        parts.append(f"load {os.getloadavg()[0]:.1f} at the start")
    return ", ".join(parts)


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
