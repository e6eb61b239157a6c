"""Context-parallel splits against published tables."""

import numpy as np
import pytest
from dspark.parallel.context import (
    causal_pairs,
    contiguous,
    imbalance,
    interleave,
    ring_wall,
    striped,
    zigzag,
)


def lists(split):
    return [tokens.tolist() for tokens in split.owned]


def test_tables():
    split = zigzag([19], 4)
    assert split.sizes == (5, 5, 5, 4) and split.rows == 8
    assert lists(split)[0] == [0, 1, 2, 17, 18] and lists(split)[3] == [9, 10, 11, 12]
    assert lists(zigzag([7, 5], 2)) == [[0, 1, 7, 8, 6, 11], [2, 3, 9, 4, 5, 10]]
    assert (interleave(13, 4).sizes, interleave(13, 4).rows) == ((4, 3, 3, 3), 4)
    assert (interleave(17, 4).sizes, interleave(17, 4).rows) == ((5, 4, 4, 4), 8)
    assert interleave(12, 4).per_request([5, 1, 6]) == ((2, 0, 1), (1, 1, 1), (1, 0, 2), (1, 0, 2))


@pytest.mark.parametrize(
    "tokens, ranks, balance, wall",
    [
        (16, 4, (1.706, 1.176, 1.0), (58, 40, 34)),
        (64, 8, (1.86, 1.108, 1.0), (484, 288, 260)),
        (4096, 8, (1.875, 1.002, 1.0), None),
        (19, 4, (1.79, 1.158, 1.116), None),
    ],
)
def test_balance_tables(tokens, ranks, balance, wall):
    splits = contiguous(tokens, ranks), striped(tokens, ranks), zigzag([tokens], ranks)
    for split, expected in zip(splits, balance):
        assert imbalance(split) == pytest.approx(expected, abs=0.005)
    if wall:
        assert tuple(map(ring_wall, splits)) == wall


def test_causal_work():
    assert causal_pairs(contiguous(16, 4)).sum(1).tolist() == [10, 26, 42, 58]
    assert causal_pairs(striped(16, 4)).sum(1).tolist() == [28, 32, 36, 40]
    assert causal_pairs(zigzag([16], 4)).sum(1).tolist() == [34] * 4


@pytest.mark.parametrize("cp", [1, 2, 3, 4, 8])
def test_each_token_has_one_place_and_the_gather_restores_the_order(cp):
    for tokens in range(0, 40):
        for split in (contiguous(tokens, cp), striped(tokens, cp), interleave(tokens, cp), zigzag([tokens], cp)):
            assert sorted(np.concatenate(split.owned).tolist()) == list(range(tokens))
            assert split.rows >= max(split.sizes) and max(split.sizes) - min(split.sizes) <= (2 if tokens else 0)
            padded = np.full((cp, split.rows), -1)
            for rank, owned in enumerate(split.owned):
                padded[rank, : len(owned)] = owned
            assert padded.reshape(-1)[split.token_rows()].tolist() == list(range(tokens))


def test_requests_shorter_than_the_blocks():
    split = zigzag([1, 0, 3], 4)
    assert sorted(np.concatenate(split.owned).tolist()) == [0, 1, 2, 3]
    assert np.sum(split.per_request([1, 0, 3]), axis=0).tolist() == [1, 0, 3]
