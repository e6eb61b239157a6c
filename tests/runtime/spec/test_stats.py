"""Counts of drafted, verified and accepted tokens."""

import math

import numpy as np
import pytest
from dspark.runtime.spec.stats import SpecStats


def test_fields_of_a_request():
    stats = SpecStats(3)
    stats.add_step(drafted=3, verified=3, accepted=3, emitted=4)
    stats.add_step(drafted=3, verified=2, accepted=0, emitted=1)
    stats.add_step(drafted=3, verified=1, accepted=1, emitted=2)
    stats.add_step(drafted=0, verified=0, accepted=0, emitted=1)
    assert stats.fields() == {
        "verify_ct": 4,
        "accept_length": 8 / 4,
        "accept_rate": 4 / 6,
        "drafted": 9,
        "verified": 6,
        "accepted": 4,
        "accept_histogram": [2, 1, 0, 1],
    }
    rates = stats.conditional_acceptance()
    assert rates[0] == 2 / 3 and rates[1:] == [1.0, 1.0]


def test_a_cut_block_judges_only_what_it_emitted():
    stats = SpecStats(4)
    stats.add_step(drafted=4, verified=4, accepted=2, emitted=2)
    assert stats.judged == [1, 1, 0, 0] and stats.kept == [1, 1, 0, 0]
    stats.add_step(drafted=4, verified=4, accepted=2, emitted=3)
    assert stats.judged == [2, 2, 1, 0] and stats.kept == [2, 2, 0, 0]
    rates = stats.conditional_acceptance()
    assert rates[:3] == [1.0, 1.0, 0.0] and math.isnan(rates[3])


def test_conditional_acceptance_multiplies_to_survival():
    rng = np.random.default_rng(0)
    chances, stats, survived = [0.9, 0.6, 0.8], SpecStats(3), np.zeros(3)
    for _ in range(4000):
        kept = int((rng.random(3) < chances).cumprod().sum())
        stats.add_step(3, 3, kept, kept + 1)
        survived += np.arange(3) < kept
    assert np.abs(np.array(stats.conditional_acceptance()) - chances).max() < 0.05
    assert np.allclose(np.cumprod(stats.conditional_acceptance()), survived / 4000)


def test_nothing_yet():
    fields = SpecStats(2).fields()
    assert fields["accept_length"] == 0.0 and fields["accept_rate"] == 0.0 and fields["accept_histogram"] == [0, 0, 0]


def test_adding():
    a, b = SpecStats(2), SpecStats(2)
    a.add_step(2, 2, 1, 2)
    b.add_step(2, 1, 1, 2)
    b.add_step(2, 2, 2, 3)
    a.add(b)
    both = SpecStats(2)
    for step in ((2, 2, 1, 2), (2, 1, 1, 2), (2, 2, 2, 3)):
        both.add_step(*step)
    assert a.fields() == both.fields() and a.conditional_acceptance() == both.conditional_acceptance()
    assert b.verify_ct == 2
    with pytest.raises(ValueError, match="of 2 and of 3"):
        a.add(SpecStats(3))
    with pytest.raises(AssertionError):
        a.add_step(2, 1, 2, 3)
