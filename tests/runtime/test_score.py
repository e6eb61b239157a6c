"""``dspark score`` against golden logits of other code: whole, in chunks, token by token, on several ranks."""

import json
import math

import pytest
import torch
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.cli import main
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.load import load_engine
from dspark.runtime.score import score
from safetensors.torch import load_file, save_file

CASES = [
    "sliding_only",
    "csa_only",
    "hca_only",
    "mixed_hash",
    "mixed_yarn",
    "orig_names",
    "softmax_router",
    "fp8_release",
]
TOLERANCE = 2e-4


@pytest.mark.parametrize("case", CASES)
def test_golden_logits(case, shared, tmp_path, capsys):
    folder = shared / "oracle" / "v4" / case
    golden = load_file(folder / "golden.safetensors")
    save_file({"input_ids": golden["input_ids"]}, tmp_path / "ids.safetensors")
    chunks = ",".join(map(str, golden["chunks"].tolist()))
    saved = tmp_path / "logits.safetensors"
    for flags in ([], ["--chunk-size", chunks], ["--chunk-size", "5,1,17"], ["--stepwise"]):
        argv = ["score", "--model", str(folder), "--input", str(tmp_path / "ids.safetensors"), *flags]
        assert main([*argv, "--save-logits", str(saved), "--json"]) == 0
        logits = load_file(saved)["logits"]
        assert logits.shape == golden["logits"].shape and logits.dtype == torch.float32
        torch.testing.assert_close(logits, golden["logits"], rtol=0, atol=TOLERANCE)
        law = golden["logits"].double().log_softmax(-1)[:, :-1]
        nll = -law.gather(2, golden["input_ids"][:, 1:, None]).sum((1, 2))
        result = json.loads(capsys.readouterr().out)
        assert [s["nll"] for s in result["sequences"]] == pytest.approx(nll.tolist(), rel=1e-5)


def logits_of_rank(rank, world, folders):
    groups = Groups.build(Topology(tp=world), rank)
    results = []
    for folder, ids, chunks in folders:
        config = resolve(
            EngineConfig(max_running=4, max_context=256),
            model_dir=folder,
            device_type="cpu",
            max_positions=4096,
            own_draft="none",
        )
        engine = load_engine(config, groups, torch.device("cpu"))
        got = torch.full((*ids.shape, engine.model.config.vocab_size), float("nan"))

        def keep(index, start, logits, got=got):
            got[index, start : start + len(logits)] = logits

        score(engine, ids.tolist(), chunks, keep)
        results.append(got.numpy())
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_golden_logits_on_several_ranks(world, shared, run_ranks):
    goldens = [load_file(shared / "oracle" / "v4" / case / "golden.safetensors") for case in CASES]
    folders = [
        (str(shared / "oracle" / "v4" / case), golden["input_ids"], (7, 1, 3))
        for case, golden in zip(CASES, goldens, strict=True)
    ]
    for results in run_ranks(logits_of_rank, world, folders, timeout=200):
        for case, golden, logits in zip(CASES, goldens, results, strict=True):
            torch.testing.assert_close(
                torch.from_numpy(logits),
                golden["logits"],
                rtol=0,
                atol=TOLERANCE,
                msg=lambda message, case=case: f"{case}: {message}",
            )


def test_sequences_of_several_lengths(tmp_path, capsys):
    sequences = [[0, 265, 480, 645, 70, 86], [0], [0, 5, 9], *[[0, 300 + i] for i in range(10)]]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(json.dumps({"token_ids": s}) for s in sequences))
    saved = tmp_path / "out.safetensors"
    assert main(["score", "--input", str(source), "--json", "--save-logits", str(saved), "--chunk-size", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    file = load_file(saved)
    assert file["lengths"].tolist() == [len(s) for s in sequences]
    assert file["logits"].shape == (13, 6, 1536)
    assert file["logits"][1, 1:].isnan().all() and not file["logits"][0].isnan().any()
    assert result["sequences"][1] == {"tokens": 1, "predicted": 0, "nll": 0.0, "perplexity": None}
    total = 0.0
    for sequence, one, logits in zip(sequences, result["sequences"], file["logits"], strict=True):
        law = logits.double().log_softmax(-1)
        nll = -sum(float(law[i, token]) for i, token in enumerate(sequence[1:]))
        total += nll
        assert one["nll"] == pytest.approx(nll, rel=1e-9)
        if len(sequence) > 1:
            assert one["perplexity"] == pytest.approx(math.exp(nll / (len(sequence) - 1)), rel=1e-9)
    assert result["total"]["nll"] == pytest.approx(total, rel=1e-9)
    assert result["total"]["perplexity"] == pytest.approx(math.exp(total / result["total"]["predicted"]), rel=1e-9)
    assert main(["score", "--input", str(source)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 15 and table[0].split() == ["sequence", "tokens", "nll", "perplexity"]


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("a.jsonl", '{"token_ids": [1]}\n{"token_ids": [1, 1536]}', "line 2: the token id 1536 at position 1"),
        ("a.jsonl", '{"token_ids": []}', "line 1: 0 tokens; allowed: 1 to 4096"),
        ("a.jsonl", '{"prompt": "x"}', "line 1: no token_ids among its keys ['prompt']"),
        ("a.jsonl", '{"token_ids": 5}', "line 1: token_ids is a int"),
        ("a.jsonl", "nope", "line 1: no JSON"),
        ("a.jsonl", "\n\n", "has no lines"),
        ("a.txt", "1 2 3", "ends in '.txt'"),
        ("a.safetensors", "garbage", "is no safetensors file"),
    ],
)
def test_bad_inputs_are_one_line_that_names_them(name, content, message, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(content)
    assert main(["score", "--input", str(path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("dspark: error: ") and message in error and str(path) in error


def test_tensors_of_another_shape_are_refused(tmp_path, capsys):
    path = tmp_path / "a.safetensors"
    for tensors, message in [
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, "int64 [3]; int64 [B, L] is expected"),
        ({"input_ids": torch.zeros(2, 3, dtype=torch.int32)}, "int32 [2, 3]"),
        ({"input_ids": torch.zeros(0, 3, dtype=torch.int64)}, "it has no rows"),
        ({"ids": torch.zeros(2, 3, dtype=torch.int64)}, "no tensor input_ids, only ['ids']"),
    ]:
        save_file(tensors, path)
        assert main(["score", "--input", str(path)]) == 2
        assert message in capsys.readouterr().err


def test_a_failed_run_leaves_no_file(tmp_path, capsys, monkeypatch):
    save_file({"input_ids": torch.tensor([[0, 5]])}, tmp_path / "ids.safetensors")

    def break_down(*args):
        raise RuntimeError("the power went out")

    monkeypatch.setattr("dspark.runtime.verbs.score.score", break_down)
    argv = ["score", "--input", str(tmp_path / "ids.safetensors"), "--save-logits", str(tmp_path / "l.safetensors")]
    assert main(argv) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["ids.safetensors"]
    assert main([*argv, "--model", str(bundled_model() / "nowhere")]) == 2
