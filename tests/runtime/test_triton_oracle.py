"""The whole model with Triton's kernels against tensors of other code: in the interpreter, or on a GPU."""

import pathlib

import pytest
import torch
from dspark.layers.kernels import choose
from dspark.layers.params import OnDevice
from dspark.parallel.groups import Groups
from dspark.runtime.cache import Cache, CacheLayout
from dspark.runtime.checkpoint import CheckpointReader
from dspark.runtime.model_config import load_model_config
from dspark.runtime.models.deepseek_v4 import DeepseekV4, attention_sizes
from dspark.runtime.step import Span, build_step
from safetensors.torch import load_file

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "data" / "v4" / "mixed_yarn"
NUM_BEFORE = 94  # tokens that plain kernels put into the cache
CHUNKS = (2, 1)  # tokens a step behind them; windows of all kinds close, and more entries are there than are chosen


def test_logits_are_the_golden_ones():
    """Of two sequences that share the steps, behind a cache that plain kernels filled.

    Logits have a standard deviation of 4.
    """
    pytest.importorskip("triton", reason="without triton there are no GPU kernels to run")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config, golden = load_model_config(FOLDER), load_file(FOLDER / "golden.safetensors")
    source = OnDevice(CheckpointReader(FOLDER, config), device)
    plain, model = (
        DeepseekV4(config, source, Groups.single(), choose(device, torch.float32, choice=name), 128, device)
        for name in ("torch", "triton")
    )
    layout = CacheLayout(tuple(attention_sizes(config, n) for n in range(config.num_layers)), 1, 4)
    ids = golden["input_ids"]
    cache = Cache(layout, len(ids) + 1, 8, 128, device, torch.float32)
    slots = [cache.acquire() for _ in range(len(ids) + 1)][1:]
    assert all(cache.reserve(slot, ids.shape[1]) for slot in slots)
    start, logits = 0, []
    for chunk in (NUM_BEFORE, *CHUNKS):
        spans = [Span(s, start, ids[n, start : start + chunk].tolist(), chunk) for n, s in enumerate(slots)]
        step = build_step(spans, cache.page_table, layout.ratios, config.vocab_size)
        runner = model if start else plain
        logits.append(runner.forward(step, cache).logits.unflatten(0, (len(ids), chunk)).cpu())
        start += chunk
    error = (torch.cat(logits, dim=1) - golden["logits"]).abs().max().item()
    assert error <= 2e-4, f"logits are off by {error:.2e}"
