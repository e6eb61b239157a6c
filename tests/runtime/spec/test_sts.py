"""Temperature fits and calibration measures against reference results."""

import json
import pathlib

import numpy as np
import pytest
from dspark.runtime.spec import sts
from dspark.runtime.spec.confidence import conditional, survival
from dspark.runtime.spec.reliability import auroc, brier, ece, reliability
from dspark.runtime.spec.sts import CalibrationSamples
from safetensors.numpy import load_file
from scipy.stats import mannwhitneyu

DATA = pathlib.Path(__file__).resolve().parents[2] / "data" / "speculative"


@pytest.fixture(scope="module")
def oracle():
    return load_file(DATA / "sts.safetensors")


@pytest.fixture(scope="module")
def samples(oracle):
    return CalibrationSamples.from_blocks(oracle["logits"], oracle["prefix_mask"].sum(1).astype(int))


def test_fit_matches_the_oracle(oracle, samples):
    assert (samples.kept == oracle["prefix_mask"]).all() and samples.valid.all()
    fit = sts.fit(samples, "toy")
    assert np.abs(fit.temperatures / oracle["temperatures"] - 1).max() < 1e-6
    assert np.abs(fit.ece_before - oracle["ece_before"]).max() < 1e-9
    assert np.abs(fit.ece_after - oracle["ece_after"]).max() < 1e-6
    after = survival(conditional(samples.logits, fit.temperatures))[:, -1]
    assert np.abs(after - oracle["survival_after"]).max() < 1e-6
    assert np.abs(sts.GRID / oracle["grid"] - 1).max() < 1e-6
    exact = sts.fit(samples, grid=oracle["grid"].astype(np.float64))
    assert np.abs(exact.ece_after - oracle["ece_after"]).max() < 1e-12
    assert (fit.ece_after < fit.ece_before / 3).all(), "the data needs scaling"


def test_measures_match_deepspec(oracle):
    a = survival(conditional(oracle["logits"][:1000]))
    kept = oracle["prefix_mask"][:1000]
    for k in range(a.shape[1]):
        assert abs(ece(a[:, k], kept[:, k], 20) - oracle["deepspec_first1000_ece20"][k]) < 1e-8
        assert abs(auroc(a[:, k], kept[:, k], 1000) - oracle["deepspec_first1000_auroc"][k]) < 1e-12
        assert abs(brier(a[:, k], kept[:, k]) - oracle["deepspec_first1000_brier"][k]) < 1e-8


def test_auroc_is_the_rank_statistic():
    rng = np.random.default_rng(0)
    scores, outcomes = rng.integers(0, 12, 400) / 12, rng.random(400) < 0.4
    statistic = mannwhitneyu(scores[outcomes], scores[~outcomes]).statistic
    assert abs(auroc(scores, outcomes) - statistic / (outcomes.sum() * (~outcomes).sum())) < 1e-12
    assert np.isnan(auroc(scores, np.ones(400)))


def test_reliability_bins():
    probs = np.array([0.0, 0.05, 0.5, 0.52, 0.999, 1.0])
    outcomes = np.array([0, 1, 1, 0, 1, 1])
    curve = reliability(probs, outcomes, 10)
    assert curve.counts.tolist() == [2, 0, 0, 0, 0, 2, 0, 0, 0, 2]
    assert np.isnan(curve.confidence[1]) and np.isnan(curve.frequency[1])
    assert abs(curve.confidence[0] - 0.025) < 1e-12 and curve.frequency[0] == 0.5 and curve.frequency[9] == 1.0
    assert abs(curve.ece() - ece(probs, outcomes, 10)) < 1e-12
    by_hand = (2 * abs(0.025 - 0.5) + 2 * abs(0.51 - 0.5) + 2 * abs(0.9995 - 1.0)) / 6
    assert abs(curve.ece() - by_hand) < 1e-12


def test_places_behind_a_stop_are_left_out():
    logits = np.zeros((3, 4))
    samples = CalibrationSamples.from_blocks(logits, np.array([3, 3, 4]), np.array([4, 2, 4]))
    assert samples.kept.tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert samples.valid.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]
    both = CalibrationSamples.concatenate([samples, samples])
    assert both.logits.shape == (6, 4) and both.valid.sum() == 20
    rng = np.random.default_rng(1)
    z = rng.normal(size=(500, 3)) * 2
    accepted = (rng.random((500, 3)) < conditional(z / 2)).cumprod(1).sum(1)
    clean = CalibrationSamples.from_blocks(z, accepted)
    valid = rng.random((500, 3)) < 0.7
    dirty = CalibrationSamples(z, np.where(valid, clean.kept, ~clean.kept), valid)
    first = CalibrationSamples(z[valid[:, 0]][:, :1], clean.kept[valid[:, 0]][:, :1], valid[valid[:, 0]][:, :1])
    assert sts.fit(dirty).temperatures[0] == sts.fit(first).temperatures[0]
    assert sts.fit(dirty).ece_after[0] == sts.fit(first).ece_after[0]
    nothing = CalibrationSamples(z, clean.kept, np.zeros_like(valid))
    with pytest.raises(ValueError, match="place 1 of 3"):
        sts.fit(nothing)


def test_fit_file(samples, tmp_path):
    fit = sts.fit(samples, "math prompts")
    fit.save(tmp_path / "sts.json")
    data = json.loads((tmp_path / "sts.json").read_text())
    assert set(data) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    assert data["dataset"] == "math prompts" and data["num_samples"] == 4000
    assert (sts.load_temperatures(tmp_path / "sts.json", 5) == fit.temperatures).all()
    with pytest.raises(ValueError, match="5 temperatures for blocks of 4"):
        sts.load_temperatures(tmp_path / "sts.json", 4)
    huge = '{"temperatures": [1, 1' + 400 * "0" + "]}"
    for bad in (
        huge,
        '{"temperatures": [1, Infinity]}',
        '{"temperatures": [1, NaN]}',
        '{"temperatures": [1, 0]}',
        '{"temperatures": [1, "2"]}',
        '{"temperatures": 1}',
        "[]",
        "{",
        "{}",
    ):
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(ValueError, match="bad.json"):
            sts.load_temperatures(tmp_path / "bad.json", 2)


def test_report_is_json(samples):
    before = sts.report(samples)
    fit = sts.fit(samples)
    after = sts.report(samples, fit.temperatures)
    assert json.loads(json.dumps(after)) == after
    assert np.allclose(before["ece"], fit.ece_before) and np.allclose(after["ece"], fit.ece_after)
    assert after["samples"] == [4000] * 5 and len(after["diagram"][0]["counts"]) == 15
    assert sum(after["diagram"][4]["counts"]) == 4000
