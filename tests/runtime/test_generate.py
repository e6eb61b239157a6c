"""``dspark generate`` from the outside: files in, files and text out, and requests that cannot run."""

import json
import math
import pathlib

import pytest
import torch
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.cli import main
from dspark.runtime.tokenizer import Tokenizer
from safetensors.torch import load_file, save_file

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "models"
GOLDEN = json.loads((DATA / "golden.json").read_text())["items"]
CHAT = "<|user|>What do you like about the forest?<|assistant|>"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(bundled_model(), 0)


@pytest.fixture
def generate(tmp_path):
    """``generate(lines, *flags) -> {id: result}`` through files."""

    def run(lines, *flags):
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        assert main(["generate", "--input", str(source), "--output", str(target), *flags]) == 0
        results = [json.loads(line) for line in target.read_text().splitlines()]
        assert len({r["id"] for r in results}) == len(results)
        return {r["id"]: r for r in results}

    return run


def test_golden_text_and_counts(generate):
    lines = [{"id": i, "prompt": item["prompt"]} for i, item in enumerate(GOLDEN)]
    results = generate(lines, "--ignore-eos", "--show-special-tokens")
    for i, item in enumerate(GOLDEN):
        result = results[str(i)]
        assert set(result) == {"id", "prompt_tokens", "token_ids", "text", "finish_reason", "spec"}
        assert result["token_ids"] == item["output_ids"]
        assert result["text"] == item["output_text"]
        assert result["prompt_tokens"] == len(item["prompt_ids"])


def first_stop(ids, stops):
    return next((n for n, token in enumerate(ids, start=1) if token in stops), None)


def test_end_of_sequence_and_stop_ids_end_a_request(generate):
    own = [item["output_ids"][20] for item in GOLDEN]
    lines = [{"id": f"eos{i}", "token_ids": item["prompt_ids"]} for i, item in enumerate(GOLDEN)]
    lines += [
        {"id": f"own{i}", "token_ids": item["prompt_ids"], "stop_token_ids": [own[i]], "ignore_eos": True}
        for i, item in enumerate(GOLDEN)
    ]
    results, num_stopped = generate(lines), 0
    for i, item in enumerate(GOLDEN):
        for name, stops in (("eos", {1, 4}), ("own", {own[i]})):
            result, count = results[f"{name}{i}"], first_stop(item["output_ids"], stops)
            num_stopped += count is not None
            assert result["finish_reason"] == ("length" if count is None else "stop")
            assert result["token_ids"] == item["output_ids"][:count]
    assert num_stopped > len(GOLDEN)


def test_stop_strings_cut_text_and_tokens(generate, tokenizer):
    lines, expected = [], {}
    for i, item in enumerate(GOLDEN):
        text = tokenizer.decode(item["output_ids"])
        stop = text[30:33]
        start = text.index(stop)
        count = next(
            n for n in range(1, 65) if tokenizer.decode(item["output_ids"][:n]).startswith(text[: start + len(stop)])
        )
        lines.append({"id": str(i), "prompt": item["prompt"], "stop": [stop, "\0never"], "ignore_eos": True})
        expected[str(i)] = (text[:start], item["output_ids"][:count])
    for request_id, result in generate(lines).items():
        assert (result["text"], result["token_ids"]) == expected[request_id]
        assert result["finish_reason"] == "stop"


