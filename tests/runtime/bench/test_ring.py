"""``bench ring``: figures of every split and transfer, and an exit status that says whether results are right."""

import json

import pytest
from dspark.parallel.context import causal_pairs, ring_wall, zigzag
from dspark.runtime.bench import ring
from dspark.runtime.cli import main

SMALL = ["bench", "ring", "--ranks", "3", "--heads", "2", "--key-heads", "1", "--key-dim", "8", "--value-dim", "6"]


def test_every_split_and_transfer_is_compared_with_dense_attention(capsys):
    assert main([*SMALL, "--lengths", "61", "--rounds", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    lines = {name: figures for name, figures in result.items() if name not in ("dense", "setting")}
    assert len(lines) == 6 and all(figures["error"] < 1e-5 for figures in lines.values())
    split = zigzag([61], 3)
    for transfer in ("ring", "all_gather"):
        figures = lines[f"zigzag {transfer}"]
        assert figures["pairs_by_rank"] == causal_pairs(split).sum(1).tolist()
        assert figures["wall_pairs"] == ring_wall(split)
    # rank 0 of a ring passes on all shards but that of the next rank
    assert lines["zigzag ring"]["sent_bytes"] == (61 - split.sizes[1]) * (8 + 6) * 4


def test_a_wrong_result_is_an_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(ring, "exact", lambda problem, exact=ring.exact: exact(problem) + 2e-5)
    assert main([*SMALL, "--lengths", "20,5", "--full", "--rounds", "1"]) == 1
    assert "zigzag all_gather" in capsys.readouterr().out


def test_sizes_that_do_not_fit_are_refused(capsys):
    assert main(["bench", "ring", "--heads", "6", "--key-heads", "4"]) == 2
    assert "6 is not a multiple of --key-heads 4" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "5,0", "x"])
def test_lengths_must_be_counts(text, capsys):
    assert main([*SMALL, "--lengths", text]) == 2
    assert capsys.readouterr().err
