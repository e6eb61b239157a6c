"""The law of the sampling parameters against the oracle and against a plain loop, and draws against their law."""

import math
import pathlib

import numpy as np
import pytest
import scipy.stats
import torch
from dspark.layers.kernels.rejection import draw
from dspark.runtime.random import Purpose, uniforms
from dspark.runtime.request import SamplingParams
from dspark.runtime.sampling import SamplingRows, greedy_ids, log_probs, target_probs
from safetensors.torch import load_file

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "sampling"


def loop_law(logits, params):
    """The documented law in a plain loop over one row, in double precision."""
    vocab = len(logits)
    if params.temperature == 0:
        return [1.0 if i == min(range(vocab), key=lambda j: (-logits[j], j)) else 0.0 for i in range(vocab)]
    order = sorted(range(vocab), key=lambda j: (-logits[j], j))
    top = logits[order[0]]
    weight = [math.exp((x - top) / params.temperature) for x in logits]
    if params.top_k:
        order = order[: params.top_k]
    mass, kept, before = sum(weight[j] for j in order), [], 0.0
    for j in order:
        if params.top_p < 1 and before >= params.top_p * mass:
            break
        kept.append(j)
        before += weight[j]
    kept = [j for j in kept if weight[j] >= params.min_p * weight[kept[0]]]
    mass = sum(weight[j] for j in kept)
    return [weight[j] / mass if j in set(kept) else 0.0 for j in range(vocab)]


def test_filters_match_the_oracle():
    oracle = load_file(DATA / "filters.safetensors")
    logits, expected = oracle["logits"], oracle["probs"]
    batch, width, vocab = logits.shape
    params = [
        SamplingParams(temperature=float(t), top_k=int(k), top_p=float(p))
        for t, k, p in zip(oracle["temperature"], oracle["top_k"], oracle["top_p"], strict=True)
    ]
    rows = SamplingRows.of([p for p in params for _ in range(width)])
    probs = target_probs(logits.reshape(-1, vocab), rows).reshape(batch, width, vocab)
    torch.testing.assert_close(probs, expected, rtol=0, atol=1e-14)


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3, top_k=5),
    SamplingParams(temperature=1.5, top_k=1),
    SamplingParams(temperature=2.0, top_k=300, top_p=0.97),
    SamplingParams(temperature=1.0, top_k=256),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=50.0, top_p=0.9),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=9.0, min_p=0.05),
    SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=10**9, top_p=0.5),
    SamplingParams(temperature=1e-3, top_p=0.99),
]


@pytest.mark.parametrize("vocab", [1, 7, 256, 1000])
@pytest.mark.parametrize("ties", [False, True])
def test_laws_match_a_plain_loop(vocab, ties):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(PARAMS), vocab, generator=generator, dtype=torch.float64) * 3
    if ties:
        logits = logits.round()
    probs = target_probs(logits, SamplingRows.of(PARAMS))
    for row, params in enumerate(PARAMS):
        expected = torch.tensor(loop_law(logits[row].tolist(), params), dtype=torch.float64)
        torch.testing.assert_close(probs[row], expected, rtol=1e-10, atol=1e-14, msg=lambda m, p=params: f"{p}: {m}")


def test_a_row_does_not_depend_on_its_batch():
    logits = torch.randn(len(PARAMS), 1536, generator=torch.Generator().manual_seed(3))
    together = target_probs(logits, SamplingRows.of(PARAMS))
    for row, params in enumerate(PARAMS):
        alone = target_probs(logits[row : row + 1], SamplingRows.of([params]))
        assert torch.equal(alone[0], together[row]), params


def test_greedy_takes_the_lowest_id_of_a_tie_and_ignores_padding():
    logits = torch.full((2, 1536), -5.0)
    logits[0, [9, 700, 1500]] = 4.0
    logits[1] = float("-inf")
    logits[1, 77] = -1e30
    for params in (SamplingParams(), SamplingParams(temperature=1e-6)):
        rows = SamplingRows.of([SamplingParams(), params])
        assert draw(target_probs(logits, rows), torch.tensor([0.5, 0.999999], dtype=torch.float64)).tolist() == [9, 77]


def test_draw_is_the_inverse_of_the_cumulative_law():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    last = 1 - 2**-53
    points = [0.0, 0.24999, 0.25, 0.74999, 0.75, last]
    drawn = [draw(probs, torch.tensor([u], dtype=torch.float64)).item() for u in points]
    assert drawn == [1, 1, 3, 3, 4, 4]
    # Laws that sum to less or more than 1 after rounding, or are not normalised, never fall off the end.
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 1e-300, 3.7):
        law = torch.rand(200, 999, generator=generator, dtype=torch.float64) * scale
        law[:, 990:] = 0
        assert int(draw(law, torch.full((200,), last, dtype=torch.float64)).max()) == 989


def test_sampled_tokens_follow_the_law():
    count, params = 20000, SamplingParams(temperature=0.9, top_k=12, top_p=0.95, min_p=0.02)
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(1)) * 2
    points = torch.from_numpy(uniforms(np.full(count, 3), np.full(count, 5), np.arange(count), Purpose.TARGET))
    rows = SamplingRows.of([params] * count)
    drawn = draw(target_probs(logits.expand(count, -1).contiguous(), rows), points)
    law = np.array(loop_law(logits[0].tolist(), params))
    counts = np.bincount(drawn.numpy(), minlength=30)
    assert counts[law == 0].sum() == 0
    assert scipy.stats.chisquare(counts[law > 0], law[law > 0] * count).pvalue > 1e-4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_without_a_law_are_refused(bad):
    logits = torch.zeros(3, 8)
    logits[1] = bad
    with pytest.raises(FloatingPointError, match="row 1 of 3"):
        greedy_ids(logits)


def test_log_probabilities_are_of_the_unfiltered_law():
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [0.0, 0.0, 0.0, 0.0], [5.0, 1.0, 1.0, 1.0]])
    got = log_probs(logits, torch.tensor([3, 2, 1]), [2, None, 0])
    norm = math.log(sum(math.exp(x) for x in logits[0].tolist()))
    assert got[1] is None
    assert got[0].token_id == 3 and got[0].logprob == pytest.approx(-2 - norm, abs=1e-12)
    assert [i for i, _ in got[0].top] == [1, 2]
    assert [v for _, v in got[0].top] == pytest.approx([3 - norm] * 2, abs=1e-12)
    assert got[2].top == () and got[2].logprob == pytest.approx(1 - math.log(math.exp(5) + 3 * math.exp(1)), abs=1e-12)
    wide = log_probs(logits, torch.tensor([0, 0, 0]), [64, None, None])
    assert len(wide[0].top) == 4
    masked = torch.tensor([[0.0, float("-inf"), 1.0]])
    assert [i for i, _ in log_probs(masked, torch.tensor([2]), [3])[0].top] == [2, 0]
