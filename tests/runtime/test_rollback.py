"""Dropping rejected tokens: set the length, go on writing, and nothing shows that they were ever there.

A verify step of V rows begins at position P. Its first ``a`` tokens are those of a fixed sequence, the others are not
and are rejected; decoding then goes on along the sequence from P + a. For every width V from 1 to 9, every ``a`` from 0
to V and every phase of the longest compress window, all logits must be those of a dense forward of the sequence, which
sees no rejected token and reads no ring. The cases of one width are requests of one batch.
"""

import functools
import itertools
import pathlib
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from dspark.layers.kernels import Kernels
from dspark.parallel.groups import Groups
from dspark.runtime.cache import Cache, CacheLayout
from dspark.runtime.checkpoint import CheckpointReader, RandomWeights
from dspark.runtime.model_config import ModelConfig, RopeConfig, load_model_config
from dspark.runtime.models.deepseek_v4 import DeepseekV4, attention_sizes
from dspark.runtime.step import Span, build_step
from safetensors.torch import load_file

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "v4"
CPU = torch.device("cpu")
WIDTHS = range(1, 10)
PHASES = 16
# Every ring has wrapped before the first verify step, so that its rows overwrite what was kept.
FIRST = 27
# After the rollback: a token by itself, then enough for every window to close.
CONTINUATION = (1, PHASES + 1)
LENGTH = FIRST + PHASES - 1 + WIDTHS[-1] + sum(CONTINUATION)
TOLERANCE = 1e-4
BROKEN = 1e-2


@dataclass(frozen=True)
class CutRings(CacheLayout):
    """A layout whose two kinds of rings are lengthened by themselves."""

    spare_window: int = 0
    spare_raw: int = 0

    def window_rows(self, sizes):
        return super().window_rows(sizes) + self.spare_window

    def raw_rows(self, sizes):
        rows = super().raw_rows(sizes)
        return rows + self.spare_raw if rows else 0


class Subject(NamedTuple):
    """A model, the sequence, and its dense logits [LENGTH, V]."""

    model: DeepseekV4
    tokens: list[int]
    logits: torch.Tensor


def small_config(kind, ratio):
    return ModelConfig(
        vocab_size=61,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        head_dim=8,
        rope_dim=4,
        q_lora_rank=8,
        o_groups=2,
        o_lora_rank=4,
        index_num_heads=2,
        index_head_dim=8,
        index_topk=3,
        num_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=1,
        moe_intermediate_size=8,
        scoring_func="sqrtsoftplus",
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        sliding_window=12,
        swiglu_limit=10.0,
        hc_mult=2,
        hc_sinkhorn_iters=3,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        main_rope=RopeConfig(1e4),
        compress_rope=RopeConfig(1.6e5),
        layer_kinds=(kind, kind),
        compress_ratios=(ratio, ratio),
        hash_layers=(True, False),
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
        num_nextn_predict_layers=0,
        dtype="float32",
    )


def layout_of(model, width, **spare):
    config = model.config
    sizes = tuple(attention_sizes(config, layer) for layer in range(config.num_layers))
    return CutRings(sizes, max_verify=width, itemsize=4, **spare)


def forward(model, cache, spans):
    step = build_step(spans, cache.page_table, cache.layout.ratios, model.config.vocab_size)
    return model.forward(step, cache).logits


@functools.cache
def subject(name, backend):
    """A random model of one kind with its own dense forward, or the mixed one with golden logits of other code."""
    if name == "mixed":
        folder = DATA / "mixed_yarn"
        config, golden = load_model_config(folder), load_file(folder / "golden.safetensors")
        source = CheckpointReader(folder, config)
        model = DeepseekV4(config, source, Groups.single(), Kernels(backend), 128, CPU)
        return Subject(model, golden["input_ids"][0, :LENGTH].tolist(), golden["logits"][0, :LENGTH])
    kind, ratio = name.split()
    config = small_config(kind, int(ratio))
    model = DeepseekV4(config, RandomWeights(config, seed=5), Groups.single(), Kernels(backend), 128, CPU)
    tokens = torch.randint(0, 61, (LENGTH,), generator=torch.Generator().manual_seed(8)).tolist()
    cache = Cache(layout_of(model, 1), 1, 1, 128, CPU, torch.float32)
    assert cache.reserve(cache.acquire(), LENGTH)
    return Subject(model, tokens, forward(model, cache, [Span(0, 0, tokens, LENGTH)]))


def rejected(token, place, vocab_size):
    """A token that is not ``token``; another one at every place."""
    return (token + 1 + place % (vocab_size - 1)) % vocab_size


