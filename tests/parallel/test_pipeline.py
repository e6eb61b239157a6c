"""The stage split against its table."""

import pytest
from dspark.parallel.pipeline import stage_layers


@pytest.mark.parametrize(
    "layers, pp, sizes",
    [
        (61, 4, [15, 15, 15, 16]),
        (43, 2, [21, 22]),
        (10, 4, [2, 2, 3, 3]),
        (3, 4, [0, 1, 1, 1]),
        (5, 1, [5]),
        (0, 2, [0, 0]),
    ],
)
def test_table(layers, pp, sizes):
    stages = stage_layers(layers, pp)
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(layers))


def test_an_explicit_partition():
    assert stage_layers(5, 2, [4, 1]) == (range(0, 4), range(4, 5))
    with pytest.raises(ValueError, match=r"2 stages, but pp = 3"):
        stage_layers(5, 3, [4, 1])
    with pytest.raises(ValueError, match=r"holds 5 layers, but the model has 6"):
        stage_layers(6, 2, [4, 1])
    with pytest.raises(ValueError, match="-1"):
        stage_layers(4, 2, [5, -1])
    with pytest.raises(ValueError, match="0 stages"):
        stage_layers(4, 0)
