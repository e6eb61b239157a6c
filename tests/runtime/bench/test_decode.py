"""``dspark bench decode``: two systems, the same ids, and figures that fit together. Never what the times are."""

import json
import pathlib
import sys

import pytest
import torch
from dspark.parallel.groups import Groups
from dspark.runtime.bench.baseline import TransformersSystem, import_transformers
from dspark.runtime.bench.systems import EngineSystem, first_difference
from dspark.runtime.bench.timing import Stopwatch, alternate
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.cli import main
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import load_engine

DATA = pathlib.Path(__file__).resolve().parent.parent.parent / "data" / "models"
GOLDEN = json.loads((DATA / "golden.json").read_text())["items"]
SMALL = ["--prompt-tokens", "8", "--new-tokens", "4", "--rounds", "1"]


def test_figures_and_profile(capsys):
    flags = ["--batch", "1,3", "--context", "16,48", "--profile", "--json"]
    assert main(["bench", "decode", *SMALL, *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    for name in ("batch_1", "batch_3"):
        figures = result[name]
        assert figures["ids_equal"] is True
        assert figures["ratio"] == pytest.approx(figures["tokens_per_s"] / figures["baseline_tokens_per_s"])
        assert figures["ratio_low"] <= figures["ratio"] <= figures["ratio_high"]
    assert result["context_16"]["ratio"] == 1.0
    long, short = result["context_48"], result["context_16"]
    assert long["ratio"] == pytest.approx(long["time_per_token_s"] / short["time_per_token_s"])
    assert "transformers" in result["setting"]["baseline"] and result["setting"]["threads"] == 1
    for name in ("profile_batch_1", "profile_batch_3"):
        check_profile(result[name])


def check_profile(profile):
    """Parts that leave something out, or count it twice, do not add up."""
    phases, operations = profile["phases"], profile["operations"]
    for name in ("schedule", "build", "model", "choose"):
        assert phases[name]["calls"] == 1 and phases[name]["seconds"] > 0
    assert sum(part["share"] for part in phases.values()) == pytest.approx(1.0)
    assert sum(part["seconds"] for part in operations.values()) == pytest.approx(phases["model"]["seconds"])
    assert phases["rest"]["seconds"] >= 0 and operations["between operations"]["seconds"] >= 0
    assert operations["attend"]["calls"] == 4  # the bundled model has four layers
    assert operations["hc_pre"]["calls"] == 8  # each with two sublayers


def test_table_and_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "decode.png"
    assert main(["bench", "decode", *SMALL, "--batch", "2", "--context", "12", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    for words in ("baseline: transformers", "1 thread, one rank", "tokens/s", "equal", "ms per token"):
        assert words in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_both_systems_give_the_golden_ids():
    folder, group = str(bundled_model()), [item for item in GOLDEN if len(item["prompt_ids"]) >= 25][:3]
    config = EngineConfig(draft="none", chunk_size=512)
    config = resolve(config, model_dir=folder, device_type="cpu", max_positions=4096, own_draft="none")
    ours = EngineSystem(load_engine(config, Groups.single(), torch.device("cpu")))
    theirs = TransformersSystem(import_transformers("decode"), folder, torch.float32, torch.device("cpu"))
    for item in group:
        for system in (ours, theirs):
            run = system.decode([item["prompt_ids"]], 6)
            assert run.token_ids == [item["output_ids"][:6]]
            assert len(run.stamps) == 6 and run.counts == [1] * 6
            assert run.start < run.stamps[0] and run.stamps == sorted(run.stamps)


def test_different_ids_are_said_and_fail(monkeypatch, capsys):
    real = TransformersSystem.decode

    def wrong(self, prompts, num_new):
        run = real(self, prompts, num_new)
        run.token_ids[1][2] ^= 1
        return run

    monkeypatch.setattr(TransformersSystem, "decode", wrong)
    assert main(["bench", "decode", *SMALL, "--batch", "2", "--context", "12"]) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT" in out and "prompt 1, new token 2" in out


def test_first_difference():
    assert first_difference([[1, 2], [3, 4]], [[1, 2], [3, 4]]) is None
    assert first_difference([[1, 2], [3, 4]], [[1, 2], [3, 5]]).startswith("prompt 1, new token 1: 4 here, 5")


def test_rounds_turn_the_order():
    order, ticks = [], []
    results = alternate([lambda: order.append("a") or "A", lambda: order.append("b") or "B"], 3, ticks.append)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert results == [["A"] * 3, ["B"] * 3] and ticks == [1] * 6


def test_stopwatch_adds_up_and_starts_again():
    waits = []
    watch = Stopwatch(lambda: waits.append(1))
    double, again = watch.wrap("double", lambda x: 2 * x), watch.wrap("double", lambda x, y=0: x + y)
    assert double(4) == 8 and again(1, y=2) == 3
    calls, seconds = watch.take()["double"]
    assert calls == 2 and seconds > 0 and len(waits) == 2
    assert watch.take()["double"] == (0, 0.0)


def refused(capsys, *flags):
    assert main(["bench", *flags]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_mistakes_are_named(capsys):
    error = refused(capsys, "decode", "--batch", "9")
    assert "9 prompts" in error and "8 of" in error
    assert "--prompt-tokens at most" in refused(capsys, "decode", "--prompt-tokens", "4000", "--batch", "1")
    error = refused(capsys, "decode", "--context", "4096", "--new-tokens", "10")
    assert "4096" in error and "10 new tokens" in error
    assert "at least 2" in refused(capsys, "decode", "--new-tokens", "1")
    assert "twice" in refused(capsys, "decode", "--batch", "2,2")
    assert "no folder" in refused(capsys, "decode", "--picture", "/nowhere/at/all.png")


def test_missing_transformers_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in ("decode", "prefill"):
        assert "dspark[dev]" in refused(capsys, name)


def test_several_ranks_are_refused(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert "2 were started" in refused(capsys, "decode", "--batch", "1")


def test_names(capsys):
    assert "decode, prefill" in refused(capsys, "nothing")
    assert main(["bench"]) == 0
    assert {"decode", "prefill", "memory"} <= {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    with pytest.raises(SystemExit) as end:
        main(["bench", "decode", "--help"])
    assert end.value.code == 0 and "--new-tokens" in capsys.readouterr().out


def test_draft_on_and_off(capsys, tmp_path):
    """The figures fit the tokens: 23 after the first one, in as many rounds as their mean says."""
    prompts = tmp_path / "golden.jsonl"
    prompts.write_text("".join(json.dumps({"token_ids": item["prompt_ids"]}) + "\n" for item in GOLDEN[:2]))
    flags = ["--draft", "auto", "--gamma", "3", "--batch", "1,2", "--verify", "static,sync", "--rounds", "2"]
    assert main(["bench", "decode", *flags, "--new-tokens", "24", "--prompts", str(prompts), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    for name in ("golden_batch_1_static", "golden_batch_2_static", "golden_batch_1_sync", "golden_batch_2_sync"):
        figures = result[name]
        assert figures["ids_equal"] is True
        assert figures["ratio"] == pytest.approx(figures["tokens_per_s"] / figures["plain_tokens_per_s"])
        assert 1 <= figures["tokens_per_round"] <= 4 and 0 <= figures["loop_share"] < 1
        assert figures["round_steps"] > 0
        assert (
            figures["full_ratio"] == pytest.approx(figures["ratio"]) if "batch_1" in name else figures["full_ratio"] > 0
        )
    assert result["golden_batch_1_static"]["tokens_per_round"] > 1.2
    assert result["golden_batch_1_static"]["tokens_per_round"] >= result["golden_batch_1_sync"]["tokens_per_round"]


def test_draft_flags_that_do_not_fit(capsys):
    assert main(["bench", "decode", "--gamma", "3"]) == 2
    assert "--gamma 3 needs --draft" in capsys.readouterr().err
    assert main(["bench", "decode", "--draft", "none", *SMALL]) == 2
    assert "no draft to compare with" in capsys.readouterr().err
    assert main(["bench", "decode", "--draft", "auto", "--verify", "often"]) == 2
    assert "'often' is none of static, sync, async" in capsys.readouterr().err
