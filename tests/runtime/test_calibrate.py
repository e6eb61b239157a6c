"""``dspark calibrate`` from the outside: what it reads, what it writes, and inputs it cannot use."""

import json

import pytest
from dspark.runtime.cli import main

FLAGS = ["--max-new-tokens", "24", "--gamma", "2", "--max-context", "64"]


def test_temperatures_that_generate_can_read(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).write_text('{"prompt": "def main():"}\n{"prompt": "import os"}\n')
    inputs = ["--input", str(tmp_path / "a"), "--input", str(tmp_path / "b")]
    output = tmp_path / "sts.json"
    assert main(["calibrate", *inputs, "--output", str(output), *FLAGS]) == 0
    assert "held-out half:" in capsys.readouterr().out
    fitted = json.loads(output.read_text())
    assert len(fitted["temperatures"]) == 2 and fitted["num_samples"] > 20
    argv = ["generate", "--prompt", "def main():", "--max-new-tokens", "4", "--gamma", "2", "--sts", str(output)]
    assert main(argv) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x", "temperature": -1}', "in.jsonl line 1: temperature is -1"),
        ('{"token_ids": []}', "request '0/0': the prompt is empty"),
        (json.dumps({"token_ids": [5] * 64}), "request '0/0': the prompt has 64 tokens, but the context limit is 64"),
    ],
)
def test_a_line_that_cannot_run_is_status_2(line, message, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text(line + '\n{"prompt": "import os"}\n')
    assert main(["calibrate", "--input", str(source), *FLAGS]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err and message in captured.err
    assert main(["calibrate", "--input", str(source), "--output", str(source), *FLAGS]) == 2
    assert "is also an input" in capsys.readouterr().err
