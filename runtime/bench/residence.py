"""Resident memory of an engine, measured in a process of its own: ``python -m dspark.runtime.bench.residence JSON``.

A fresh process has touched nothing that would hide growth. It reads a :class:`Task` as JSON from its argument, and
prints a :class:`Residence` as JSON. It runs on the CPU, on one thread.
"""

from __future__ import annotations

import ctypes
import gc
import json
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

import torch

from ...parallel.groups import Groups
from ..engine import Engine
from ..engine_config import EngineConfig, resolve
from ..load import load_engine
from ..model_config import load_model_config
from ..step import Span, build_step
from .systems import sibling

# Enough rows for the products of many rows as well as of few to have set up what they keep.
NUM_WARM_TOKENS = 40
TIMEOUT_SECONDS = 1800


class Task(NamedTuple):
    """Prefill ``num_requests`` requests of ``num_tokens`` tokens one after the other, in chunks, and keep them all.

    ``num_before`` such requests run before the first measurement, which is what growth is counted from.
    """

    model: str
    dtype: str
    chunk_size: int
    num_tokens: int
    num_requests: int = 1
    num_before: int = 0


class Residence(NamedTuple):
    """Bytes. ``growth``: how much resident memory grew; ``peak_growth``: how much it had grown at its highest;
    ``in_use`` and ``slots``: growth of what the cache says requests hold, and the part that has nothing to do with
    length."""

    growth: int
    peak_growth: int
    in_use: int
    slots: int


def residence(task: Task) -> Residence:
    """Run ``task`` in a new process. Raises ``RuntimeError`` with what it wrote if that fails."""
    child = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(task._asdict())],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    if child.returncode:
        raise RuntimeError(f"measuring memory failed with status {child.returncode}: {child.stderr.strip()[-2000:]}")
    return Residence(**json.loads(child.stdout.splitlines()[-1]))


def can_measure() -> bool:
    """Whether this system tells what is needed: Linux does."""
    return pathlib.Path("/proc/self/clear_refs").exists() and pathlib.Path("/proc/self/smaps_rollup").exists()


def measure(task: Task) -> Residence:
    """Run ``task`` in this process, which should be fresh."""
    torch.set_num_threads(1)
    model_config = load_model_config(task.model)
    config = EngineConfig(
        model=task.model,
        dtype=task.dtype,
        chunk_size=task.chunk_size,
        max_running=1,
        max_context=task.num_tokens,
        draft="none",
    )
    positions = model_config.max_position_embeddings
    config = resolve(config, model_dir=task.model, device_type="cpu", max_positions=positions, own_draft="none")
    engine = load_engine(config, Groups.single(), torch.device("cpu"), model_config=model_config)
    # Loading leaves free memory behind; a cache that lies in it would not be seen to grow.
    _give_back_free_memory()
    engine = sibling(engine, max_running=1 + task.num_before + task.num_requests)
    cache = engine.cache
    _prefill(engine, min(NUM_WARM_TOKENS, task.num_tokens))
    for _ in range(task.num_before):
        _prefill(engine, task.num_tokens)
    _give_back_free_memory()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before, anonymous, in_use = _memory("Rss"), _memory("Anonymous"), cache.bytes_in_use
    for _ in range(task.num_requests):
        _prefill(engine, task.num_tokens)
    # Not getrusage: its peak starts with that of the process that started this one, and cannot be reset.
    peak = _kilobytes("/proc/self/status", "VmHWM")
    _give_back_free_memory()
    return Residence(
        # Without pages of files, such as code that runs for the first time.
        growth=_memory("Anonymous") - anonymous,
        peak_growth=peak - before,
        in_use=cache.bytes_in_use - in_use,
        slots=task.num_requests * cache.layout.bytes_per_slot,
    )


def _prefill(engine: Engine, num_tokens: int) -> None:
    """A new request of ``num_tokens`` tokens, which stays in the cache; logits of its last token, as a prompt needs."""
    cache, vocab_size = engine.cache, engine.model.config.vocab_size
    slot = cache.acquire()
    assert cache.reserve(slot, num_tokens), f"no room for {num_tokens} tokens"
    for start in range(0, num_tokens, engine.config.chunk_size):
        stop = min(start + engine.config.chunk_size, num_tokens)
        # Any ids will do, as long as they differ.
        tokens = [(7 * position + slot) % vocab_size for position in range(start, stop)]
        step = build_step(
            [Span(slot, start, tokens, int(stop == num_tokens))], cache.page_table, cache.layout.ratios, vocab_size
        )
        engine.logits(step)


def _give_back_free_memory() -> None:
    """Make the C library return the memory it keeps for later to the operating system, so that it is not counted."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _memory(field: str) -> int:
    # This file counts pages; cheaper ones may lag by some hundred kilobytes.
    return _kilobytes("/proc/self/smaps_rollup", field)


def _kilobytes(path: str, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", pathlib.Path(path).read_text(), re.MULTILINE)
    assert found, f"{path} has no {field}"
    return 1024 * int(found.group(1))


if __name__ == "__main__":
    print(json.dumps(measure(Task(**json.loads(sys.argv[1])))._asdict()))
