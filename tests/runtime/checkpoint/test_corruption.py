"""Broken checkpoints: each is a named error, found without allocating what the broken file claims."""

import json
import os
import resource
import struct
import tracemalloc

import numpy as np
import pytest
from dspark.runtime.checkpoint import CheckpointError, CheckpointReader
from dspark.runtime.model_config import load_model_config

MIB = 2**20
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NAME = "layers.1.attn.wq_a.weight"


class Bounded:
    """Inside, address space and Python allocations are limited to a little more than before."""

    def __init__(self, limit=192 * MIB):
        self._limit = limit

    def __enter__(self):
        self._before = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + self._limit, self._before[1]))
        tracemalloc.start()
        return self

    def __exit__(self, *error):
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, self._before)
        assert peak < self._limit


def load(folder):
    """Everything a rank would do with the checkpoint."""
    reader = CheckpointReader(folder, load_model_config(folder))
    for name in reader.names():
        reader.take(name)


def assert_refused(folder, message):
    with Bounded(), pytest.raises(ValueError, match=message) as caught:
        load(folder)
    assert len(str(caught.value)) < 2000


def test_the_untouched_checkpoint_loads(tiny, tmp_path):
    with Bounded():
        load(tiny.write(tmp_path / "one"))
        load(tiny.write_shards(tmp_path / "two", tiny.halves()))


def without(tensors, name):
    return {key: value for key, value in tensors.items() if key != name}


def test_missing_and_extra_tensors(tiny, tmp_path):
    assert_refused(
        tiny.write(tmp_path / "a", without(tiny.weights, NAME)), f"1 tensors are missing .*{NAME} is missing"
    )
    for index, extra in enumerate(("layers.3.attn_norm.weight", "rotary.inv_freq", "layers.0.attn.compressor.ape", "")):
        folder = tiny.write(tmp_path / f"b{index}", {**tiny.weights, extra: np.zeros(4, np.float32)})
        assert_refused(folder, f"1 are unused; {extra} is not a tensor of this model")
    twice = {**tiny.weights, "model.layers.1.self_attn.q_a_proj.weight": tiny.weights[NAME]}
    assert_refused(tiny.write(tmp_path / "c", twice), f"{NAME} is there twice: as 'layers.1.*' and as 'model.layers.1")
    stray = {**tiny.weights, NAME.replace("weight", "scale"): np.ones((1, 1), np.float32)}
    assert_refused(tiny.write(tmp_path / "d", stray), f"{NAME} has dtype F32 and has a scale beside it")
    lonely = without(stray, NAME)
    assert_refused(tiny.write(tmp_path / "e", lonely), f"{NAME} is missing, but its scale is there")
    quantised = {**tiny.weights, NAME: ("F8_E4M3", tiny.weights[NAME].shape, bytes(tiny.weights[NAME].size))}
    assert_refused(tiny.write(tmp_path / "f", quantised), f"{NAME} has dtype F8_E4M3 and has no scale beside it")


def test_wrong_shapes(tiny, tmp_path):
    array = tiny.weights[NAME]
    wrong = (array.T.copy(), array[:-1], array.reshape(-1), array[None], array[:0], np.zeros((), np.float32))
    for index, value in enumerate(wrong):
        folder = tiny.write(tmp_path / str(index), {**tiny.weights, NAME: value})
        assert_refused(folder, rf"{NAME} has shape .* but the config asks for \[24, 32\]")


def edit_header(change):
    """A header editor that changes the entry of NAME (or the whole dict, if ``change`` takes two)."""

    def edit(entries):
        change(entries[NAME], entries)

    return edit


def set_offsets(begin, end):
    def change(entry, entries):
        first, last = entry["data_offsets"]
        entry["data_offsets"] = [first + begin, last + end]

    return change


