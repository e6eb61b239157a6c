"""Loads for the tests of the expert balancer: small files in the repository, large ones beside it."""

import pathlib

import numpy as np
import pytest

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "eplb"


@pytest.fixture
def readme_load():
    """The two layers of twelve experts of the published balancer's README."""
    return np.load(DATA / "readme2x12.npz")["load"][0]


@pytest.fixture
def model_load():
    """58 layers of 256 experts, log-normal."""
    return np.load(DATA / "v3_logn0.8.npz")["load"][0]


@pytest.fixture
def shared_load(shared):
    """``shared_load("v3_logn0.8_mid")``: windows [S, L, E] of the files beside the checkout."""
    return lambda name: np.load(shared / "oracle" / "eplb" / f"dev_{name}.npz")["load"]
