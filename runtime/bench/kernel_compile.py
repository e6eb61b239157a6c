"""Compiles kernels for Hopper where there is no GPU, and reads what they need from the machine code.

A driver that launches nothing stands in for CUDA's. The kernels' own host code then runs on tensors without data, so
what is compiled is what a GPU would get: the same tiles, warps, strides and alignments.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import torch

MAX_SHARED = 227 << 10  # bytes of shared memory that a program may have on sm_90


class Compiled(NamedTuple):
    """What one program of a compiled kernel takes: ``registers`` a thread, ``spilled`` bytes of local memory a thread,
    ``shared`` bytes; ``wgmma``: it uses Hopper's matrix instructions."""

    name: str
    num_warps: int
    registers: int
    spilled: int
    shared: int
    cubin_bytes: int
    wgmma: bool


class _Utils:
    """The part of a driver that loads machine code."""

    def __init__(self) -> None:
        self.loaded: list[tuple[object, bytes]] = []
        self.metadata: object = None

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Of an H200."""
        return {"max_shared_mem": MAX_SHARED, "multiprocessor_count": 132, "max_num_regs": 65536, "warpSize": 32}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Keep it; module, function, registers, spills and most threads are made up."""
        self.loaded.append((self.metadata, cubin))
        return 0, 0, 0, 0, 1024


class _Driver:
    """Stands in for CUDA's driver of one H200."""

    def __init__(self) -> None:
        self.utils = _Utils()

    @staticmethod
    def is_active() -> bool:
        """It always is."""
        return True

    def get_current_target(self) -> object:
        """What is compiled for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        """Where tensors would be."""
        return torch.device("cuda", 0)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """The default stream."""
        return 0

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        """A launcher that does nothing; called just before the kernel's machine code is loaded."""
        self.utils.metadata = metadata
        return lambda *args, **options: None


def compile_calls(calls: dict[str, Callable[[], object]]) -> dict[str, list[Compiled]]:
    """The kernels that each of ``calls`` launches for the first time, by its name.

    Takes the place of Triton's driver for the rest of the process. Raises ``ValueError`` in the interpreter.
    """
    from triton import knobs
    from triton.runtime import driver

    if knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET is set, so nothing is compiled; unset it for --compile")
    stub = _Driver()
    driver.set_active(stub)
    found: dict[str, list[Compiled]] = {}
    for name, call in calls.items():
        call()
        found[name] = [_measure(metadata, cubin) for metadata, cubin in stub.utils.loaded]
        stub.utils.loaded.clear()
    return found


def _measure(metadata: object, cubin: bytes) -> Compiled:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _output(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path)
        code = _output(knobs.nvidia.nvdisasm.path, "-c", path)
    registers = int(re.search(r"REG:(\d+)", usage)[1])
    spilled = int(re.search(r"STACK:(\d+)", usage)[1]) + int(re.search(r"LOCAL:(\d+)", usage)[1])
    wgmma = "HGMMA" in code or "QGMMA" in code
    return Compiled(
        metadata.name.strip("_"), metadata.num_warps, registers, spilled, metadata.shared, len(cubin), wgmma
    )


def _output(*command: object) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout
