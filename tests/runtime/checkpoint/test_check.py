"""The check verb: counts, memory by rank against what the model takes, the cache formula, status 2."""

import json
import math
import pathlib

import pytest
import torch
from dspark.layers.kernels import choose
from dspark.layers.params import Scope
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime import LLM
from dspark.runtime.checkpoint import RandomWeights, expected_tensors
from dspark.runtime.checkpoint.placement import rank_weights
from dspark.runtime.cli import main
from dspark.runtime.model_config import ModelConfig
from dspark.runtime.models.deepseek_v4 import Block, DeepseekV4, draft_stage_sizes, rope_table

DATA = pathlib.Path(__file__).resolve().parents[2] / "data" / "checkpoint"


def run_check(capsys, *flags):
    status = main(["check", "--json", *flags])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err


def test_the_bundled_model(capsys):
    status, report, err = run_check(capsys, "--tp", "2", "--max-context", "1000", "--max-running", "3")
    assert status == 0 and report["ok"] and report["problems"] == [] and err == ""
    assert report["parameters"]["target"] == sum(report["parameters"]["by_part"].values()) == 2_480_589
    idle = report["parameters"]["by_part"]["routed experts"] * 14 // 16 + 1535 * 128
    assert report["parameters"]["target_per_token"] == 2_480_589 - idle
    assert report["draft"]["block_size"] == 7 and report["draft"]["target_layer_ids"] == [2, 3]
    target = [row for row in report["formats"] if row["role"] == "target"]
    assert sum(row["tensors"] for row in target) == 306
    assert sum(row["bytes"] for row in target) == 4 * 2_480_589 + 8 * 1536 * 2
    memory = report["memory"]
    # Two CSA layers at ratio 4 and one HCA layer at ratio 16, head_dim 32, index_head_dim 32.
    assert memory["cache_per_token"] == 4 * (2 * (32 + 32) / 4 + 32 / 16)
    # Rings reach max_verify rows further than their readers; the draft has a sliding ring for each of its two
    # stages, for two blocks.
    assert memory["max_verify"] == 8
    rings = 4 * (64 + 8) * 32 + 2 * (2 * 4 + 8) * 4 * (32 + 32) + (16 + 8) * 2 * 32 + 2 * (64 + 16) * 32
    assert memory["cache_per_request"] == 4 * rings
    for rank in memory["ranks"]:
        assert rank["cache"] == 3 * (4 * rings + 1024 * memory["cache_per_token"])  # 4 pages of 256 tokens
        assert rank["total"] == rank["weights"] + rank["draft_weights"] + rank["cache"]


def test_the_cache_is_as_large_as_an_engine_makes_it(capsys):
    _, report, _ = run_check(capsys, "--max-context", "1000", "--max-running", "3")
    with LLM(max_context=1000, max_running=3) as llm:
        engine = llm._session.engine
        held = 0
        for cache in (engine.cache, *engine.drafter.caches):
            layout = cache.layout
            held += 3 * layout.bytes_per_slot + cache.num_pages * layout.bytes_per_page
    assert report["memory"]["ranks"][0]["cache"] == held
    _, spread, _ = run_check(capsys, "--max-context", "1000", "--max-running", "3", "--dp", "2")
    assert [rank["cache"] for rank in spread["memory"]["ranks"]] == [held, held]


class Counting:
    """A parameter source that adds up the bytes it hands out."""

    def __init__(self, source):
        self._source, self.num_bytes = source, 0

    def take(self, name, **how):
        tensor = self._source.take(name, **how)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor


def bytes_taken(rank, world, raw, layout):
    config = ModelConfig.from_dict(raw)
    groups = Groups.build(Topology.make(world, **layout), rank)
    device, dtype = torch.device("cpu"), torch.bfloat16
    kernels = choose(device, dtype)
    target = Counting(RandomWeights(config, 1, dtype))
    DeepseekV4(config, target, groups, kernels, 64, device)
    draft = Counting(RandomWeights(config, 1, dtype))
    rope = rope_table(config, config.main_rope, 64, device)
    for stage in range(config.num_draft_stages):
        Block(Scope(draft).scope(f"mtp.{stage}"), *draft_stage_sizes(config), rope, groups, kernels, stage)
    return target.num_bytes, draft.num_bytes


@pytest.mark.parametrize("world, layout", [(1, {}), (2, {}), (2, {"ep": 2}), (4, {"ep": 2, "dp": 2}), (2, {"cp": 2})])
def test_weights_by_rank_are_what_the_model_takes(make_tiny, run_ranks, world, layout):
    tiny = make_tiny(num_nextn_predict_layers=1, vocab_size=200)
    taken = [bytes_taken(0, 1, tiny.raw, layout)] if world == 1 else run_ranks(bytes_taken, world, tiny.raw, layout)
    counted = rank_weights(tiny.config, Topology.make(world, **layout), 2, with_draft=True)
    # What a prediction layer has beside its block is not part of any model here yet.
    block = {name.split(".", 2)[2] for name in expected_tensors(tiny.config) if name.startswith("layers.2.")}
    rest = 0
    for name, spec in expected_tensors(tiny.config).items():
        if spec.role == "draft" and spec.copy_of is None and name.split(".", 2)[2] not in block:
            rest += math.prod(spec.shape) * (4 if spec.kind == "plain" else 2)
    assert [(c.target, c.draft - rest) for c in counted] == taken


def test_pipeline_stages_hold_everything_once(tiny):
    whole = rank_weights(tiny.config, Topology.make(1), 4, with_draft=True)[0]
    for pp in (2, 3):
        stages = rank_weights(tiny.config, Topology.make(pp, pp=pp), 4, with_draft=True)
        assert sum(stage.target for stage in stages) == whole.target


def test_everything_wrong_is_listed(tiny, tmp_path, capsys):
    tensors = {name: array for name, array in tiny.weights.items() if "w3" not in name}
    tensors["norm.weight"] = tensors["norm.weight"][:-1]
    status, report, err = run_check(capsys, "--model", str(tiny.write(tmp_path, tensors)), "--tp", "3")
    missing = [name for name in tiny.weights if "w3" in name]
    assert status == 2 and not report["ok"] and "memory" not in report
    for problem in (
        *(f"{name} is missing" for name in missing),
        "norm.weight has shape [31], but the config asks for [32]",
        "num_attention_heads = 4 is not divisible by attn_tp = 3",
        "moe_intermediate_size of the shared expert = 32 is not divisible by tp = 3",
    ):
        assert problem in report["problems"]
    assert err.startswith("dspark: error: norm.weight has shape") or err.startswith("dspark: error: ")
    assert err.count("\n") == 1 and f"and {len(report['problems']) - 1} more" in err
    assert main(["check", "--model", str(tmp_path)]) == 2
    assert f"problem: {missing[-1]} is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--model", "nowhere"], "no such folder"),
        (["--ep", "3"], "n_routed_experts = 16 is not divisible by ep = 3"),
        (["--pp", "5"], "pp = 5 exceeds the 4 layers"),
        (["--max-context", "5000"], "--max-context is 5000, but the model has 4096 positions"),
    ],
)
def test_input_that_cannot_work(capsys, flags, message):
    status, report, err = run_check(capsys, *flags)
    assert status == 2 and any(message in problem for problem in report["problems"]) and err.startswith("dspark: error")


@pytest.mark.parametrize("flags", [["--tp", "4", "--dp", "3"], ["--max-running", "0"], ["--dtype", "int8"]])
def test_usage_errors(capsys, flags):
    assert main(["check", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("dspark: error: ")


def test_a_release_sized_checkpoint_is_checked_by_its_headers(tmp_path, capsys):
    """All 72,317 tensors of a released checkpoint, with nothing but holes for 167 GB of data."""
    raw = json.loads((DATA / "flash.json").read_text())
    entries, position = {}, 0

    def add(name, dtype, shape, bits):
        nonlocal position
        end = position + math.prod(shape) * bits // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end

    quantised = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "main_proj", "w1", "w2", "w3")
    for name, spec in expected_tensors(ModelConfig.from_dict(raw)).items():
        stem = name.split(".")[-2] if "." in name else ""
        if spec.copy_of is not None:
            continue
        if ".experts." in name:
            add(name, "I8", (spec.shape[0], spec.shape[1] // 2), 8)
            add(name.replace("weight", "scale"), "F8_E8M0", (spec.shape[0], spec.shape[1] // 32), 8)
        elif stem in quantised and "compressor" not in name:
            add(name, "F8_E4M3", spec.shape, 8)
            add(name.replace("weight", "scale"), "F8_E8M0", tuple(-(-size // 128) for size in spec.shape), 8)
        else:
            dtype, bits = {"table": ("I64", 64)}.get(spec.kind, ("BF16", 16))
            add(name, dtype, spec.shape, bits)
    header = json.dumps(entries, separators=(",", ":")).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    try:
        with open(path, "r+b") as file:
            file.truncate(8 + len(header) + position)
    except OSError as error:
        pytest.skip(f"no sparse files here: {error}")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    flags = ("--model", str(tmp_path), "--tp", "8", "--ep", "8", "--dtype", "bfloat16", "--max-context", "65536")
    status, report, _ = run_check(capsys, *flags)
    assert status == 0, report["problems"]
    # Published: 284 B parameters, 13 B of them used by a token.
    assert (
        round(report["parameters"]["target"] / 1e9) == 284
        and round(report["parameters"]["target_per_token"] / 1e9) == 13
    )
    draft = [row for row in report["formats"] if row["role"] == "draft"]
    assert sum(row["tensors"] for row in draft) == 2376
    assert {row["format"] for row in draft if row["part"] == "routed experts"} == {
        "fp4 e2m1, blocks 1x32, ue8m0 scales"
    }
    assert report["draft"]["kind"] == "dspark" and report["memory"]["max_verify"] == 6
    assert report["memory"]["cache_per_token"] == 2 * (21 * (512 + 128) / 4 + 20 * 512 / 128)
