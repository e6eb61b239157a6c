"""Splits of experts' picks over copies in a run: the tokens stay, ranks that must agree do, and ranks fill alike."""

import functools

import numpy as np
import pytest
from dspark.eplb.loads import read_windows
from dspark.parallel.topology import Topology
from dspark.runtime.engine_config import EngineConfig

DP_AND_TP = Topology(tp=4, dp=2, ep=4, nodes=(0, 0, 1, 1))
RUNS = [
    ("standard", "none", DP_AND_TP, "weighted"),
    ("standard", "tbo", Topology(tp=4, dp=2, ep=2), "weighted"),
    ("normal", "tbo", DP_AND_TP, "weighted"),
    ("low_latency", "sbo", Topology(tp=4, cp=2, ep=2), "weighted"),
    ("normal", "none", DP_AND_TP, "nearest"),
]
OPTIONS = {"num_redundant_experts": 8, "num_redundant_draft_experts": 8, "overlap_min_rows": 1}


@functools.cache
def reference(make_engine, run):
    return run(make_engine(None, 0, draft="none"))


def split(rank, world, placed, dispatcher, overlap, topology, how, interval):
    engine = placed.make_engine(
        topology, rank, draft="dspark", dispatcher=dispatcher, overlap=overlap, replica_split=how, **OPTIONS, **interval
    )
    return placed.run(engine)


@pytest.mark.parametrize(("dispatcher", "overlap", "topology", "how"), RUNS, ids=str)
def test_the_tokens_of_one_rank(run_ranks, placed, dispatcher, overlap, topology, how):
    interval = {"eplb_interval": 4, "eplb_layers_per_step": 2}  # maps change meanwhile
    found = run_ranks(split, 4, placed, dispatcher, overlap, topology, how, interval, timeout=180)
    assert all(ids == reference(placed.make_engine, placed.run) for ids in found)


def fullest_share(path):
    """Picks of the fullest rank over the mean, summed over layers and windows of one step each."""
    windows = read_windows(path)
    loads = np.stack([window.physical.reshape(len(window.physical), 4, -1).sum(2) for window in windows])
    return loads.max(2).sum() / loads.mean(2).sum()


@pytest.mark.parametrize("dispatcher", ["standard", "low_latency"])
def test_weighted_fills_ranks_more_evenly(run_ranks, placed, tmp_path, dispatcher):
    found = {}
    for how in ("even", "weighted"):
        path = str(tmp_path / f"{how}.npz")
        counted = {"eplb_record": path, "eplb_interval": 1, "eplb_threshold": 1e-9}  # a window a step; nothing moves
        run_ranks(split, 4, placed, dispatcher, "none", DP_AND_TP, how, counted, timeout=180)
        found[how] = fullest_share(path)
    assert 1 <= found["weighted"] < found["even"] - 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replica_split": "weighted"}, "--replica-split weighted needs copies: give --num-redundant-experts"),
        ({"replica_split": "nearest", "num_redundant_experts": 4}, "with the dispatcher standard no row travels"),
        ({"replica_split": "best"}, "--replica-split is 'best'; allowed: even, nearest, weighted"),
    ],
)
def test_options_that_would_do_nothing(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options).validate()


def test_one_rank_of_experts_has_nothing_to_split(placed):
    with pytest.raises(ValueError, match="with --ep 1 all copies of an expert are on every rank"):
        placed.make_engine(None, 0, num_redundant_experts=4, replica_split="weighted")
