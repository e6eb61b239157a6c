"""The command line: every verb, its figures, its files, its exit statuses."""

import json
import subprocess
import sys

import numpy as np
import pytest
from dspark.eplb.balance import plan
from dspark.eplb.cli import VERBS, main
from dspark.eplb.files import write_map
from dspark.eplb.synthetic import drifting_loads

LOADS = drifting_loads(3, 4, 32, 0.8, seed=6, tokens=20_000)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    np.savez(tmp_path / "loads.npz", load=LOADS)
    write_map(tmp_path / "live.json", plan(LOADS[0], 8, num_redundant=16, num_nodes=2))
    write_map(tmp_path / "next.json", plan(LOADS[2], 8, num_redundant=16, num_nodes=2))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, line, status=0):
    """The JSON that a command prints."""
    code = main([*line.split(), "--json"])
    out, err = capsys.readouterr()
    assert code == status, err
    return json.loads(out)


def fails(capsys, line, status, *words):
    code = main(line.split())
    _, err = capsys.readouterr()
    assert code == status, err
    assert len(err.splitlines()) == 1 and "Traceback" not in err
    assert all(word in err for word in words), err


def test_plan(folder, capsys):
    found = run(capsys, "plan --load loads.npz --gpus 8 --nodes 2 --redundant 16 --out map.json --min-balance 0.98")
    assert found["balance"]["worst"] >= 0.98 and found["balance"]["worst"] >= found["greedy_balance"]["worst"]
    content = json.loads((folder / "map.json").read_text())
    assert list(content) == ["physical_to_logical_map"]
    expected = plan(LOADS.sum(0), 8, num_redundant=16, num_nodes=2).balance(LOADS.sum(0))
    assert found["balance"]["mean"] == pytest.approx(expected.mean())
    meta = json.loads((folder / "map.json.meta.json").read_text())
    assert len(meta["sources"][0]["sha256"]) == 64 and meta["options"]["gpus"] == 8
    assert [layer["reason"] for layer in found["layers"]] == ["none"] * 4


def test_plan_in_words(folder, capsys):
    assert main("plan --load loads.npz --gpus 8 --redundant 16".split()) == 0
    out, err = capsys.readouterr()
    assert "4 layers x 32 experts on 8 GPUs" in out and "no placement can beat" in out and not err


def test_plan_from_the_live_map(folder, capsys):
    line = "plan --load loads.npz --decay 0.01 --gpus 8 --nodes 2 --current live.json --expert-bytes 1MB"
    free = run(capsys, f"{line} --out a.json")
    few = run(capsys, f"{line} --max-moves 5 --out b.json")
    bytes_ = run(capsys, f"{line} --max-bytes 3.5MB")
    assert free["moved_experts"] > 5 >= few["moved_experts"] and bytes_["moved_experts"] <= 3
    assert bytes_["moved_bytes"] == bytes_["moved_experts"] * 10**6
    live = few["live_balance"]["mean"]
    assert live < few["balance"]["mean"] < free["balance"]["mean"]
    assert run(capsys, "diff live.json b.json --gpus 8 --nodes 2")["moved_experts"] == few["moved_experts"]
    fails(capsys, "plan --load loads.npz --gpus 8 --max-moves 3", 2, "--max-moves needs the live map")
    fails(capsys, f"{line} --redundant 8", 2, "--redundant 8", "16")


def test_a_balance_that_cannot_be_had(folder, capsys):
    np.savez("hot.npz", load=np.array([[1000] + [1] * 31]))
    fails(
        capsys,
        "plan --load hot.npz --gpus 8 --min-balance 0.9",
        1,
        "layer 0",
        "below 0.9",
        "expert 0 carries 7.76 times",
        "--redundant 8 reaches",
    )
    found = run(capsys, "inspect hot.npz --gpus 8 --min-balance 0.9", status=1)
    assert found["redundancy"]["found"] == 8 == found["redundancy"]["proven"]


def test_inspect(folder, capsys):
    found = run(capsys, "inspect loads.npz")
    assert found["windows"] == 3 and found["tokens"] == LOADS.sum()
    hottest = int(LOADS.sum(0)[1].argmax())
    assert found["layers"][1]["hottest"][0]["expert"] == hottest
    scored = run(capsys, "inspect --load loads.npz --map live.json --gpus 8 --nodes 2")
    assert scored["balance"]["worst"] <= scored["layers"][0]["balance"]
    fails(capsys, "inspect loads.npz --min-balance 0.5", 2, "--map or --gpus")
    assert len(run(capsys, "inspect loads.npz --layers 1-2")["layers"]) == 2
    fails(capsys, "inspect loads.npz --layers 3-4", 2, "3-4", "4 layers")


