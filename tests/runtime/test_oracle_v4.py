"""The whole model against tensors of other code: logits, and what happens on the way to them.

Every case runs in one step, in uneven chunks and token by token, with plain and with compiled kernels, and cut over
several ranks. Besides the logits the residual streams, both sublayers' outputs, the experts and their weights, the
entries that the indexer chose, and the compressed entries in the cache must be those of the golden run.
"""

import pathlib

import pytest
import torch
from dspark.layers.kernels import Kernels
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.cache import Cache, CacheLayout
from dspark.runtime.checkpoint import CheckpointReader
from dspark.runtime.model_config import load_model_config
from dspark.runtime.models.deepseek_v4 import DeepseekV4, attention_sizes
from dspark.runtime.step import Span, build_step
from safetensors.torch import load_file

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "v4"
HERE = ["mixed_yarn", "fp8_release"]
SHARED = ["sliding_only", "csa_only", "hca_only", "mixed_hash", "softmax_router", "orig_names"]
CPU = torch.device("cpu")
# Absolute. The streams reach 30, everything else is of order one, logits have a standard deviation of 4.
TOLERANCE = 2e-4
GOLDEN_NAMES = {"streams": "hidden", "attention_out": "attn_out", "moe_out": "mlp_out"}


@pytest.fixture(params=HERE + SHARED)
def folder(request):
    """A case's folder: config, checkpoint and golden tensors."""
    if request.param in HERE:
        return DATA / request.param
    return request.getfixturevalue("shared") / "oracle" / "v4" / request.param


class Recorder:
    """A probe that keeps [B, length, ...] pieces of every tensor and joins them over the steps."""

    def __init__(self):
        self.pieces, self.shape = {}, None

    def __call__(self, name, layer, value):
        self.pieces.setdefault((name, layer), []).append(value.unflatten(0, self.shape).clone())

    def joined(self):
        return {key: torch.cat(pieces, dim=1) for key, pieces in self.pieces.items() if key[0] != "selected"}

    def selected(self, layer, row, position):
        """The chosen entries of one token, sorted; the widths of different steps differ."""
        for piece in self.pieces["selected", layer]:
            if position < piece.shape[1]:
                return sorted(t for t in piece[row, position].tolist() if t >= 0)
            position -= piece.shape[1]


def cached_entries(cache, layout, layer, slot, count):
    """The first ``count`` compressed entries of a request, found through the page table."""
    per_page = layout.page_tokens // layout.layers[layer].ratio
    pages = cache.page_table[slot].tolist()
    pool = cache.layers[layer].entries
    return torch.stack([pool[pages[t // per_page], t % per_page] for t in range(count)])


def check_inside(seen, golden, cache, layout, slots, num_rows):
    """What differs from the golden run beyond the tolerance, in words."""
    wrong = []

    def compare(what, actual, expected):
        error = (actual - expected).abs().max().item()
        if not error <= TOLERANCE:
            wrong.append(f"{what} is off by {error:.2e}")

    joined = seen.joined()
    for (name, layer), value in joined.items():
        if name in GOLDEN_NAMES:
            compare(f"{name} {layer}", value, golden[f"{GOLDEN_NAMES[name]}.{layer}"])
        elif name == "final_norm":
            compare(name, value, golden[name])
    for layer in range(len(layout.layers)):
        chosen, order = joined["experts", layer].sort(-1)
        expected, expected_order = golden[f"router_idx.{layer}"].long().sort(-1)
        if not torch.equal(chosen, expected):
            wrong.append(f"experts {layer}")
        weights = golden[f"router_w.{layer}"].gather(-1, expected_order)
        compare(f"expert weights {layer}", joined["expert_weights", layer].gather(-1, order), weights)
        ratio = layout.layers[layer].ratio
        if ratio:
            entries = torch.stack([cached_entries(cache, layout, layer, slot, num_rows // ratio) for slot in slots])
            compare(f"compressed entries {layer}", entries, golden[f"compressed_kv.{layer}"])
        if layout.layers[layer].kind == "csa":
            picks = golden[f"index_topk.{layer}"]
            for row in range(picks.shape[0]):
                for position in range(num_rows):
                    expected = sorted(t for t in picks[row, position].tolist() if t >= 0)
                    if seen.selected(layer, row, position) != expected:
                        wrong.append(f"selected entries {layer} of token {position} of sequence {row}")
    return wrong


def run_case(rank, world, folder, backend):
    """Logit error and everything else that is wrong, by cut."""
    groups = Groups.build(Topology(tp=world), rank)
    config, golden = load_model_config(folder), load_file(folder / "golden.safetensors")
    model = DeepseekV4(config, CheckpointReader(folder, config), groups, Kernels(backend), 128, CPU)
    layout = CacheLayout(tuple(attention_sizes(config, n) for n in range(config.num_layers)), 1, 4)
    ids = golden["input_ids"]
    num_sequences, length = ids.shape
    results = {}
    for cut, chunks in (("one step", [length]), ("chunks", golden["chunks"].tolist()), ("stepwise", [1] * length)):
        assert sum(chunks) == length
        cache = Cache(layout, num_sequences + 1, 8, 128, CPU, torch.float32)
        slots = [cache.acquire() for _ in range(num_sequences + 1)][1:]
        assert all(cache.reserve(slot, length) for slot in slots)
        seen, logits, start = Recorder(), [], 0
        for chunk in chunks:
            spans = [Span(s, start, ids[n, start : start + chunk].tolist(), chunk) for n, s in enumerate(slots)]
            seen.shape = (num_sequences, chunk)
            step = build_step(spans, cache.page_table, layout.ratios, config.vocab_size)
            logits.append(model.forward(step, cache, seen).logits.unflatten(0, seen.shape))
            start += chunk
        error = (torch.cat(logits, dim=1) - golden["logits"]).abs().max().item()
        results[cut] = (error, check_inside(seen, golden, cache, layout, slots, length))
    return results


def check(results):
    assert set(results) == {"one step", "chunks", "stepwise"}
    for cut, (error, wrong) in results.items():
        assert error <= TOLERANCE and not wrong, f"{cut}: logits are off by {error:.2e}; {'; '.join(wrong[:9])}"


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_one_rank(folder, backend):
    if backend == "numba":
        pytest.importorskip("numba")
    check(run_case(0, 1, folder, backend))


@pytest.mark.parametrize("world", [2, 4])
def test_several_ranks(folder, world, run_ranks):
    pytest.importorskip("numba")
    for results in run_ranks(run_case, world, folder, "numba"):
        check(results)
