"""Dispatchers measured on forked ranks: the counters of the collectives are the model's, and the interfaces'."""

import json

import pytest
from dspark.parallel.namespaces import why_not
from dspark.runtime.bench.dispatch_measured import MEASURED
from dspark.runtime.cli import main

NO_NAMESPACES = why_not()


def bench(capsys, text):
    status = main(["bench", "dispatch", "--json", *text.split()])
    out = capsys.readouterr()
    assert status == 0, out.err or out.out
    return json.loads(out.out)


@pytest.mark.parametrize(
    "flags",
    [
        "--nodes 2 --gpus-per-node 2 --experts 16 --topk 4 --hidden 64 --tokens 33 --dtype float32",
        "--nodes 2 --gpus-per-node 4 --experts 16 --topk 3 --hidden 128 --tokens 20 --routing skewed --dtype fp8",
        "--nodes 4 --gpus-per-node 1 --experts 16 --topk 3 --hidden 64 --tokens 17 --routing group_limited --groups 4"
        " --topk-groups 2",
        "--nodes 1 --gpus-per-node 2 --experts 4 --topk 2 --hidden 64 --tokens 5",
    ],
)
def test_the_model_gives_what_the_counters_count(capsys, flags):
    result = bench(capsys, flags + " --rounds 1")
    for mode in MEASURED:
        line = result[mode]
        assert line["agrees"], (mode, line)
        assert line["remote_copies_per_token"] == line["model_remote_copies_per_token"]
        assert line["local_copies_per_token"] == line["model_local_copies_per_token"]
    if result["setting"]["nodes"] > 1:
        assert result["normal"]["remote_copies_per_token"] <= result["flat"]["remote_copies_per_token"]


@pytest.mark.skipif(NO_NAMESPACES is not None, reason=f"NOT TESTED, bytes that cross nodes: {NO_NAMESPACES}")
@pytest.mark.parametrize("nodes, per_node, copies", [(2, 2, {"normal": 0.9965, "low_latency": 4.0}), (4, 1, {})])
def test_the_interfaces_count_what_the_collectives_count(capsys, nodes, per_node, copies):
    """Bytes that really cross, within a tenth; normal sends one payload for each token and node."""
    shape = f"--nodes {nodes} --gpus-per-node {per_node} --experts 256 --topk 8 --hidden 256 --tokens 300"
    result = bench(capsys, f"{shape} --dtype float32 --rounds 2 --namespaces")
    for mode in MEASURED:
        assert result[mode]["agrees"] and 1.0 <= result[mode]["interface_ratio"] <= 1.1, (mode, result[mode])
    for mode, want in copies.items():
        assert result[mode]["remote_copies_per_token"] == pytest.approx(want, rel=0.02)
    line = result["normal"]
    payload = line["remote_copies_per_token"] * 2 * 4 * 256  # a row there and a row back
    assert line["interface_bytes_per_token"] == pytest.approx(payload, rel=0.1)


def test_the_table_and_wrong_flags(capsys):
    assert main("bench dispatch --experts 4 --topk 2 --hidden 32 --tokens 4 --rounds 1".split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(MEASURED) and all("same" in line for line in lines[2:])
    for flags, text in (
        ("--nodes 3 --experts 16", "16 slots"),
        ("--rate 1gbit", "--rate 1gbit needs --namespaces"),
        ("--simulate --namespaces", "--simulate counts without processes"),
    ):
        assert main(["bench", "dispatch", *flags.split()]) == 2
        assert text in capsys.readouterr().err
