"""Cost tables: look-up in both forms, files, and fits from timed steps."""

import json
import pathlib

import numpy as np
import pytest
from dspark.runtime.spec.sps import (
    AdditiveTable,
    StaircaseTable,
    fit_additive,
    load_table,
    save_table,
    table_from_json,
)

DATA = pathlib.Path(__file__).resolve().parents[2] / "data" / "speculative"


@pytest.fixture(scope="module")
def oracle():
    return json.loads((DATA / "sps_table.json").read_text())


def test_staircase_matches_the_oracle(oracle):
    data = oracle["floor_table"]
    table = table_from_json(data)
    assert isinstance(table, StaircaseTable)
    assert table.steps_per_second(1, np.array(data["queries"])).tolist() == data["answers"]


def test_additive_matches_the_oracle(oracle):
    data = oracle["additive"]
    table = table_from_json(data)
    assert isinstance(table, AdditiveTable)
    for requests, budget, seconds in data["step_time"]:
        rows = np.array([requests + budget])
        assert abs(table.step_seconds(requests, rows)[0] - seconds) < 1e-12
        assert abs(table.steps_per_second(requests, rows)[0] - 1 / seconds) < 1e-9 / seconds
    assert abs(table.step_seconds(20, np.array([130]))[0] - data["predicted_step_seconds"]) < 1e-12


def test_tables_survive_their_file(oracle, tmp_path):
    for name in ("floor_table", "additive"):
        table = table_from_json(oracle[name])
        save_table(tmp_path / "t.json", table, {"layout": "tp 2"})
        again = load_table(tmp_path / "t.json")
        rows = np.arange(1, 1200)
        assert type(again) is type(table)
        assert (again.steps_per_second(7, rows) == table.steps_per_second(7, rows)).all()
        assert json.loads((tmp_path / "t.json").read_text())["measured"] == {"layout": "tp 2"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "none"),
        ({"batch_tokens": [1]}, "batch_tokens"),
        ({"batch_tokens": [2, 2], "steps_per_sec": [1, 1]}, "rise strictly"),
        ({"batch_tokens": [1, 2], "steps_per_sec": [1]}, "one length"),
        ({"batch_tokens": [1, 2], "steps_per_sec": [1, 0]}, "positive"),
        ({"batch_tokens": [1, 2], "steps_per_sec": [1, float("nan")]}, "positive"),
        ({"batch_tokens": [], "steps_per_sec": []}, "one length"),
        ({"batch_tokens": ["x"], "steps_per_sec": [1]}, "batch_tokens is not a list of numbers"),
        ({"batch_tokens": 1, "steps_per_sec": 1}, "batch_tokens is not a list of numbers"),
        ({"batch_tokens": [10**400], "steps_per_sec": [1]}, "batch_tokens is not a list of numbers"),
        ({"batch_tokens": [1, float("inf")], "steps_per_sec": [1, 1]}, "finite and rise strictly"),
        ({"batch_tokens": [float("nan")], "steps_per_sec": [1]}, "finite and rise strictly"),
        (
            {"bias_seconds": [1], "bs_probes": [1], "alpha_seconds": [0], "m_probes": [1], "theta_seconds": [0]},
            "bias_seconds is not a number",
        ),
        (
            {"bias_seconds": 0, "bs_probes": [1], "alpha_seconds": [0], "m_probes": [1], "theta_seconds": [0]},
            "steps take time",
        ),
    ],
)
def test_broken_tables_are_refused(data, message, tmp_path):
    (tmp_path / "bad.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"bad.json.*{message}"):
        load_table(tmp_path / "bad.json")


def test_files_that_are_no_tables_are_named(tmp_path):
    for text in ("[1]", "{", ""):
        (tmp_path / "odd.json").write_text(text)
        with pytest.raises(ValueError, match="odd.json"):
            load_table(tmp_path / "odd.json")


def test_additive_fit_recovers_a_piecewise_linear_cost():
    truth = AdditiveTable(
        0.004,
        np.array([1.0, 8, 32]),
        np.array([0.0, 0.0004, 0.001]),
        np.array([1.0, 64, 256, 512]),
        np.array([0.0, 0.0012, 0.006, 0.02]),
    )
    requests, rows = map(np.ravel, np.meshgrid([1, 8, 32], [1, 32, 64, 128, 192, 256, 300, 384, 448, 512]))
    seconds = np.array([truth.step_seconds(r, np.array([m]))[0] for r, m in zip(requests, rows)])
    fitted = fit_additive(requests, rows, seconds)
    for r, m, s in zip(requests, rows, seconds):
        assert abs(fitted.step_seconds(r, np.array([m]))[0] - s) < 1e-9
    between = np.array([45, 100, 220, 400])
    assert np.abs(fitted.step_seconds(20, between) - truth.step_seconds(20, between)).max() < 1e-4
    noisy = seconds * np.random.default_rng(0).uniform(0.95, 1.05, len(seconds))
    again = fit_additive(requests, rows, noisy)
    assert (again.alpha_seconds >= 0).all() and (again.theta_seconds >= 0).all()
    assert abs(again.step_seconds(8, np.array([256]))[0] / truth.step_seconds(8, np.array([256]))[0] - 1) < 0.1


def test_fits_refuse_what_they_cannot_use():
    for rows, seconds in (([], []), ([1], [1.0, 2.0]), ([1, 2], [1.0, 0.0]), ([1], [float("inf")])):
        with pytest.raises(ValueError, match="SPS fit"):
            fit_additive([1] * len(rows), rows, seconds)
    with pytest.raises(ValueError, match="1 numbers of requests for 2"):
        fit_additive([1], [1, 2], [0.1, 0.2])
