"""The balancer's command line, from loads to a map that other commands and engines read."""

import json

import numpy as np
import pytest
from dspark.eplb.cli import main
from dspark.runtime.cli import main as program


@pytest.fixture
def loads(tmp_path):
    path = tmp_path / "loads.npz"
    np.savez(path, load=np.floor(np.random.default_rng(3).lognormal(0, 1.0, (3, 32)) * 1000))
    return path


def test_a_plan_is_what_was_asked_for_and_validates(loads, tmp_path, capsys):
    out = tmp_path / "map.json"
    sizes = ["--gpus", "8", "--nodes", "2"]
    assert main(["plan", "--load", str(loads), *sizes, "--redundant", "8", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert list(written) == ["physical_to_logical_map"]
    slots = np.array(written["physical_to_logical_map"])
    assert slots.shape == (3, 40) and all(set(row) == set(range(32)) for row in slots.tolist())
    capsys.readouterr()
    assert program(["eplb", "diff", str(out), str(out), "--gpus", "8"]) == 0


def test_a_wanted_balance_that_is_missed_is_a_failure(loads, tmp_path):
    argv = ["plan", "--load", str(loads), "--gpus", "8", "--nodes", "2", "--out", str(tmp_path / "map.json")]
    assert main([*argv, "--redundant", "0", "--min-balance", "0.9999"]) != 0
    assert main([*argv, "--redundant", "8", "--min-balance", "0.5"]) == 0


def test_mistakes_are_one_line_and_status_2(loads, tmp_path, capsys):
    argv = ["plan", "--load", str(loads), "--nodes", "2", "--out", str(tmp_path / "map.json")]
    assert program(["eplb", *argv, "--gpus", "7", "--redundant", "0"]) == 2
    error = capsys.readouterr().err
    assert "32" in error and "7" in error and "Traceback" not in error
    assert program(["eplb", "plan", "--load", str(tmp_path / "absent.npz"), "--gpus", "8", "--out", "x"]) == 2
