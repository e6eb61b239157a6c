"""Rotary tables against formulas in float64 and, for yarn, numbers worked out by hand."""

import math

import pytest
import torch
from dspark.layers.rope import Yarn, build_rope_table, inverse_frequencies, rotate


@pytest.mark.parametrize("rope_dim", [2, 8, 64])
@pytest.mark.parametrize("theta", [1e4, 1.6e5])
def test_plain_frequencies(rope_dim, theta):
    expected = [theta ** (-2 * i / rope_dim) for i in range(rope_dim // 2)]
    torch.testing.assert_close(
        inverse_frequencies(rope_dim, theta).double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_yarn_interpolates_slow_channels_and_keeps_fast_ones():
    """rope_dim 64, theta 1.6e5, factor 16, 65536 positions, 32 and 1 turns.

    The channel that turns b times: 64 ln(65536 / (2 pi b)) / (2 ln 1.6e5); 15.46 for 32 turns and 24.71 for one, so
    the ramp runs from 15 to 25.
    """
    plain = inverse_frequencies(64, 1.6e5).double()
    scaled = inverse_frequencies(64, 1.6e5, Yarn(16.0, 65536, 32.0, 1.0)).double()
    torch.testing.assert_close(scaled[:16], plain[:16], rtol=1e-6, atol=0)
    torch.testing.assert_close(scaled[25:], plain[25:] / 16, rtol=1e-6, atol=0)
    for i in range(16, 25):
        share = (i - 15) / 10
        expected = plain[i] / 16 * share + plain[i] * (1 - share)
        assert scaled[i].item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("factor", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("original", [32, 256, 65536])
@pytest.mark.parametrize("rope_dim,theta", [(8, 1e4), (16, 1.6e5), (64, 1.6e5)])
def test_yarn_of_any_size(rope_dim, theta, original, factor):
    def channel(turns):
        return rope_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(channel(32)), 0), min(math.ceil(channel(1)), rope_dim - 1)
    made = inverse_frequencies(rope_dim, theta, Yarn(factor, original, 32.0, 1.0)).tolist()
    for i, value in enumerate(made):
        share = min(max((i - low) / (high - low or 0.001), 0.0), 1.0)
        plain = theta ** (-2 * i / rope_dim)
        assert value == pytest.approx(plain / factor * share + plain * (1 - share), rel=1e-5)


def test_yarn_of_equal_borders_is_a_step():
    """Both borders at channel 0: that channel is kept and every other is interpolated, without a division by zero."""
    plain = inverse_frequencies(8, 1e4)
    scaled = inverse_frequencies(8, 1e4, Yarn(2.0, 6, 1.0, 1.0))
    torch.testing.assert_close(scaled, plain / torch.tensor([1.0, 2.0, 2.0, 2.0]))


def test_table_holds_cosines_and_sines_of_unscaled_size():
    table = build_rope_table(16, 1e4, 50, Yarn(8.0, 32, 32.0, 1.0))
    inv = inverse_frequencies(16, 1e4, Yarn(8.0, 32, 32.0, 1.0)).double()
    angles = torch.arange(50, dtype=torch.float64)[:, None] * inv
    torch.testing.assert_close(table.cos.double(), angles.cos(), rtol=0, atol=5e-6)
    torch.testing.assert_close(table.sin.double(), angles.sin(), rtol=0, atol=5e-6)


def test_rotation_turns_interleaved_pairs_of_the_tail(turned):
    x = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(1))
    angles = torch.tensor([0.0, 1.0, -2.5])[:, None, None] * torch.tensor([1.0, 0.5, 3.0])
    cos, sin = angles.cos(), angles.sin()
    there = rotate(x, cos, sin)
    torch.testing.assert_close(there.double(), turned(x.double(), cos, sin), rtol=0, atol=1e-6)
    assert torch.equal(there[..., :5], x[..., :5]) and torch.equal(there[0], x[0])
    torch.testing.assert_close(rotate(there, cos, sin, inverse=True), x, rtol=0, atol=1e-6)
    assert rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16
