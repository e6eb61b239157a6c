"""Files of loads and maps: every format there and back, and everything that is wrong with one, by name."""

import json
import os
import zipfile

import numpy as np
import pytest
from dspark.eplb.files import read_loads, read_map, write_map
from dspark.eplb.files.safe import read_npz, read_pt
from dspark.eplb.files.trt_yaml import parse_trt
from dspark.eplb.model_sizes import read_model_sizes
from dspark.eplb.placement import Placement
from dspark.eplb.shape import Shape

LOAD = np.array([[[3, 0, 5], [1, 1, 4]], [[2, 2, 2], [0, 6, 0]]])
SLOTS = np.array([[0, 1, 2, 0], [2, 1, 0, 1]])


@pytest.fixture
def placement():
    return Placement(SLOTS, Shape(3, 4, 2))


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


# Loads ------------------------------------------------------------------------------------------------------------


def test_npz_json_and_csv(tmp_path):
    np.savez(tmp_path / "a.npz", load=LOAD, topk=8)
    np.savez(tmp_path / "flat.npz", load=LOAD[0])
    write(tmp_path / "a.json", json.dumps({"logical_count": LOAD.tolist(), "rank": 0}))
    rows = [f"{w},{la},{e},{n}" for (w, la, e), n in np.ndenumerate(LOAD)]
    write(tmp_path / "a.csv", "window,layer,expert,count\n" + "\n".join(rows) + "\n")
    write(tmp_path / "matrix.csv", "3,0,5\n1,1,4\n")
    for name in ("a.npz", "a.json", "a.csv"):
        assert np.array_equal(read_loads([tmp_path / name]).load, LOAD), name
    for name in ("flat.npz", "matrix.csv"):
        assert np.array_equal(read_loads([tmp_path / name]).load, LOAD[:1]), name
    both = read_loads([tmp_path / "a.npz", tmp_path / "flat.npz"])
    assert both.num_windows == 3
    assert both.total().tolist() == (LOAD.sum(0) + LOAD[0]).tolist()
    assert both.total(0.5).tolist() == (0.25 * LOAD[0] + 0.5 * LOAD[1] + LOAD[0]).tolist()


def test_windows_without_tokens_are_left_out(tmp_path):
    ring = np.zeros((5, 2, 3), np.int64)
    ring[3] = LOAD[0]
    np.savez(tmp_path / "ring.npz", load=ring)
    assert np.array_equal(read_loads([tmp_path / "ring.npz"]).load, LOAD[:1])
    np.savez(tmp_path / "none.npz", load=ring * 0)
    with pytest.raises(ValueError, match="none.npz: no window holds a single token"):
        read_loads([tmp_path / "none.npz"])


def test_dump_of_counts_per_expert(tmp_path):
    torch = pytest.importorskip("torch")
    stat = {"rank": 0, "logical_count": torch.tensor(LOAD, dtype=torch.int32)}
    torch.save({**stat, "average_utilization_rate_over_window": None}, tmp_path / "stat.pt")
    assert np.array_equal(read_loads([tmp_path / "stat.pt"]).load, LOAD)


def test_dumps_of_counts_per_pass_of_several_ranks(tmp_path):
    torch = pytest.importorskip("torch")
    counts = {0: [[[5, 1, 0, 2], [0, 3, 3, 1]], [[1, 0, 0, 0], [0, 0, 0, 4]]], 1: [[[0, 0, 9, 0], [1, 0, 0, 0]]]}
    for rank, passes in counts.items():
        records = [
            {"forward_pass_id": 10 + n, "rank": rank, "gatherer_key": "primary", "global_physical_count": count}
            for n, count in enumerate(map(torch.tensor, passes))
        ]
        if rank == 1:
            records[0]["topk_ids_of_layer"] = torch.full((2, 7, 8), -1)
        torch.save({"records": records, "last_physical_to_logical_map": torch.tensor(SLOTS)}, tmp_path / f"{rank}.pt")
    files = [tmp_path / "0.pt", tmp_path / "1.pt"]
    expected = [[[7, 1, 9], [3, 4, 1]], [[1, 0, 0], [0, 4, 0]]]
    assert read_loads(files).load.tolist() == expected
    with pytest.raises(ValueError, match="repeats pass 10 of rank 0"):
        read_loads([files[0], files[0]])


