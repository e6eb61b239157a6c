"""Every decoder against transformers, on tiny random checkpoints that it wrote: logits in one step, in uneven chunks
and token by token, cut over ranks, and what the cache keeps."""

import pytest
import torch
from dspark.layers.kernels import Kernels
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.cache import Cache
from dspark.runtime.checkpoint import CheckpointReader
from dspark.runtime.load import cache_layout
from dspark.runtime.model_config import load_model_config
from dspark.runtime.models import family
from dspark.runtime.step import Span, build_step
from dspark.runtime.verbs.check import check as check_folder

CPU = torch.device("cpu")
TOLERANCE = 2e-4
CASES = [
    "qwen3_gqa",
    "qwen3_mha",
    "qwen3_mqa_sliding",
    "llama",
    "llama3",
    "deepseek_v3",
    "deepseek_v3_yarn",
    "deepseek_v32",
]
CUTS = {"one step": [40], "chunks": [1, 12, 3, 17, 2, 5], "stepwise": [1] * 40}


def run(rank, world, folder, ids, logits, cuts, backend="torch"):
    """How far the logits [2, 40, V] are off, by cut."""
    groups = Groups.build(Topology(tp=world), rank)
    config = load_model_config(folder)
    reader = CheckpointReader(folder, config)
    model = family(config.model_type).build(config, reader, groups, Kernels(backend), 64, CPU)
    assert not reader.untaken() or world > 1
    layout = cache_layout(config, range(config.num_layers), 1, 4, world)
    found = {}
    for cut in cuts:
        cache = Cache(layout, 3, 4, 64, CPU, torch.float32)
        slots = [cache.acquire() for _ in range(3)][1:]
        assert all(cache.reserve(slot, 40) for slot in slots)
        parts, start = [], 0
        for length in CUTS[cut]:
            spans = [Span(s, start, ids[n, start : start + length].tolist(), length) for n, s in enumerate(slots)]
            step = build_step(spans, cache.page_table, layout.ratios, config.vocab_size)
            parts.append(model.forward(step, cache).logits.unflatten(0, (2, length)))
            start += length
        found[cut] = (torch.cat(parts, dim=1) - logits).abs().max().item()
    return found


def check(found):
    for cut, error in found.items():
        assert error <= TOLERANCE, f"{cut}: logits are off by {error:.2e}"


@pytest.mark.parametrize("case", CASES)
def test_one_rank(case, hf_checkpoint):
    folder, ids, logits = hf_checkpoint(case)
    assert logits.std() > 0.5
    check(run(0, 1, folder, ids, logits, CUTS))


def test_compiled_kernels(hf_checkpoint):
    pytest.importorskip("numba")
    folder, ids, logits = hf_checkpoint("deepseek_v3")
    check(run(0, 1, folder, ids, logits, CUTS, "numba"))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_several_ranks(case, world, hf_checkpoint, run_ranks):
    folder, ids, logits = hf_checkpoint(case)
    for found in run_ranks(run, world, folder, ids, logits, ["one step", "chunks"]):
        check(found)


@pytest.mark.parametrize(
    "case, numbers",
    [("qwen3_gqa", 3 * 2 * 2 * 8), ("qwen3_mqa_sliding", 2 * 2 * 8), ("deepseek_v3", 3 * (16 + 8))]
    + [("deepseek_v32", 3 * (16 + 8 + 16))],
)
def test_check_prints_what_the_kind_promises(case, numbers, hf_checkpoint):
    """Per token: keys and values of the key heads that are not in sliding layers, or latents and index keys."""
    report = check_folder(hf_checkpoint(case)[0], Topology(), 4, 1, 64)
    assert report["ok"] and report["memory"]["cache_per_token"] == 4 * numbers
