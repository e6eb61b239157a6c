"""The ``topology`` verb and the layout flags it shares."""

import argparse
import json
import pathlib

import pytest
from dspark.parallel.topology import AXES
from dspark.runtime.cli import main
from dspark.runtime.verbs.layout import add_layout_flags, topology_from_args

CASES = json.loads((pathlib.Path(__file__).parents[1] / "data/parallel/groups.json").read_text())["cases"]
LAUNCHERS = ("RANK", "WORLD_SIZE", "GROUP_RANK", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


def flags_of(case):
    world = case.get("world", case["sizes"]["tp"] * case["sizes"]["pp"])
    return [f"--{name.replace('_', '-')}={size}" for name, size in case["sizes"].items()] + [f"--world={world}"]


@pytest.mark.parametrize("case", [case for case in CASES if case["status"] == "ok"], ids=lambda case: case["name"])
def test_json_is_the_oracle(case, capsys):
    assert main(["topology", "--json", *flags_of(case)]) == 0
    printed = json.loads(capsys.readouterr().out)
    order = case["coords"]["order"]
    assert printed == {
        "sizes": case["sizes"],
        "groups": case["groups"],
        "coords": [dict(zip(order, row)) for row in case["coords"]["by_rank"]],
        "crosses_nodes": case["crosses_nodes"],
    }
    assert list(printed["groups"]) == list(AXES)


@pytest.mark.parametrize(
    "flags",
    [flags_of(case) for case in CASES if case["status"] != "ok"]
    + [
        ["--world=8", "--ep=3"],
        ["--world=8", "--tp=0"],
        ["--world=-1"],
        ["--world=99999999999"],
        ["--dispatcher=carrier-pigeon"],
        [],
    ],
    ids=" ".join,
)
def test_refusals_are_one_line_and_status_2(flags, capsys):
    assert main(["topology", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("dspark: error: ") and captured.err.count("\n") == 1


def test_the_table(capsys):
    assert main(["topology", "--world=16", "--dp=2", "--cp=4", "--ep=16"]) == 0
    text = capsys.readouterr().out
    assert "16 ranks on 2 nodes = pp 1 x tp 16" in text and "dp 2 x cp 4 x attn_tp 2" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["attn_dp", "2", "8", "yes", "-", "[0,8]", "[1,9]", "[2,10]", "[3,11]", "[4,12]"] == rows[9][:10]
    assert rows[-1] == ["15", "1", "0", "1", "3", "1", "0", "15", "0"]


def test_world_comes_from_the_launcher_else_from_tp_and_pp(capsys, monkeypatch):
    assert main(["topology", "--tp=4", "--pp=2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["coords"]) == 8
    environ = {"RANK": "0", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3", "GROUP_RANK": "0"}
    for name, value in {**environ, "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["topology", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["coords"]) == 6 and printed["crosses_nodes"]["tp"]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert main(["topology", "--json"]) == 0
    assert capsys.readouterr().out == "", "rank 0 alone prints"


def parse(*flags):
    parser = argparse.ArgumentParser()
    add_layout_flags(parser)
    return parser.parse_args(flags)


def test_names_of_other_engines():
    ours = parse("--tp=8", "--dp=2", "--cp=2", "--ep=4", "--moe-dp=1", "--pp=2")
    assert ours == parse("--tp-size=8", "--attn-dp-size=2", "--attn-cp-size=2", "--ep-size=4", "--pp=2")
    assert parse("--tensor-parallel-size=8").tp == 8
    defaults = {
        "tp": None, "pp": 1, "dp": 1, "cp": 1, "ep": None, "moe_dp": 1, "cp_split": "interleave",
        "dispatcher": "standard", "dispatch_backend": "auto", "overlap": "none", "gpus_per_node": None,
    }  # fmt: skip
    assert defaults.items() <= vars(parse()).items()


@pytest.mark.parametrize(
    "flags, ep",
    [
        ([], 1),
        (["--dispatcher=standard", "--ep=2"], 2),
        (["--dispatcher=normal"], 8),
        (["--dispatcher=low_latency", "--ep=1"], 8),
        (["--dispatcher=auto", "--ep=4"], 4),
        (["--dispatcher=auto", "--pp=2"], 4),
    ],
)
def test_an_all_to_all_dispatcher_takes_all_of_tp(flags, ep):
    assert topology_from_args(parse(*flags), 8, None).ep == ep


def test_nodes_come_from_the_flag_then_the_ranks_then_the_launcher():
    found = [0, 1] * 4
    assert topology_from_args(parse(), 8, 4, found).nodes == tuple(found)
    assert topology_from_args(parse("--gpus-per-node=2"), 8, 4, found).nodes == (0, 0, 1, 1, 2, 2, 3, 3)
    assert topology_from_args(parse(), 8, 4).nodes == (0,) * 4 + (1,) * 4
    assert topology_from_args(parse(), 8, None).nodes == ()
    with pytest.raises(ValueError, match="8 ranks do not fill nodes of gpus_per_node = 3"):
        topology_from_args(parse("--gpus-per-node=3"), 8, None)
