"""Steps: where each token row sits, which logits are wanted, which windows close, and ids that cannot be."""

import numpy as np
import pytest
import torch
from dspark.layers.attention.plan import join_words, split_words
from dspark.runtime.step import Span, build_step

TABLE = torch.zeros((9, 4), dtype=torch.int32)


def test_rows_of_several_requests():
    spans = [Span(4, 6, [10, 11, 12], 2), Span(2, 0, [13], 0), Span(8, 15, [14], 1), Span(0, 7, [], 0)]
    step = build_step(spans, TABLE, (4, 8), 15)
    assert step.tokens.tolist() == [10, 11, 12, 13, 14]
    assert step.logit_rows.tolist() == [1, 2, 4]
    plan = step.plan
    assert plan.queries.positions.tolist() == [6, 7, 8, 0, 15]
    assert plan.queries.slots.tolist() == [4, 4, 4, 2, 8]
    assert plan.queries.starts.tolist() == [6, 6, 6, 0, 15]
    assert plan.queries.ends.tolist() == [9, 9, 9, 1, 16]
    assert plan.queries.rows.tolist() == [0, 1, 2, 3, 4]
    assert {ratio: at.tolist() for ratio, at in plan.closing.items()} == {4: [1, 4], 8: [1, 4]}
    assert plan.max_position == 15 and plan.page_table is TABLE
    assert all(torch.equal(a, b) for a, b in zip(plan.queries, plan.keys))
    assert plan.host.queries.tolist() == torch.stack(plan.queries).tolist()


def test_all_rows_wanted_and_no_rows():
    assert build_step([Span(0, 0, [1, 2], 2), Span(1, 3, [3], 1)], TABLE, (), 9).logit_rows is None
    some = build_step([Span(0, 0, [1, 2], 0)], TABLE, (), 9)
    assert some.logit_rows.tolist() == [] and some.logit_rows.dtype == torch.int64
    empty = build_step([], TABLE, (4,), 9)
    assert empty.tokens.shape == (0,) and empty.plan.max_position == -1 and empty.plan.closing[4].shape == (0,)


@pytest.mark.parametrize("tokens,bad", [([0, 9], 9), ([3, -1], -1), ([2**40], 2**40), ([8, 0, 10, 9], 10)])
def test_ids_outside_the_vocabulary_are_named(tokens, bad):
    with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary of 9"):
        build_step([Span(1, 0, [1], 1), Span(0, 5, tokens, 1)], TABLE, (), 9)


def test_words_of_both_types_travel_together():
    arrays = [np.arange(6).reshape(2, 3), np.array([0.5, -0.0, np.nan]), np.empty((0, 4)), np.eye(2)[:, ::-1]]
    words = join_words(arrays)
    assert words.dtype == torch.int64 and words.shape == (13,)
    for array, tensor in zip(arrays, split_words(words, arrays)):
        assert tensor.shape == array.shape
        np.testing.assert_array_equal(tensor.numpy(), array)