def test_bad_requests_are_errors_and_the_others_run(generate, capsys):
    good = {"prompt": GOLDEN[0]["prompt"], "max_new_tokens": 5, "ignore_eos": True}
    lines = [
        {"id": "good", **good},
        {"id": "range", "token_ids": [0, 1536]},
        {"id": "negative", "token_ids": [-1]},
        {"id": "empty", "token_ids": []},
        {"id": "long", "token_ids": [5] * 4096},
        {"id": "both", "prompt": "x", "token_ids": [1]},
        {"id": "neither"},
        {"id": "unknown", "prompt": "x", "beam": 3},
        {"id": "temperature", "prompt": "x", "temperature": -1},
        {"id": "nan", "prompt": "x", "top_p": math.nan},
        {"id": "type", "prompt": 7},
        {"id": "float", "token_ids": [1.5]},
        {"id": "stop id", "prompt": "x", "stop_token_ids": [1536]},
        "{not json",
        "[1, 2]",
        good,
    ]
    results = generate(lines)
    assert len(results) == len(lines)
    for request_id in ("good", "15"):
        assert results[request_id]["token_ids"] == GOLDEN[0]["output_ids"][:5]
        assert results[request_id]["finish_reason"] == "length"
    for request_id, message in {
        "range": "id 1536 at position 1 is outside the vocabulary of 1536",
        "negative": "id -1 at position 0",
        "empty": "the prompt is empty",
        "long": "4096 tokens, but the context limit is 4096",
        "both": "line 6: give either prompt or token_ids",
        "neither": "line 7: give either",
        "unknown": "line 8: unknown key 'beam'",
        "temperature": "line 9: temperature is -1; allowed",
        "nan": "line 10: top_p is nan",
        "type": "line 11: prompt is a int",
        "float": "1.5 at position 0 is not an integer",
        "stop id": "stop token id 1536",
        "13": "line 14: no JSON",
        "14": "line 15: a JSON object is expected",
    }.items():
        result = results[request_id]
        assert result["finish_reason"] == "error" and result["token_ids"] == [] and result["text"] == ""
        assert message in result["error"]
    assert "request both: " in capsys.readouterr().err


