"""Layouts give the tokens of one rank, and their bytes are those of the formulas: a part of what the benchmarks run."""

import json

import pytest
from dspark.parallel.topology import Topology
from dspark.runtime.bench.layouts import compare, layouts, settings
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.cli import main
from dspark.runtime.model_config import load_model_config

FOLDER = str(bundled_model())
CONFIG = load_model_config(FOLDER)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "ep": 2},
        {"tp": 2, "dp": 2},
        {"tp": 2, "cp": 2},
        {"tp": 1, "pp": 2},
        {"tp": 4, "dp": 2, "cp": 2, "ep": 4},
        {"tp": 4, "cp": 2, "ep": 2},
        {"tp": 2, "pp": 2, "cp": 2},
        {"tp": 2, "pp": 2, "dp": 2, "ep": 2},
    ],
    ids=lambda sizes: "-".join(f"{axis}{size}" for axis, size in sizes.items()),
)
def test_same_tokens_as_one_rank(sizes):
    topology = Topology(**sizes)
    assert compare(FOLDER, CONFIG, topology, settings(CONFIG, topology, quick=True), num_new=12) == []


def test_other_tokens_are_noticed(monkeypatch):
    """The comparison itself: a run whose ids differ on some rank is named."""
    topology = Topology(tp=2)
    runs = settings(CONFIG, topology, quick=True)[:1]

    def biased(folder, config, groups, setting, num_new):
        return [[groups.tp.rank]]

    monkeypatch.setattr("dspark.runtime.bench.layouts.generate", biased)
    assert compare(FOLDER, CONFIG, topology, runs, num_new=4) == [str(tuple(runs[0]))]


def test_every_layout_of_eight_ranks_is_listed():
    found = list(layouts(CONFIG, 8))
    assert {"dp": 2, "cp": 4} in [{"dp": t.dp, "cp": t.cp} for t in found if t.tp == 8]
    assert max(t.world for t in found) == 8 and min(t.world for t in found) == 1
    assert all(CONFIG.num_heads % t.attn_tp == 0 and CONFIG.o_groups % t.attn_tp == 0 for t in found)
    assert len({tuple(t.sizes.values()) for t in found}) == len(found)


@pytest.mark.parametrize(
    "flags",
    [
        ["--tp", "4", "--dp", "2"],
        ["--tp", "4", "--dp", "2", "--cp", "2", "--ep", "4", "--requests", "5"],
        ["--tp", "2", "--pp", "2", "--cp", "2", "--cp-split", "zigzag", "--tokens", "37"],
    ],
    ids=" ".join,
)
def test_bytes_equal_the_formulas(flags, capsys):
    assert main(["bench", "traffic", *flags, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = [row for rank in result["ranks"] for row in rank]
    assert result["same"] and all(row["bytes"] == row["formula_bytes"] for row in rows)
    assert sum(row["bytes"] for row in rows) > 0
