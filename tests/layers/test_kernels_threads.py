"""Compiled CPU kernels on threads: every number as on one thread, whatever rows a thread gets."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

# Three threads of eight that numba may use; they share few numbers of rows evenly. In a process of its own: where
# threads have run, none may fork.
COMPARE = """
import random, torch
from dspark.layers.kernels import Kernels
from dspark.layers.kernels.cpu import draft_block, entry_selection, hyper_connection, linear, moe, projection
from dspark.layers.kernels.cpu import sparse_attention
from dspark.layers.kernels.cpu.threads import use_threads
from dspark.parallel.groups import Groups
from dspark.runtime.checkpoint import CheckpointReader, bundled_model
from dspark.runtime.draft.base import DraftRequests, DraftRoom
from dspark.runtime.draft.dspark import DSparkDrafter
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import make_cache
from dspark.runtime.model_config import load_model_config
from dspark.runtime.models.deepseek_v4 import DeepseekV4
from dspark.runtime.step import Span, build_step

folder = bundled_model()
config, random, cpu = load_model_config(folder), random.Random(3), torch.device("cpu")
sizes = ((131, 47, 5), (6, 1, 3), (9, 9, 2))  # tokens of each request, step by step
steps = [[[random.randrange(8, config.vocab_size) for _ in range(n)] for n in row] for row in sizes]


def logits(num_threads):
    torch.set_num_threads(num_threads)
    source, groups, kernels = CheckpointReader(folder, config), Groups.single(), Kernels("numba")
    model = DeepseekV4(config, source, groups, kernels, 512, cpu, config.dspark.target_layer_ids)
    assert torch.get_num_threads() == use_threads() == num_threads
    drafter = DSparkDrafter.load(config, source, model, groups, kernels, DraftRoom(4, 512, 8), 7)
    settings = EngineConfig(model=folder, max_running=4)
    settings = resolve(settings, model_dir=folder, device_type="cpu", max_positions=512, own_draft="none")
    cache = make_cache(config, settings, cpu)
    slots = [cache.acquire() for _ in sizes[0]]
    found, starts = [], [0] * len(sizes[0])
    for tokens in steps:
        spans = []
        for i, (slot, part) in enumerate(zip(slots, tokens)):
            cache.reserve(slot, starts[i] + len(part))
            spans.append(Span(slot, starts[i], part, len(part)))
            starts[i] += len(part)
        step = build_step(spans, cache.page_table, cache.layout.ratios, config.vocab_size)
        output = model.forward(step, cache)
        drafter.observe(output.taps, step)
        found.append(output.logits)
    return [*found, *drafter.forward(DraftRequests(slots, starts, [9, 99, 999], (3,)))]


one, three = logits(1), logits(3)
for alone, together in zip(one, three, strict=True):
    assert torch.equal(alone, together), (alone - together).abs().max()
ran = [hyper_connection._read_streams_shared, hyper_connection._write_streams_shared, linear._linear_shared]
ran += [linear._grouped_linear_shared, moe._add_experts_shared, projection._project_shared]
ran += [draft_block._block_shared, entry_selection._select_shared, sparse_attention._attend_shared]
idle = [kernel.py_func.__name__ for kernel in ran if not kernel.signatures]
assert not idle, f"ran on one thread only: {idle}"
print("same")
"""


def test_threads_change_no_bit() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "3", "NUMBA_NUM_THREADS": "8", "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", COMPARE], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["same"]