def test_an_id_used_twice_is_refused(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": 1, "prompt": "x", "max_new_tokens": 1}\n\n{"id": "1", "prompt": "y"}\n')
    assert main(["generate", "--input", str(source), "--json"]) == 0
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert [(o["id"], o["finish_reason"]) for o in outputs] == [("1", "length"), ("1#1", "error")]
    assert "line 3: the id '1' was used before" in outputs[1]["error"]


def test_ids_of_any_text_and_none_that_is_no_text(generate):
    body = {"prompt": GOLDEN[0]["prompt"], "max_new_tokens": 2, "ignore_eos": True}
    odd = ("warm-up", "0", "\u00e9\n\t", "x" * 256)
    results = generate([{"id": name, **body} for name in odd] + ['{"id": "\\ud800", "prompt": "x"}'])
    for name in odd:
        assert results[name]["token_ids"] == GOLDEN[0]["output_ids"][:2]
    assert "line 5: id is '\\ud800', which is no valid Unicode" in results["4"]["error"]


def test_no_request_that_could_run_is_status_2(tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": "a", "token_ids": []}\n{"id": "b", "token_ids": [1536]}\n')
    assert main(["generate", "--input", str(source), "--json"]) == 2
    captured = capsys.readouterr()
    assert [o["finish_reason"] for o in json.loads(captured.out)["outputs"]] == ["error", "error"]
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("verb", ["generate", "score"])
def test_outputs_never_overwrite_inputs(verb, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"token_ids": [0, 5]}\n')
    (tmp_path / "link.jsonl").symlink_to(source)
    option = {"generate": "--output", "score": "--save-logits"}[verb]
    for target, message in [
        (str(source), "is also an input"),
        (str(tmp_path / "link.jsonl"), "is also an input"),
        (str(tmp_path), "is a folder"),
        ("", "give the name of a file"),
        (str(tmp_path / "no" / "x"), "there is no folder"),
    ]:
        assert main([verb, "--input", str(source), option, target]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and f"error: {option} " in captured.err and message in captured.err
    assert source.read_text() == '{"token_ids": [0, 5]}\n'


def test_sampled_requests_do_not_depend_on_their_company(generate):
    lines = [
        {"id": f"r{i}", "prompt": item["prompt"], "max_new_tokens": 12, "temperature": 1.0, "top_p": 0.95}
        for i, item in enumerate(GOLDEN[:6])
    ]
    together = generate(lines, "--seed", "7")
    backwards = generate(lines[::-1], "--seed", "7", "--max-running", "2", "--chunk-size", "9")
    alone = generate(lines[3:4], "--seed", "7")
    other = generate(lines, "--seed", "8")
    assert together == backwards and alone["r3"] == together["r3"]
    assert sum(together[k]["token_ids"] != other[k]["token_ids"] for k in together) >= 4


def test_own_seeds_and_parameters_of_requests(generate):
    base = {"prompt": CHAT, "max_new_tokens": 16, "ignore_eos": True}
    results = generate(
        [
            {"id": "a", **base, "temperature": 1.5, "seed": 3},
            {"id": "b", **base, "temperature": 1.5, "seed": 3},
            {"id": "c", **base, "temperature": 1.5, "seed": 4},
            {"id": "greedy", **base},
            {"id": "k1", **base, "temperature": 5, "top_k": 1},
            {"id": "p0", **base, "temperature": 5, "top_p": 1e-9},
            {"id": "m1", **base, "temperature": 5, "min_p": 1.0},
            {"id": "cold", **base, "temperature": 1e-4},
        ]
    )
    ids = {name: result["token_ids"] for name, result in results.items()}
    assert ids["a"] == ids["b"] != ids["c"]
    assert ids["a"] != ids["greedy"]
    assert ids["greedy"] == ids["k1"] == ids["p0"] == ids["m1"] == ids["cold"]


def test_logprobs_are_those_of_scoring_the_whole(generate, tmp_path):
    result = generate([{"id": "x", "token_ids": GOLDEN[2]["prompt_ids"], "logprobs": 3}], "--max-new-tokens", "8")["x"]
    whole = GOLDEN[2]["prompt_ids"] + result["token_ids"]
    save_file({"input_ids": torch.tensor([whole])}, tmp_path / "ids.safetensors")
    logits = tmp_path / "logits.safetensors"
    assert main(["score", "--input", str(tmp_path / "ids.safetensors"), "--save-logits", str(logits)]) == 0
    law = load_file(logits)["logits"][0].double().log_softmax(-1)
    assert len(result["logprobs"]) == 8
    for n, (token, entry) in enumerate(zip(result["token_ids"], result["logprobs"], strict=True)):
        row = law[len(GOLDEN[2]["prompt_ids"]) - 1 + n]
        assert entry["token_id"] == token
        assert entry["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(3)
        assert [i for i, _ in entry["top"]] == best.indices.tolist()
        assert [v for _, v in entry["top"]] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_one_prompt_streams_its_text_and_a_summary(capsys):
    assert main(["generate", "--prompt", GOLDEN[0]["prompt"], "--ignore-eos", "--show-special-tokens"]) == 0
    captured = capsys.readouterr()
    assert captured.out == GOLDEN[0]["output_text"] + "\n"
    assert "64 new tokens" in captured.err and "tokens/s" in captured.err
    assert "time to first token" in captured.err and "time per token" in captured.err


def test_several_prompts_are_printed_whole(capsys):
    flags = ["--max-new-tokens", "6", "--ignore-eos"]
    assert main(["generate", "--prompt", GOLDEN[0]["prompt"], "--prompt", GOLDEN[8]["prompt"], *flags]) == 0
    out = capsys.readouterr().out
    assert "[0] " in out and "[1] " in out


def test_json_is_one_object_in_the_order_given(capsys):
    prompts = ["--prompt", CHAT, "--prompt", "def f(", "--prompt", "1+1="]
    assert main(["generate", *prompts, "--max-new-tokens", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [o["id"] for o in result["outputs"]] == ["0", "1", "2"]
    summary = result["summary"]
    assert summary["requests"] == 3 and summary["new_tokens"] == sum(len(o["token_ids"]) for o in result["outputs"])
    assert summary["tokens_per_s"] > 0 and summary["time_to_first_token_s"]["p50"] > 0


def test_the_context_limit_ends_a_request(generate):
    prompt = GOLDEN[0]["prompt_ids"]
    results = generate([{"id": "x", "token_ids": prompt, "ignore_eos": True}], "--max-context", str(len(prompt) + 4))
    assert results["x"]["token_ids"] == GOLDEN[0]["output_ids"][:4]
    assert results["x"]["finish_reason"] == "length"