def test_json_lines_of_counts_per_slot(tmp_path):
    record = {"record_type": "eplb_load_stats", "version": 1, "step": 7, "num_ranks": 2, "p2l_map": SLOTS.tolist()}
    lines = [
        {**record, "expert_load": [[5, 1, 0, 2], [0, 3, 3, 1]]},
        {**record, "expert_load": [[0] * 4, [0, 0, 0, 1]]},
    ]
    write(tmp_path / "stats.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_loads([tmp_path / "stats.jsonl"]).load.tolist() == [[[7, 1, 0], [3, 4, 0]], [[0, 0, 0], [0, 1, 0]]]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", '{"logical_count": [[1, 2], [3]]}', ["rows of different lengths"]),
        ("a.json", '{"logical_count": [[1, NaN]]}', ["NaN"]),
        ("a.json", '{"logical_count": [[1, 2]], "logical_count": [[3, 4]]}', ["twice"]),
        ("a.json", '{"counts": [[1, 2]]}', ["counts", "neither load nor logical_count"]),
        ("a.json", "[[1, 2]]", ["an object"]),
        ("a.json", "{", ["no JSON"]),
        ("a.json", '{"load": [[1, -2]]}', ["window 0, layer 0, expert 1", "-2", "negative"]),
        ("a.json", '{"load": [[1, 2.5]]}', ["2.5", "not a whole number", "--fractions"]),
        ("a.json", '{"load": ["a"]}', ["must hold numbers"]),
        ("a.csv", "layer,expert,count\n0,0,1\n0,0,2\n", ["more than once"]),
        ("a.csv", "layer,expert\n0,0\n", ["needed are layer, expert, count"]),
        ("a.csv", "layer,expert,count\n0,x,1\n", ["number"]),
        ("a.csv", "layer,expert,count\n0,1.5,1\n", ["expert must be a whole number"]),
        ("a.csv", "1,2\n3\n", ["same number"]),
        ("a.csv", "", ["empty"]),
        ("a.jsonl", '{"record_type": "other"}', ["'other', not a 'eplb_load_stats'"]),
        ("a.jsonl", '{"record_type": "eplb_load_stats", "version": 2}', ["version 2"]),
        ("a.txt", "1", ["unknown kind", ".npz"]),
    ],
)
def test_what_is_wrong_with_loads(tmp_path, name, text, words):
    with pytest.raises(ValueError) as caught:
        read_loads([write(tmp_path / name, text)])
    assert all(word in str(caught.value) for word in [*words, name]), caught.value


def test_fractions_by_wish(tmp_path):
    write(tmp_path / "a.json", '{"load": [[1, 2.5]]}')
    assert read_loads([tmp_path / "a.json"], fractions=True).load.tolist() == [[[1, 2.5]]]


def test_files_that_do_not_fit_together(tmp_path):
    np.savez(tmp_path / "a.npz", load=LOAD)
    np.savez(tmp_path / "b.npz", load=LOAD[:, :, :2])
    with pytest.raises(ValueError, match=r"b.npz has 2 layers of 2 experts, .*a.npz has 2 of 3"):
        read_loads([tmp_path / "a.npz", tmp_path / "b.npz"])


# Files that mean harm ---------------------------------------------------------------------------------------------


class Harm:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_hostile_torch_file_is_refused_and_not_run(tmp_path):
    torch = pytest.importorskip("torch")
    mark = tmp_path / "harm"
    torch.save({"logical_count": Harm(mark)}, tmp_path / "a.pt")
    for read in (lambda: read_loads([tmp_path / "a.pt"]), lambda: read_map(tmp_path / "a.pt")):
        with pytest.raises(ValueError, match="a.pt is no torch file of plain tensors and was not run"):
            read()
    assert not mark.exists()


def test_a_hostile_npz_is_refused_and_not_run(tmp_path):
    mark = tmp_path / "harm"
    np.savez(tmp_path / "a.npz", load=np.array([Harm(mark)], dtype=object))
    with pytest.raises(ValueError, match="a.npz is no npz of plain arrays"):
        read_loads([tmp_path / "a.npz"])
    assert not mark.exists()


def test_files_above_the_limit_are_not_read(tmp_path):
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("load.npy", b"\0" * 10_000_000)
    assert (tmp_path / "bomb.npz").stat().st_size < 100_000
    with pytest.raises(ValueError, match="holds 10000000 bytes, more than the 1000000"):
        read_npz(tmp_path / "bomb.npz", most=1_000_000)
    torch = pytest.importorskip("torch")
    torch.save({"load": torch.zeros(1).expand(4000, 4000)}, tmp_path / "wide.pt")
    with pytest.raises(ValueError, match=r"tensor of shape \[4000, 4000\]"):
        read_pt(tmp_path / "wide.pt", most=1_000_000)


# Maps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m.json", "m.npz", "m.csv", "m.yaml", "m.yml", "m.jsonl"])
def test_maps_there_and_back(tmp_path, placement, name):
    written = write_map(tmp_path / name, placement, first_layer=3)
    found = read_map(written[0])
    assert np.array_equal(found.placement(2).slots, SLOTS)
    assert found.layers == ((3, 4) if name in ("m.yaml", "m.yml", "m.jsonl") else None)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_sglang_accepts(tmp_path, placement):
    """Its loader calls ``init_by_mapping(model_config, **content)``: exactly one key, rows of whole numbers."""
    write_map(tmp_path / "m.json", placement, meta={"balance": 0.5})
    content = json.loads((tmp_path / "m.json").read_text())
    assert content == {"physical_to_logical_map": SLOTS.tolist()}
    assert all(type(value) is int for row in content["physical_to_logical_map"] for value in row)
    assert json.loads((tmp_path / "m.json.meta.json").read_text()) == {"balance": 0.5}


