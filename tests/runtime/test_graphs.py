"""Steps that are filled up to fixed sizes, as CUDA graphs need them, give what the steps themselves give.

Recording is played on the CPU: what is recorded is the forward on the buffers that stay, and replaying runs it again.
"""

import re

import pytest
import torch
from dspark.layers.kernels import Kernels
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.cache import Cache
from dspark.runtime.checkpoint import CheckpointReader, bundled_model
from dspark.runtime.engine_config import EngineConfig
from dspark.runtime.graphs import Graphs
from dspark.runtime.load import graph_obstacle, make_cache
from dspark.runtime.model_config import load_model_config
from dspark.runtime.models.base import ModelOutput
from dspark.runtime.models.deepseek_v4 import DeepseekV4
from dspark.runtime.step import Span, build_step

CPU = torch.device("cpu")


class Tape:
    """Counts recordings; a replay writes the forward's results over the first ones."""

    def __init__(self):
        self.num_recorded = 0

    def __call__(self, forward):
        self.num_recorded += 1
        output = ModelOutput(*(tensor.clone() for tensor in forward()))

        def replay():
            for kept, new in zip(output, forward()):
                kept.copy_(new)

        return replay, output


def run_padded(groups):
    """Steps as they are and filled up, on the ranks of ``groups``: the same logits and the same cache."""
    config = load_model_config(bundled_model())
    model = DeepseekV4(config, CheckpointReader(bundled_model(), config), groups, Kernels("torch"), 512, CPU)
    options = EngineConfig(dtype="float32", max_running=4, max_context=512)
    caches = [make_cache(config, options, CPU, max_verify=5) for _ in range(2)]
    tape = Tape()
    graphs = Graphs(model, caches[1], groups, 512, tape)
    made = torch.Generator().manual_seed(1)
    # Slot 0 holds a request too: rows that fill up a step must not write to it.
    slots, lengths = [], [200, 127, 30]
    for cache in caches:
        slots = [cache.acquire() for _ in lengths]
        assert all(cache.reserve(slot, 300) for slot in slots)
    assert 0 in slots

    def ids(count):
        return torch.randint(0, config.vocab_size, (count,), generator=made).tolist()

    def both(spans, has_prefill):
        steps = [
            build_step(spans, c.page_table, c.layout.ratios, config.vocab_size, has_prefill=has_prefill) for c in caches
        ]
        expected = model.forward(steps[0], caches[0])
        assert graphs.fits(steps[1]) is not has_prefill
        actual = model.forward(steps[1], caches[1]) if has_prefill else graphs.run(steps[1])
        torch.testing.assert_close(actual.logits, expected.logits, rtol=2e-4, atol=2e-4)

    both([Span(slot, 0, ids(length), 1) for slot, length in zip(slots, lengths)], True)
    # Windows of both ratios close at some of these positions; the counts need padding, and two of them the same graph.
    for widths in ([1, 1, 1], [5, 1, 3], [3, 5, 2], [1, 0, 1]):
        spans = [Span(s, n, ids(w), max(w - 1, 1)) for s, n, w in zip(slots, lengths, widths) if w]
        both(spans, False)
        lengths = [length + width for length, width in zip(lengths, widths)]
    assert tape.num_recorded == 3 and isinstance(caches[0], Cache)
    for before, after in zip(caches[0].layers, caches[1].layers):
        for one, other in zip(before[:2], after[:2]):
            torch.testing.assert_close(other, one, rtol=2e-4, atol=2e-4)


def test_padded_steps_give_the_same_logits_and_the_same_cache():
    run_padded(Groups.single())


def test_ranks_that_share_heads_pad_alike(run_ranks):
    run_ranks(lambda rank, world: run_padded(Groups.build(Topology(tp=world), rank)), 2)


@pytest.mark.parametrize(
    "options,sizes,why",
    [
        ({"graphs": False}, {}, "--no-graphs"),
        ({"dispatcher": "normal"}, {"tp": 2, "ep": 2}, "dispatcher normal waits"),
        ({"eplb_record": "loads.npz"}, {}, "counted"),
        ({"eplb_interval": 8}, {}, "counted"),
        ({}, {"tp": 2, "dp": 2}, r"rows of their own \(pp 1, dp 2, cp 1\)"),
        ({}, {"tp": 2, "cp": 2}, "rows of their own"),
        ({}, {"pp": 2}, "rows of their own"),
        ({"overlap": "tbo"}, {"tp": 2}, "--overlap tbo"),
        ({"replica_split": "weighted", "num_redundant_experts": 2}, {"tp": 2, "ep": 2}, "--replica-split weighted"),
    ],
)
def test_what_no_graph_can_hold(options, sizes, why):
    config = load_model_config(bundled_model())
    assert re.search(why, graph_obstacle(EngineConfig(**options), Topology(**sizes), config))


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"tp": 4, "ep": 2}])
def test_what_a_graph_can_hold(sizes):
    config = load_model_config(bundled_model())
    assert graph_obstacle(EngineConfig(num_redundant_experts=2), Topology(**sizes), config) is None
