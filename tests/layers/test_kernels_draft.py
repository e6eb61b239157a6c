"""The greedy Markov loop, plain and compiled, against one draft at a time in float64."""

import pytest
import torch


def whole(*shape, seed=0, size=2.0):
    return (size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).round()


@pytest.mark.parametrize(
    "num_blocks,gamma,vocab,rank", [(0, 2, 9, 4), (3, 3, 150, 5), (1, 7, 1, 2), (2, 4, 3000, 8), (5, 1, 33, 1)]
)
def test_markov_greedy(twins, num_blocks, gamma, vocab, rank):
    """All are whole numbers, so many places tie, and the lower id wins; 3,000 tokens are too many for a table."""
    base, w1, w2 = whole(num_blocks, gamma, vocab), whole(vocab, rank, seed=1), whole(vocab, rank, seed=2)
    anchors = torch.arange(num_blocks) * 7 % vocab
    expected = []
    for block, prev in zip(base.double(), anchors.tolist()):
        row = []
        for logits in block:
            logits = logits + w2.double() @ w1[prev].double()
            prev = min(token for token in range(vocab) if logits[token] == logits.max())
            row.append(prev)
        expected.append(row)
    for kernels in twins:
        tokens = kernels.bind("markov_greedy", w1=w1, w2=w2)(base, anchors)
        assert tokens.shape == (num_blocks, gamma) and tokens.dtype == torch.int64
        assert tokens.tolist() == expected
