"""``dspark bench memory``: what is counted against the formula, and that the count sees what it should."""

import json

import pytest
from dspark.runtime.bench.residence import Task, can_measure, residence
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.cli import main

pytestmark = pytest.mark.skipif(not can_measure(), reason="needs the /proc of Linux")

# Two CSA layers hold 32 + 32 numbers every 4 tokens, one HCA layer 32 numbers every 16, in float32.
BYTES_PER_TOKEN = 4 * (2 * 64 / 4 + 32 / 16)


def test_counts_agree_with_the_formula(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    flags = ["--tokens", "256", "--requests", "8", "--json", "--picture", str(picture)]
    assert main(["bench", "memory", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["formula"]["bytes_per_token"] == BYTES_PER_TOKEN
    assert result["in_use"] == {"bytes_per_token": BYTES_PER_TOKEN, "ratio": 1.0}
    # So few tokens are few pages of the operating system: coarse, but a missing or a second pool would be seen.
    assert 0.7 < result["resident"]["ratio"] < 1.4
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_unfinished_pages_show_and_a_failing_process_is_an_error():
    folder = str(bundled_model())
    taken = residence(Task(folder, "float32", 64, 100, num_requests=3))
    assert taken.in_use - taken.slots == 3 * 256 * BYTES_PER_TOKEN  # a page of 256 tokens for each
    assert taken.peak_growth >= taken.growth
    with pytest.raises(RuntimeError, match="(?s)status 1.*nowhere"):
        residence(Task("/nowhere", "float32", 64, 100))


def test_mistakes_are_named(capsys):
    assert main(["bench", "memory", "--tokens", "5000"]) == 2
    assert "4096 positions" in capsys.readouterr().err
    assert main(["bench", "memory", "--device", "cuda"]) == 2
    assert "--device cpu" in capsys.readouterr().err
