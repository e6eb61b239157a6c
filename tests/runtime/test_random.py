"""The generator against the published vectors of Philox4x32-10, and the independence of its streams."""

import numpy as np
import pytest
import scipy.stats
from dspark.runtime.random import Purpose, philox4x32, uniforms

# Known answers of the Random123 distribution (kat_vectors, philox4x32 with 10 rounds): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_known_answers_together():
    counter, key, expected = (np.array(columns, dtype=np.uint32).T for columns in zip(*KNOWN))
    np.testing.assert_array_equal(philox4x32(counter, key), expected)


def test_uniform_is_made_of_the_documented_counter():
    seed, request, position = 0x299F31D0A4093822, 0x0370734413198A2E, 0x243F6A88
    word = philox4x32(
        np.array([[position], [Purpose.ACCEPT], [0x13198A2E], [0x03707344]], np.uint32),
        np.array([[0xA4093822], [0x299F31D0]], np.uint32),
    )[:, 0]
    expected = (((int(word[0]) >> 5) << 26) | (int(word[1]) >> 6)) / 2**53
    assert uniforms([seed], [request], [position], Purpose.ACCEPT)[0] == expected


def test_a_number_does_not_depend_on_its_batch():
    positions = np.arange(500)
    together = uniforms(np.full(500, 7), np.full(500, 9), positions, Purpose.DRAFT)
    alone = [uniforms([7], [9], [p], Purpose.DRAFT)[0] for p in (0, 123, 499)]
    assert alone == [together[0], together[123], together[499]]


@pytest.mark.parametrize("vary", ["seed", "request", "position", "purpose"])
def test_neighbouring_streams_are_uniform_and_uncorrelated(vary):
    count = 20000
    base = {"seed": np.full(count, 5), "request": np.full(count, 11), "position": np.arange(count)}
    other = dict(base)
    if vary != "purpose":
        other[vary] = other[vary] + (1 if vary != "position" else count)
    first = uniforms(base["seed"], base["request"], base["position"], Purpose.TARGET)
    second = uniforms(
        other["seed"],
        other["request"],
        other["position"],
        Purpose.ACCEPT if vary == "purpose" else Purpose.TARGET,
    )
    for values in (first, second):
        assert values.min() >= 0 and values.max() < 1
        assert scipy.stats.kstest(values, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(count)


def test_purposes_are_three_streams():
    assert len({int(p) for p in Purpose}) == 3


def test_positions_beyond_the_counter_are_refused():
    with pytest.raises(AssertionError, match="2\\^32"):
        uniforms([0], [0], [2**32], Purpose.TARGET)
