"""Greedy continuations of the bundled model equal those of a full re-forward by other code, in any company."""

import json
import pathlib
import random

import pytest
import torch
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.drive import Collector, drive
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import load_engine
from dspark.runtime.request import Request, SamplingParams

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "models"
GOLDEN = json.loads((DATA / "golden.json").read_text())["items"]
PARAMS = SamplingParams(max_new_tokens=64, ignore_eos=True)


def engine_for(groups, **options):
    config = resolve(
        EngineConfig(**options), model_dir=str(bundled_model()), device_type="cpu", max_positions=4096, own_draft="none"
    )
    return load_engine(config, groups, torch.device("cpu"))


def continuations(engine, order):
    """Token ids by golden item, for requests added in this order."""
    requests = [Request(str(i), tuple(GOLDEN[i]["prompt_ids"]), PARAMS, n) for n, i in enumerate(order)]
    collector = Collector(requests)
    outputs = [collector.push(event) for event in drive(engine, requests, None)]
    return {int(o.request_id): (list(o.token_ids), o.finish_reason) for o in outputs if o is not None}


def check(results):
    for i, (token_ids, reason) in results.items():
        assert token_ids == GOLDEN[i]["output_ids"], f"golden item {i} ({GOLDEN[i]['domain']})"
        assert reason == "length"


def shuffled():
    order = list(range(len(GOLDEN)))
    random.Random(5).shuffle(order)
    return order


@pytest.mark.parametrize("options", [{}, {"chunk_size": 7, "max_running": 3}, {"chunk_size": 16, "max_running": 12}])
def test_one_rank_all_together(options):
    engine = engine_for(Groups.single(), **options)
    check(continuations(engine, range(len(GOLDEN))))
    check(continuations(engine, shuffled()))


def test_one_rank_one_by_one():
    engine = engine_for(Groups.single())
    for i in range(len(GOLDEN)):
        check(continuations(engine, [i]))


def all_ways(rank, world):
    groups = Groups.build(Topology(tp=world), rank)
    engine = engine_for(groups, chunk_size=64, max_running=5)
    results = [continuations(engine, range(len(GOLDEN))), continuations(engine, shuffled())]
    results += [continuations(engine, [i]) for i in range(len(GOLDEN))]
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_tensor_parallel_together_shuffled_and_one_by_one(run_ranks, world):
    for results in run_ranks(all_ways, world, timeout=240):
        for result in results:
            check(result)