def test_what_tensorrt_llm_reads(tmp_path, placement):
    yaml = pytest.importorskip("yaml")
    write_map(tmp_path / "m.yaml", placement, first_layer=3)
    content = yaml.safe_load((tmp_path / "m.yaml").read_text())
    assert content == {
        "num_slots": 4,
        "layer_updates_per_iter": 0,
        "initial_global_assignments": {3: [0, 1, 2, 0], 4: [2, 1, 0, 1]},
    }
    for style in (None, False, True):
        written = yaml.safe_dump(content, default_flow_style=style)
        if style is not True:
            assert parse_trt(written, "x") == (4, {3: [0, 1, 2, 0], 4: [2, 1, 0, 1]}), written


def test_what_vllm_reads(tmp_path, placement):
    write_map(tmp_path / "m.jsonl", placement)
    (line,) = (tmp_path / "m.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "record_type": "eplb_initial_mapping",
        "version": 1,
        "num_redundant_experts": 1,
        "num_slots": 4,
        "initial_global_assignments": {"0": [0, 1, 2, 0], "1": [2, 1, 0, 1]},
    }
    assert read_map(tmp_path / "m.jsonl").num_experts == 3


def test_the_torch_file_of_a_map(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"physical_to_logical_map": torch.tensor(SLOTS)}, tmp_path / "m.pt")
    assert np.array_equal(read_map(tmp_path / "m.pt").slots, SLOTS)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("m.json", '{"physical_to_logical_map": [[0, 1]], "note": 1}', ["note", "sglang fails on any key"]),
        ("m.json", '{"logical_count": [[0, 1]]}', ["not physical_to_logical_map"]),
        ("m.json", '{"physical_to_logical_map": [[0.5, 1]]}', ["whole numbers"]),
        ("m.json", '{"physical_to_logical_map": [[0, 1], [0]]}', ["rows of different lengths"]),
        ("m.csv", "layer,slot,expert\n0,0,1\n0,2,1\n", ["every slot of every layer once"]),
        ("m.yaml", "num_slots: 4\n", ["assigns no layer"]),
        ("m.yaml", "initial_global_assignments:\n  0: [1]\n", ["no num_slots"]),
        (
            "m.yaml",
            "num_slots: 2\ninitial_global_assignments:\n  0: [0]\n",
            ["layer 0 assigns 1 slots, num_slots is 2"],
        ),
        ("m.yaml", "num_slots: 1\ninitial_global_assignments:\n  0: [x]\n", ["line 3", "'x'"]),
        ("m.yaml", "num_slots: 1\nother: 3\n", ["line 2", "unknown key 'other'"]),
        ("m.yaml", "num_slots: 1\ninitial_global_assignments:\n  0: [0\n", ["ends inside a list"]),
        ("m.jsonl", '{"record_type": "eplb_initial_mapping", "version": 1}', ["lacks", "num_slots"]),
        ("m.bin", "", ["unknown kind of map"]),
    ],
)
def test_what_is_wrong_with_maps(tmp_path, name, text, words):
    with pytest.raises(ValueError) as caught:
        read_map(write(tmp_path / name, text))
    assert all(word in str(caught.value) for word in [*words, name]), caught.value


def test_a_map_on_a_deployment(tmp_path, placement):
    write_map(tmp_path / "m.json", placement)
    write_map(tmp_path / "m.npz", placement)
    with pytest.raises(ValueError, match="give --gpus"):
        read_map(tmp_path / "m.json").placement()
    with pytest.raises(ValueError, match="made for 2 GPUs, not for 4"):
        read_map(tmp_path / "m.npz").placement(4)
    assert read_map(tmp_path / "m.npz").placement().shape == placement.shape


def test_a_failed_write_leaves_the_old_file(tmp_path, placement):
    path = write(tmp_path / "m.json", "old")
    with pytest.raises(TypeError):
        write_map(path, placement, first_layer="x")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ValueError, match="maps are written as"):
        write_map(tmp_path / "m.txt", placement)


def test_sizes_of_a_model(tmp_path):
    config = {"n_routed_experts": 256, "num_hidden_layers": 43, "hidden_size": 4096, "moe_intermediate_size": 2048}
    write(tmp_path / "config.json", json.dumps({**config, "expert_dtype": "fp4"}))
    found = read_model_sizes(tmp_path)
    assert (found.num_experts, found.num_layers) == (256, 43)
    assert found.expert_bytes == 3 * 4096 * 2048 * 17 // 32
    write(tmp_path / "config.json", json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    assert read_model_sizes(tmp_path).expert_bytes == 3 * 4096 * 2048 + 3 * 4096 * 2048 // 128**2 * 4
    write(tmp_path / "config.json", json.dumps({"hidden_size": 1}))
    with pytest.raises(ValueError, match="none of n_routed_experts"):
        read_model_sizes(tmp_path)
