"""Layouts give the tokens of one rank, and their bytes are those of the formulas: a part of what the benchmarks run."""

import json

import pytest
from dspark.parallel.topology import Topology
from dspark.runtime.bench.layouts import compare, generate, layouts, one_rank, settings
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.cli import main
from dspark.runtime.model_config import load_model_config

FOLDER = str(bundled_model())
CONFIG = load_model_config(FOLDER)


@pytest.fixture(scope="module")
def wanted():
    """The ids of one rank."""
    return one_rank(FOLDER, CONFIG, 12)


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
def test_same_tokens_as_one_rank(sizes, wanted):
    topology = Topology(**sizes)
    assert compare(FOLDER, CONFIG, topology, settings(CONFIG, topology, quick=True), 12, wanted) == []


def test_other_tokens_are_noticed(monkeypatch, capsys):
    """The comparison itself: a run whose ids differ on some rank is named, and the exit status says so."""
    real = generate

    def biased(weights, setting, prompt_lengths, num_new):
        ids = real(weights, setting, prompt_lengths, num_new)
        return ids if weights.groups.world.rank == 0 or setting.chunk_size == 7 else [ids[0][:-1], *ids[1:]]

    monkeypatch.setattr("dspark.runtime.bench.layouts.generate", biased)
    assert main(["bench", "layouts", "--only", "tp2", "--quick", "--new-tokens", "3"]) == 1
    out = capsys.readouterr().out
    assert "v4-tiny tp2" in out and "('none', 32768," in out and "('none', 7," not in out


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--only", "tp3 cp2"], "3 is not divisible by"),
        (["--only", "two ranks"], "not a layout"),
        (["--only", "tp16"], "v4-tiny as tp16"),
        (["--part", "3/2"], "not a part"),
    ],
)
def test_layouts_that_do_not_exist_are_refused(flags, message, capsys):
    assert main(["bench", "layouts", *flags]) == 2
    assert message in capsys.readouterr().err


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
