"""The stand-in for the library deep_ep."""

import importlib
import pathlib
import sys

import pytest
from dspark.comm.dispatch import deep_ep_library


@pytest.fixture
def deep_ep(monkeypatch):
    """The stand-in, imported as ``deep_ep``, here and in ranks forked from here; a node of it has 2 ranks."""
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parent.parent / "stand_ins")
    for name in [name for name in sys.modules if name.split(".")[0].startswith("deep_ep")]:
        monkeypatch.delitem(sys.modules, name)
    module = importlib.import_module("deep_ep")
    monkeypatch.setattr(module.limits, "NVL_PEERS", 2)
    monkeypatch.setattr(deep_ep_library, "NODE_RANKS", 2)
    yield module
    for name in [name for name in sys.modules if name.split(".")[0].startswith("deep_ep")]:
        monkeypatch.delitem(sys.modules, name)