HEADERS = {
    "overlap": (set_offsets(-4, -4), "inside '"),
    "hole": (set_offsets(4, 4), "belong to no tensor"),
    "range too long": (set_offsets(0, 4), "takes 3072 bytes, but its range has 3076"),
    "range reversed": (lambda e, _: e.update(data_offsets=e["data_offsets"][::-1]), "before it begins"),
    "range negative": (lambda e, _: e.update(data_offsets=[-8, 3064]), "bad data_offsets"),
    "range far away": (lambda e, _: e.update(data_offsets=[2**50, 2**50 + 3072]), "belong to no tensor"),
    "range a float": (lambda e, _: e.update(data_offsets=[0.0, 3072.0]), "bad data_offsets"),
    "range of three": (lambda e, _: e.update(data_offsets=[0, 1, 2]), "bad data_offsets"),
    "dtype unknown": (lambda e, _: e.update(dtype="F31"), "unknown dtype 'F31'"),
    "dtype no string": (lambda e, _: e.update(dtype=["F32"]), "unknown dtype"),
    "dtype wider": (lambda e, _: e.update(dtype="F64"), "takes 6144 bytes"),
    "dtype same width": (lambda e, _: e.update(dtype="I32"), "has dtype I32; it may be F32, F16, BF16, F8_E4M3"),
    "shape negative": (lambda e, _: e.update(shape=[-24, -32]), "bad shape"),
    "shape bool": (lambda e, _: e.update(shape=[True, 768]), "bad shape"),
    "shape float": (lambda e, _: e.update(shape=[24.0, 32]), "bad shape"),
    "shape huge": (lambda e, _: e.update(shape=[2**40, 2**40]), "bytes, but its range has 3072"),
    "shape wraps to zero": (lambda e, _: e.update(shape=[2**32, 2**32], data_offsets=[0, 0]), "but its range has 0"),
    "shape too deep": (lambda e, _: e.update(shape=[1] * 9), "bad shape"),
    "shape no list": (lambda e, _: e.update(shape="24,32"), "bad shape"),
    "key missing": (lambda e, _: e.pop("shape"), "needs exactly dtype, shape and data_offsets"),
    "key extra": (lambda e, _: e.update(strides=[1, 2]), "needs exactly dtype, shape and data_offsets"),
    "entry no object": (lambda _, entries: entries.update({NAME: [1]}), "needs exactly dtype, shape and data_offsets"),
    "metadata numbers": (lambda _, entries: entries.update(__metadata__={"format": 1}), "__metadata__ must map"),
    "name too long": (lambda _, entries: entries.update({"x" * 600: entries.pop(NAME)}), "name of 600 characters"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_header_entries(tiny, tmp_path, case):
    change, message = HEADERS[case]
    assert_refused(tiny.write(tmp_path, header=edit_header(change)), message)


def duplicate_key(entries):
    text = json.dumps(entries)
    return text.replace('"norm.weight"', '"head.weight"').encode()


@pytest.mark.parametrize(
    "how, message",
    [
        ({"length": 2**60}, "header length 1152921504606846976 exceeds the limit"),
        ({"length": 2**64 - 1}, "header length 18446744073709551615 exceeds the limit"),
        ({"length": 30 * MIB}, "header length 31457280 exceeds the file"),
        ({"length": 0}, "the header is not a JSON object"),
        ({"length": 100}, "header: not JSON"),
        ({"tail": b"\0"}, "1 bytes after the last tensor belong to no tensor"),
        ({"header": duplicate_key}, "header: duplicate key 'head.weight'"),
        ({"header": lambda e: b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"}, "nested deeper than 16"),
        ({"header": lambda e: b"[]"}, "the header is not a JSON object"),
        ({"header": lambda e: b"{}"}, "after the last tensor belong to no tensor"),
        ({"header": lambda e: b'{"a": NaN}'}, "NaN is not a JSON number"),
        ({"header": lambda e: b'{"\xff": 1}'}, "not UTF-8"),
        ({"header": lambda e: b'{"a": ' + b"1" * 5000 + b"}"}, "an integer of 5000 digits"),
        ({"header": lambda e: b"{" * 10}, "not JSON"),
        ({"tensors": {}}, "w1.weight is missing; .* are 36 tensors, but the files hold 0"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:40],
)
def test_headers(tiny, tmp_path, how, message):
    assert_refused(tiny.write(tmp_path, **how), message)


@pytest.mark.parametrize(
    "size, message",
    [
        (-1, r"the file holds only \d+ bytes of data .truncated"),
        (-10_000, "truncated"),
        (2000, "exceeds the file, which has 2000 bytes"),
        (7, "7 bytes, too short"),
        (0, "0 bytes, too short"),
    ],
)
def test_truncated_files(tiny, tmp_path, size, message):
    path = tiny.write(tmp_path) / "model.safetensors"
    os.truncate(path, path.stat().st_size + size if size < 0 else size)
    assert_refused(tmp_path, message)


def test_a_file_that_shrinks_after_the_check(tiny, tmp_path):
    reader = CheckpointReader(tiny.write(tmp_path), tiny.config)
    os.truncate(tmp_path / "model.safetensors", 5000)
    with pytest.raises(CheckpointError, match="are no longer in the file"):
        reader.take(list(tiny.weights)[-1])


@pytest.mark.parametrize(
    "where",
    ["../model.safetensors", "/etc/passwd", "a/../../x.safetensors", "..\\x.safetensors", "", "nul\0.safetensors"],
)
def test_index_that_points_outside(tiny, tmp_path, where):
    folder = tmp_path / "inner"
    halves = tiny.halves()
    index = dict.fromkeys(halves[FIRST], FIRST) | dict.fromkeys(halves[SECOND], where)
    tiny.write_shards(folder, halves, {"metadata": {}, "weight_map": index})
    (tmp_path / "model.safetensors").write_bytes((folder / SECOND).read_bytes())
    assert_refused(folder, "does not stay inside the checkpoint's folder")


def test_links_that_leave_the_folder(tiny, tmp_path):
    folder = tiny.write_shards(tmp_path / "inner", tiny.halves())
    (folder / SECOND).rename(tmp_path / SECOND)
    os.symlink(tmp_path / SECOND, folder / SECOND)
    assert_refused(folder, "is a link that leaves the checkpoint's folder")
    other = tiny.write(tmp_path / "single")
    (other / "model.safetensors").rename(tmp_path / "elsewhere")
    os.symlink("../elsewhere", other / "model.safetensors")
    assert_refused(other, "is a link that leaves the checkpoint's folder")
    (other / "model.safetensors").unlink()
    os.symlink("model.safetensors", other / "model.safetensors")
    assert_refused(other, "neither|missing")


def test_index_and_shards_disagree(tiny, tmp_path):
    def shards(name, change, message):
        halves = tiny.halves()
        weight_map = {tensor: file for file, tensors in halves.items() for tensor in tensors}
        change(halves, weight_map)
        folder = tiny.write_shards(tmp_path / name, halves, {"metadata": {}, "weight_map": weight_map})
        assert_refused(folder, message)

    last = list(tiny.weights)[-1]
    shards("listed only", lambda h, m: h[SECOND].pop(last), f"'{last}' is listed in .*, but|does not hold it")
    shards("held only", lambda h, m: m.pop(last), f"'{last}' is in {SECOND} but not in model.safetensors.index.json")
    shards("elsewhere", lambda h, m: m.update({last: FIRST}), f"'{last}' is in {SECOND} but .* says {FIRST}")
    shards(
        "twice",
        lambda h, m: h[FIRST].update({last: h[SECOND][last]}),
        f"'{last}' is in {FIRST} .*again in {SECOND}|says",
    )
    shards("gone", lambda h, m: h.pop(SECOND), f"the file '{SECOND}' is missing")
    shards(
        "stray", lambda h, m: h.update({"model-00003-of-00003.safetensors": {}}), "model-00003-of-00003.*does not list"
    )
    shards("no string", lambda h, m: m.update({last: 3}), "must be a string")
    shards("empty", lambda h, m: m.clear(), "weight_map must be an object that names at least one tensor")


def test_index_files(tiny, tmp_path):
    folder = tiny.write_shards(tmp_path / "a", tiny.halves())
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    for broken, message in (
        (text[:-5], "not JSON"),
        (text.replace('"norm.weight"', '"head.weight"'), "duplicate key 'head.weight'"),
        (text.replace('"metadata"', '"weights"'), "unknown key 'weights'"),
        ("[" * 100_000, "nested deeper than 16"),
        ("{}", "weight_map must be an object"),
    ):
        index.write_text(broken)
        assert_refused(folder, message)
    index.write_text(text)
    (folder / "model.safetensors").write_bytes(tiny.pack(tiny.weights))
    assert_refused(folder, "holds both model.safetensors and model.safetensors.index.json")
    index.unlink()
    assert_refused(folder, f"also the shard {FIRST}")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert_refused(folder, "holds neither model.safetensors nor model.safetensors.index.json")
    (folder / "model.safetensors").mkdir()
    assert_refused(folder, "holds neither")


@pytest.mark.parametrize(
    "shape, dtype, raw, message",
    [
        ((2**40, 2, 0), "F32", b"", "stacks 1099511627776 experts, more than the limit"),
        ((4, 63, 32), "F32", bytes(4 * 63 * 32 * 4), "stacked experts need three axes, the second even"),
        ((64, 32), "F32", bytes(64 * 32 * 4), "stacked experts need three axes"),
        ((4, 2, 1), "F4", bytes(4), "do not fill whole bytes"),
        ((5, 64, 32), "F32", bytes(5 * 64 * 32 * 4), r"w1.weight'? is not a tensor|gate_up_proj is not a tensor"),
    ],
)
def test_stacked_experts(tiny, tmp_path, shape, dtype, raw, message):
    kept = {name: array for name, array in tiny.weights.items() if "layers.0.ffn.experts" not in name or ".w2." in name}
    kept["model.layers.0.mlp.experts.gate_up_proj"] = (dtype, shape, raw)
    assert_refused(tiny.write(tmp_path, kept), message)


def test_values_that_are_not_finite(tiny, tmp_path):
    for index, value in enumerate((np.nan, np.inf)):
        array = tiny.weights[NAME].copy()
        array[5, 7] = value
        folder = tiny.write(tmp_path / str(index), {**tiny.weights, NAME: array})
        assert_refused(folder, f"{NAME} holds values that are NaN or infinite")
    scaled = {NAME: ("F8_E4M3", (24, 32), b"\x7f" * 768), NAME.replace("weight", "scale"): np.ones((1, 1), np.float32)}
    assert_refused(tiny.write(tmp_path / "fp8", {**tiny.weights, **scaled}), f"{NAME} holds values that are NaN")


def test_experts_that_do_not_exist(tiny, tmp_path):
    name = "layers.0.ffn.gate.tid2eid"
    for index, value in enumerate((4, -1, 2**40)):
        table = tiny.weights[name].copy()
        table[3, 1] = value
        folder = tiny.write(tmp_path / str(index), {**tiny.weights, name: table})
        assert_refused(folder, f"{name} names experts from .*{value}.*, but there are 4")


CONTRADICTIONS = {
    "vocab_size": 41,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "head_dim": 32,
    "q_lora_rank": 25,
    "o_groups": 4,
    "o_lora_rank": 9,
    "index_n_heads": 3,
    "index_head_dim": 32,
    "n_routed_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 33,
    "hc_mult": 3,
    "num_hash_layers": 2,
    "compress_ratios": [4, 4, 128],
}


@pytest.mark.parametrize("key", CONTRADICTIONS)
def test_configs_that_contradict_the_tensors(tiny, tmp_path, key):
    folder = tiny.write(tmp_path)
    (folder / "config.json").write_text(json.dumps({**tiny.raw, key: CONTRADICTIONS[key]}))
    assert_refused(folder, r"layers\.\d.*(the config asks for|is missing)|weight has shape.*the config asks for")


def test_sizes_within_the_limits_that_the_file_does_not_hold(tiny, tmp_path):
    """The largest numbers of layers and experts that are believed cost memory for their names only."""
    folder = tiny.write(tmp_path)
    huge = {"num_hidden_layers": 512, "compress_ratios": [0] * 512, "n_routed_experts": 128, "hidden_size": 65536}
    (folder / "config.json").write_text(json.dumps({**tiny.raw, **huge, "vocab_size": 2**21}))
    assert_refused(
        folder, r"layers\.0\.ffn\.experts\.4\.w1\.weight is missing; the experts of 512 layers .* are 196608 tensors"
    )


def test_a_draft_that_the_file_does_not_hold(make_tiny, tmp_path):
    draft = {
        "dspark_block_size": 3,
        "dspark_markov_rank": 6,
        "dspark_noise_token_id": 2,
        "dspark_target_layer_ids": [2],
    }
    tiny = make_tiny(**draft)
    folder = tiny.write(tmp_path)
    (folder / "config.json").write_text(json.dumps({**tiny.raw, "dspark_n_routed_experts": 4096}))
    assert_refused(
        folder, r"mtp\.0\.ffn\.experts\.4\.w1\.weight is missing; the experts of 4 layers .* are 12324 tensors"
    )


@pytest.mark.parametrize(
    "key", ["hidden_size", "vocab_size", "n_routed_experts", "num_hidden_layers", "sliding_window"]
)
@pytest.mark.parametrize("value", [0, -1, 2**31, 10**18])
def test_absurd_configs(tiny, tmp_path, key, value):
    folder = tiny.write(tmp_path)
    (folder / "config.json").write_text(json.dumps({**tiny.raw, key: value}))
    assert_refused(folder, f"{'num_experts' if key.startswith('n_routed') else key} is {value}")


def test_random_bytes_never_crash(tiny, tmp_path):
    """Any single changed byte of the header is either refused or harmless; nothing but ValueError is ever raised."""
    generator = np.random.default_rng(21)
    good = tiny.pack(tiny.weights)
    (length,) = struct.unpack("<Q", good[:8])
    tiny.write(tmp_path)
    outcomes = {"refused": 0, "harmless": 0}
    for _ in range(150):
        data = bytearray(good)
        data[int(generator.integers(0, 8 + length))] = int(generator.integers(0, 256))
        (tmp_path / "model.safetensors").write_bytes(data)
        try:
            load(tmp_path)
            outcomes["harmless"] += 1
        except ValueError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 100