def test_diff_and_migrate(folder, capsys):
    moved = run(capsys, "diff live.json next.json --gpus 8 --nodes 2")["moved_experts"]
    line = "migrate --from live.json --to next.json --gpus 8 --nodes 2 --expert-bytes 2MB --out moves.json"
    found = run(capsys, f"{line} --load loads.npz --decay 0.01 --step-ms 5")
    assert found["num_transfers"] == moved > 0
    assert found["bytes_within_node"] + found["bytes_across_nodes"] == moved * 2 * 10**6
    assert found["break_even_steps"] > 0 and found["seconds"] > 0
    batches = json.loads((folder / "moves.json").read_text())["batches"]
    assert sum(map(len, batches)) == moved
    fails(capsys, "migrate --from live.json --to next.json --gpus 8", 2, "--expert-bytes")
    back = run(capsys, f"{line.replace('live', 'x').replace('next', 'live').replace('x.json', 'next.json')}")
    assert back["num_transfers"] == moved or back["num_transfers"] > 0


def test_simulate(folder, capsys):
    line = "simulate --map live.json --gpus 8 --nodes 2 --load loads.npz"
    found = {split: run(capsys, f"{line} --split {split}") for split in ("even", "nearest", "weighted")}
    assert len(found["even"]["windows"]) == 3
    assert found["weighted"]["balance"]["mean"] > found["even"]["balance"]["mean"]
    assert found["even"]["windows"][0]["mean"] > found["even"]["windows"][2]["mean"], "the loads drift away"
    fails(capsys, f"{line} --min-balance 0.99", 1, "below 0.99")


def test_convert_there_and_back(folder, capsys):
    for line in (
        "live.json m.yaml --first-layer 3",
        "m.yaml m.jsonl",
        "m.jsonl m.npz --gpus 8 --nodes 2",
        "m.npz m.csv",
        "--map m.csv --to sglang --out back.json",
    ):
        assert main(["convert", *line.split()]) == 0, line
    assert (folder / "back.json").read_text() == (folder / "live.json").read_text()
    for line in ("--load loads.npz --out l.csv", "--load l.csv --out l.json", "--load l.json --out l.npz"):
        assert main(["convert", *line.split()]) == 0, line
    with np.load(folder / "l.npz") as back:
        assert np.array_equal(back["load"], LOADS)
    capsys.readouterr()
    fails(capsys, "convert live.json", 2, "the map to read")
    fails(capsys, "convert live.json m.txt", 2, "maps are written as")


def test_validate(folder, capsys):
    assert run(capsys, "validate --map live.json --gpus 8")["valid"]
    fails(capsys, "validate --map live.json --gpus 7", 2, "48 slots", "7 GPUs")
    fails(capsys, "validate --map live.json", 2, "--gpus")
    config = {"n_routed_experts": 32, "num_hidden_layers": 5, "hidden_size": 8, "moe_intermediate_size": 4}
    (folder / "config.json").write_text(json.dumps(config))
    fails(capsys, "validate live.json --gpus 8 --model .", 2, "4 layers", "the model 5")
    (folder / "bad.json").write_text('{"physical_to_logical_map": [[0, 0, 1, 3]]}')
    fails(capsys, "validate bad.json --gpus 2", 2, "layer 0 has no slot for expert 2")
    (folder / "twice.json").write_text('{"physical_to_logical_map": [[0, 0, 1, 2]]}')
    assert run(capsys, "validate twice.json --gpus 2")["wasted_slots"] == 1
    fails(capsys, "validate twice.json --gpus 2 --strict", 2, "second copy")


def test_pictures(folder, capsys):
    pytest.importorskip("matplotlib")
    for line in (
        "plan --load loads.npz --gpus 8 --redundant 16 --plot plan.png",
        "inspect loads.npz --plot loads.png",
        "inspect loads.npz --map live.json --gpus 8 --plot gpus.png",
        "diff live.json next.json --gpus 8 --nodes 2 --plot moves.png",
        "simulate --map live.json --gpus 8 --load loads.npz --plot time.png",
    ):
        (name,) = run(capsys, line)["files"]
        head = (folder / name).read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(head[16:20], "big") > 800
    fails(capsys, "inspect loads.npz --plot loads.jpg", 2, ".png")


def test_usage(folder, capsys):
    fails(capsys, "fly", 2, "'fly'", "validate")
    fails(capsys, "plan", 2, "--load")
    fails(capsys, "plan --load loads.npz", 2, "--gpus G")
    fails(capsys, "plan --load missing.npz --gpus 8", 2, "missing.npz")
    fails(capsys, "plan --load loads.npz --gpus 0", 2, "num_gpus is 0")
    fails(capsys, "plan --load loads.npz --gpus 8 --expert-bytes many", 2, "'many' is no number of bytes")
    assert main([]) == 2 and main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(verb in overview for verb in VERBS)
    for verb in VERBS:
        with pytest.raises(SystemExit) as caught:
            main([verb, "--help"])
        assert caught.value.code == 0 and "Example: dspark eplb" in capsys.readouterr().out


def test_as_a_module(folder):
    line = [sys.executable, "-m", "dspark.eplb", "validate", "--map", "live.json", "--gpus", "8"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=folder, timeout=120)
    assert done.returncode == 0 and "is valid" in done.stdout, done.stderr
    code = "import sys, dspark.eplb.cli; assert not {'torch', 'numba', 'matplotlib'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, timeout=120)
    assert done.returncode == 0, "plans and files need only numpy: " + done.stderr
