"""Acceptance figures against sums by hand."""

import itertools

import pytest
import torch
from dspark.runtime.training.evaluate import evaluate_drafts, place_sums


def test_figures_equal_sums_by_hand():
    generator = torch.Generator().manual_seed(0)
    q, p = (torch.randn(6, 3, 4, generator=generator) for _ in range(2))
    valid = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    sums = place_sums(q, p, valid)
    greedy, expected, overlap = ([0.0] * 3 for _ in range(3))
    for row in range(6):
        chance, same = 1.0, True
        for k in range(3):
            if not valid[row, k]:
                break
            share = float(torch.minimum(q[row, k].softmax(0), p[row, k].softmax(0)).sum())
            chance, same = chance * share, same and bool(q[row, k].argmax() == p[row, k].argmax())
            greedy[k], expected[k], overlap[k] = greedy[k] + same, expected[k] + chance, overlap[k] + share
    assert sums.places.tolist() == valid.sum(0).tolist()
    for mine, reference in ((sums.greedy, greedy), (sums.expected, expected), (sums.overlap, overlap)):
        assert mine.tolist() == pytest.approx(reference, rel=1e-5)
    report = sums.report()
    assert report["expected_length"] == pytest.approx(1 + sum(a / b for a, b in zip(expected, (5, 4, 3))), abs=1e-3)


def test_expected_is_the_chance_of_a_prefix_under_rejection():
    """Two places, three tokens: the chance that both drafts survive is the product, by enumeration of tokens."""
    q, p = (torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    laws = [(q[0, k].softmax(0), p[0, k].softmax(0)) for k in range(2)]
    chance = sum(
        float(torch.stack([q_k[x] * min(1.0, float(p_k[x] / q_k[x])) for (q_k, p_k), x in zip(laws, tokens)]).prod())
        for tokens in itertools.product(range(3), repeat=2)
    )
    sums = place_sums(q, p, torch.ones(1, 2, dtype=torch.bool))
    assert float(sums.expected[1]) == pytest.approx(chance, rel=1e-5)


@pytest.mark.parametrize("method", ["dspark", "dflash", "mtp", "eagle3"])
def test_a_target_as_its_own_draft_is_always_accepted(method, make_draft, make_data):
    draft, data = make_draft(method), make_data(method)
    found = evaluate_drafts(lambda batch: (draft.drafts(batch)[1],) * 2, data, 5, torch.device("cpu"))
    assert sorted(found) == ["a", "b"]
    for figures in found.values():
        assert figures["greedy_length"] == figures["expected_length"] == pytest.approx(6.0, abs=1e-3)
    honest = evaluate_drafts(draft.drafts, data, 5, torch.device("cpu"))
    assert all(1.0 <= figures["expected_length"] < 5.0 for figures in honest.values())
