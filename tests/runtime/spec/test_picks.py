"""How drafts choose: the law that is handed on is the law of the draw."""

import numpy as np
import torch
from dspark.layers.draft_heads import draw_block, init_markov_weights, make_markov_head
from dspark.runtime.request import SamplingParams
from dspark.runtime.sampling import SamplingRows
from dspark.runtime.spec.picks import SampledPick, greedy_pick


def test_greedy_pick_takes_the_lowest_id_on_a_tie():
    tokens, law = greedy_pick(0, torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]]))
    assert tokens.tolist() == [1, 0] and law is None


def test_sampled_pick_draws_from_the_law_it_reports():
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).repeat(3, 1)
    rows = SamplingRows.of(
        [SamplingParams(temperature=0.7), SamplingParams(), SamplingParams(temperature=1.0, top_k=2)]
    )
    grid = (torch.arange(500, dtype=torch.float64) + 0.5) / 500
    counts = torch.zeros(3, 4)
    for u in grid:
        tokens, law = SampledPick(rows, u.repeat(3, 1))(0, logits)
        counts[torch.arange(3), tokens] += 1
    scaled = np.exp(np.arange(4) / 0.7)
    assert np.abs(law[0].numpy() - scaled / scaled.sum()).max() < 1e-12
    assert law[1].tolist() == [0, 0, 0, 1] and law[2, :2].tolist() == [0, 0]
    assert (counts / 500 - law).abs().max() < 5e-3


def test_each_place_has_its_own_uniform():
    weights = init_markov_weights("vanilla", 6, 3, 4, torch.Generator().manual_seed(0))
    rows = SamplingRows.of([SamplingParams(temperature=1.0)])
    uniforms = torch.tensor([[0.01, 0.99, 0.01]], dtype=torch.float64)
    block = draw_block(
        torch.zeros(1, 3, 6),
        torch.zeros(1, 3, 4),
        torch.tensor([0]),
        make_markov_head("vanilla", weights, 4),
        None,
        SampledPick(rows, uniforms),
    )
    assert block.tokens.tolist() == [[0, 5, 0]] and block.probs.shape == (1, 3, 6)
