"""A layer of native sparse attention against the plain functions of flash-linear-attention, in steps of any length."""

import json
import pathlib

import pytest
import torch
from dspark.comm.collectives import start_all_reduce
from dspark.layers.attention.nsa import NSASizes, NSAttention
from dspark.layers.kernels import Kernels
from dspark.layers.params import Scope
from dspark.layers.rope import build_rope_table
from dspark.layers.stages import drain
from dspark.parallel.groups import Group
from dspark.runtime.cache import Cache, CacheLayout
from dspark.runtime.step import Span, build_step
from safetensors import safe_open

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "models" / "nsa_layer.safetensors"
CPU = torch.device("cpu")


class Weights:
    def __init__(self, tensors):
        self.tensors = tensors

    def take(self, name, *, dim=0, start=0, stop=None, dtype=None):
        whole = self.tensors[name]
        return whole.narrow(dim, start, (whole.shape[dim] if stop is None else stop) - start)


@pytest.mark.parametrize("lengths", [[83], [1, 30, 9, 2, 41], [7] * 11 + [6], [1] * 83], ids=len)
@torch.inference_mode()
def test_against_other_code(lengths):
    with safe_open(DATA, "pt") as file:
        meta = json.loads(file.metadata()["meta"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    block, heads = meta["block_size"], (meta["num_heads"], meta["num_kv_heads"], meta["head_dim"])
    sizes = NSASizes(16, *heads, block, block, block, meta["block_counts"], meta["window"])
    rope, alone = build_rope_table(sizes.rope_dim, meta["rope_theta"], 128), Group.alone()
    layer = NSAttention(Scope(Weights(tensors)), sizes, rope, alone, Kernels("torch"), 0)
    layout = CacheLayout((sizes.cache(1),), 1, 4)
    cache, blocks = Cache(layout, 2, 2, 128, CPU, torch.float32), {}
    cache.acquire()
    slot = cache.acquire()
    assert cache.reserve(slot, 128)
    start, worst = 0, 0.0
    for length in lengths:

        def probe(name, layer, value, start=start):
            blocks.update({start + i: row for i, row in enumerate(value)} if name == "selected" else {})

        rows = slice(start, start + length)
        plan = build_step([Span(slot, start, [0] * length, 1)], cache.page_table, layout.ratios, 1).plan
        out = drain(
            layer.stages(tensors["x"][rows], cache.layers[0], plan, lambda y: start_all_reduce(y, alone), probe)
        )
        worst = max(worst, (out - tensors["out"][rows]).abs().max().item())
        start += length
    assert start == 83 and worst < 1e-5
    for position in range(83):
        for mine, theirs in zip(blocks[position], tensors["blocks"][position]):
            seen = {block for block in mine.tolist() if block <= position // sizes.block_size}
            assert seen == {block for block in theirs.tolist() if block >= 0}, position