def run(subject, width, fewest_accepted=0, **spare):
    """The largest logit error over all phases and numbers of accepted tokens."""
    model, tokens, expected = subject
    vocab_size = model.config.vocab_size
    cases = list(itertools.product(range(FIRST, FIRST + PHASES), range(fewest_accepted, width + 1)))
    layout = layout_of(model, width, **spare)
    num_pages = max(layout.pages_for(LENGTH), 1)
    cache = Cache(layout, len(cases), len(cases) * num_pages, 128, CPU, torch.float32)
    slots = [cache.acquire() for _ in cases]
    assert all(cache.reserve(slot, LENGTH) for slot in slots)
    forward(model, cache, [Span(slot, 0, tokens[:begin], 0) for slot, (begin, _) in zip(slots, cases)])
    blocks = [
        tokens[begin : begin + accepted]
        + [rejected(tokens[p], 7 * p + width, vocab_size) for p in range(begin + accepted, begin + width)]
        for begin, accepted in cases
    ]
    spans = [Span(slot, begin, block, width) for slot, (begin, _), block in zip(slots, cases, blocks)]
    error = 0.0
    for (begin, accepted), logits in zip(cases, forward(model, cache, spans).split(width)):
        if accepted:
            error = max(error, (logits[:accepted] - expected[begin : begin + accepted]).abs().max().item())
    starts = [begin + accepted for begin, accepted in cases]
    for length in CONTINUATION:
        spans = [Span(slot, start, tokens[start : start + length], length) for slot, start in zip(slots, starts)]
        for start, logits in zip(starts, forward(model, cache, spans).split(length)):
            error = max(error, (logits - expected[start : start + length]).abs().max().item())
        starts = [start + length for start in starts]
    return error


KINDS = ["sliding 0", "csa 4", "hca 8", "hca 16", "mixed"]


@pytest.fixture(params=["torch", "numba"])
def backend(request):
    if request.param == "numba":
        pytest.importorskip("numba")
    return request.param


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_remains_of_rejected_tokens(kind, backend):
    widths = WIDTHS if backend == "numba" else (1, 4, 9)
    for width in widths:
        error = run(subject(kind, backend), width)
        assert error < TOLERANCE, f"width {width}: logits are off by {error:.1e}"


RINGS = [("sliding 0", "window"), ("csa 4", "window"), ("csa 4", "raw"), ("hca 16", "window"), ("hca 16", "raw")]


@pytest.mark.parametrize("kind,ring", RINGS)
@pytest.mark.parametrize("width", [1, 6, 9])
def test_a_ring_one_row_too_small_is_noticed(kind, ring, width):
    """With one token committed a window of w needs w + V - 2 rows, a compressor that reaches r rows back r + V - 2.

    The layout has two more. Committing nothing takes one of them.
    """
    tested = subject(kind, "torch")
    assert run(tested, width, fewest_accepted=1, **{f"spare_{ring}": -2}) < TOLERANCE
    assert run(tested, width, fewest_accepted=1, **{f"spare_{ring}": -3}) > BROKEN
    assert run(tested, width, fewest_accepted=0, **{f"spare_{ring}": -1}) < TOLERANCE
    assert run(tested, width, fewest_accepted=0, **{f"spare_{ring}": -2}) > BROKEN


def test_spare_rows_shorten_every_ring():
    """What the tests above do to one ring at a time is what ``spare_rows`` does to all."""
    model = subject("csa 4", "torch").model
    layout = layout_of(model, 3)
    shorter = layout_of(model, 3, spare_rows=-2)
    for sizes in layout.layers:
        assert layout.window_rows(sizes) - shorter.window_rows(sizes) == 2
        assert layout.raw_rows(sizes) - shorter.raw_rows(sizes) == 2
    assert run(subject("csa 4", "torch"), 5, fewest_accepted=1, spare_rows=-2) < TOLERANCE
    assert run(subject("csa 4", "torch"), 5, fewest_accepted=1, spare_rows=-3) > BROKEN


@pytest.mark.parametrize("kind", ["csa 4", "hca 16", "mixed"])
def test_many_rollbacks_in_a_row(kind, backend):
    """Decoding by blocks of five of which the first 1, 2, .. 5 survive in turn, all the way from the first token."""
    model, tokens, expected = subject(kind, backend)
    cache = Cache(layout_of(model, 5), 1, 1, 128, CPU, torch.float32)
    slot = cache.acquire()
    assert cache.reserve(slot, LENGTH)
    at = 0
    for accepted in itertools.cycle([1, 3, 5, 2, 4]):
        if at + 5 > LENGTH:
            break
        tail = [rejected(tokens[p], 3 * p, model.config.vocab_size) for p in range(at + accepted, at + 5)]
        logits = forward(model, cache, [Span(slot, at, tokens[at : at + accepted] + tail, 5)])
        assert (logits[:accepted] - expected[at : at + accepted]).abs().max() < TOLERANCE, at
        at += accepted
