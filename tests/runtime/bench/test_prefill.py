"""``dspark bench prefill``: figures by length and chunk size, and the growth of peak memory."""

import json

import pytest
from dspark.runtime.bench.baseline import TransformersSystem
from dspark.runtime.bench.prefill import exponent
from dspark.runtime.bench.residence import can_measure
from dspark.runtime.cli import main


def test_figures_by_length_and_chunk_size(capsys):
    flags = ["--tokens", "70,24", "--chunk-size", "32,128", "--rounds", "1", "--no-peak", "--json"]
    assert main(["bench", "prefill", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    for length in (24, 70):
        figures = result[f"tokens_{length}"]
        assert figures["first_token_equal"] is True and figures["chunk_size"] == 32
        assert figures["chunk_32"]["ratio"] == figures["ratio"]
        for one in (figures["chunk_32"], figures["chunk_128"]):
            assert one["ratio"] == pytest.approx(one["tokens_per_s"] / one["baseline_tokens_per_s"])
    assert "peak_growth_exponent" not in result


@pytest.mark.skipif(not can_measure(), reason="needs the /proc of Linux")
def test_peak_memory_and_table(capsys):
    assert main(["bench", "prefill", "--tokens", "80", "--chunk-size", "64", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert "baseline: transformers" in out and "peak growth MiB" in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("80 ")]
    assert row[1] == "64" and float(row[-1]) > 0


def test_exponent():
    assert exponent({100: 7, 200: 14, 400: 28}) == pytest.approx(1.0)
    assert exponent({100: 7, 200: 28, 400: 112}) == pytest.approx(2.0)
    assert exponent({100: 7, 400: 7}) == pytest.approx(0.0)
    assert exponent({100: 7}) is None


def test_different_tokens_are_said_and_fail(monkeypatch, capsys):
    real = TransformersSystem.decode

    def wrong(self, prompts, num_new):
        run = real(self, prompts, num_new)
        run.token_ids[0][0] ^= 1
        return run

    monkeypatch.setattr(TransformersSystem, "decode", wrong)
    assert main(["bench", "prefill", "--tokens", "20", "--rounds", "1", "--no-peak"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_a_prompt_that_does_not_fit_is_refused(capsys):
    assert main(["bench", "prefill", "--tokens", "4096"]) == 2
    error = capsys.readouterr().err
    assert "4096" in error and "4095" in error
