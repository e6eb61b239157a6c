"""Exit statuses, one-line mistakes, who prints, and what a launcher sees."""

import datetime
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys

import dspark.runtime.verbs.generate as generate_verb
import pytest
import torch.distributed as dist
from dspark.runtime.cli import VERBS, main, rank_from

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "models"
GOLDEN = json.loads((DATA / "golden.json").read_text())["items"]
PROMPT = ["--prompt", "def main():", "--max-new-tokens", "2"]
CLEAN = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")},
    "PYTHONSAFEPATH": "1",
    "OMP_NUM_THREADS": "1",
}


def launch(args, world=None, **options):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world else []
    command = [sys.executable, *launcher, "-m", "dspark.runtime", *args]
    return subprocess.run(command, env=CLEAN, capture_output=True, text=True, timeout=120, **options)


def test_a_rank_that_finds_no_head_says_so_itself(monkeypatch, capsys):
    hand = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**hand, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    assert main(["generate", *PROMPT, "--pp", "2", "--timeout", "1"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("dspark: error: rank 1: ") and "127.0.0.1:1" in line


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_variable_that_one_rank_misses_is_named_by_all(tmp_path):
    """By hand, without a launcher that would end the others."""
    hand = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "dspark.runtime", "generate", *PROMPT, "--pp", "2"]
    ranks = [
        subprocess.Popen(command, env={**CLEAN, **hand, **own}, stderr=subprocess.PIPE, text=True)
        for own in ({"RANK": "0", "LOCAL_RANK": "0"}, {"RANK": "1"})
    ]
    said = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], said
    words = f"dspark: error: rank 1 on {socket.gethostname()}: started by RANK and WORLD_SIZE, but LOCAL_RANK not set"
    assert all(words in one for one in said), said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_rank_that_waits_for_the_others_can_be_stopped(number):
    port = free_port()
    hand = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "dspark.runtime", "generate", *PROMPT, "--pp", "2"]
    rank = subprocess.Popen(command, env={**CLEAN, **hand}, stderr=subprocess.PIPE, text=True)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=200))
    dist.PrefixStore("dspark//attempt0", store).wait(["here/0"])
    rank.send_signal(number)
    error = rank.communicate(timeout=60)[1]
    assert rank.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], error


@pytest.mark.parametrize(
    "argv,message",
    [
        (["fly"], "unknown verb 'fly'; there are "),
        (["generate"], "one of the arguments --prompt --input is required"),
        (["generate", "--prompt", "x", "--input", "y"], "not allowed with argument"),
        (["generate", *PROMPT, "--warp", "9"], "unrecognized arguments: --warp 9"),
        (["generate", *PROMPT, "--tempera", "9"], "unrecognized arguments: --tempera 9"),
        (["generate", *PROMPT, "--temperature", "-1"], "temperature is -1.0; allowed: a number from 0"),
        (["generate", *PROMPT, "--temperature", "nan"], "temperature is nan"),
        (["generate", *PROMPT, "--max-new-tokens", "0"], "max_new_tokens is 0; allowed: an integer from 1"),
        (["generate", *PROMPT, "--chunk-size", "0"], "--chunk-size is 0; allowed"),
        (["generate", *PROMPT, "--max-context", "5000"], "--max-context is 5000, but the model has 4096"),
        (["generate", *PROMPT, "--model", "/nowhere"], "/nowhere"),
        (["generate", *PROMPT, "--tp", "3"], "tp * pp = 3 * 1 = 3, but there are 1 ranks"),
        (
            ["generate", *PROMPT, "--draft", "none", "--block-verify"],
            "--block-verify is for a draft, but there is none",
        ),
        (
            ["generate", *PROMPT, "--deterministic", "--dispatcher", "normal"],
            "--deterministic needs the dispatcher standard",
        ),
        (
            ["generate", *PROMPT, "--deterministic", "--eplb-interval", "9"],
            "--deterministic shares out experts by columns",
        ),
        (["generate", *PROMPT, "--draft", "none", "--sts", "t.json"], "--sts t.json is for a draft"),
        (["generate", *PROMPT, "--draft", "mystery"], "unknown draft 'mystery'; there are none"),
        (["generate", "--input", "/nowhere/in.jsonl"], "/nowhere/in.jsonl"),
        (["generate", *PROMPT, "--output", "/nowhere/out.jsonl"], "/nowhere/out.jsonl"),
        (["calibrate", "--input", "/nowhere/in.jsonl"], "/nowhere/in.jsonl"),
        (["profile-sps", "--output", "/nowhere/sps.json"], "--output /nowhere/sps.json: there is no folder /nowhere"),
        (["profile-sps", "--max-context", "60"], "requests of up to 1168 tokens, but the context limit is 60"),
        (["generate", *PROMPT, "--logit-bias", "17"], "'17' is not ID=X"),
        (["score", "--input", "x.jsonl", "--chunk-size", "5,\u00b2"], "a number of at least 1"),
        (["generate", *PROMPT, "--cache-bytes", "\u00b2"], "is not a number of bytes"),
        (["score", "--input", "x.jsonl", "--chunk-size", "5,0"], "'5,0': a number of at least 1"),
        (["score", "--input", "x.jsonl", "--chunk-size", "5", "--stepwise"], "not allowed with argument"),
    ],
)
def test_mistakes_are_status_2_and_one_line(argv, message, capsys):
    assert main(argv) == 2
    captured = capsys.readouterr()
    # A slow machine also shows how far the reading of weights is.
    lines = [line for line in captured.err.splitlines() if " INFO " not in line and "reading weights" not in line]
    assert captured.out == "" and len(lines) == 1
    assert lines[0].startswith("dspark: error: ") and message in lines[0]


def test_help_of_everything(capsys):
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert main([]) == 2
    capsys.readouterr()
    for verb in VERBS:
        assert f"\n  {verb} " in overview
        with pytest.raises(SystemExit) as stopped:
            main([verb, "--help"])
        text = capsys.readouterr().out
        assert stopped.value.code == 0
        assert f"usage: dspark {verb} " in text and "Example" in text
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dspark ")


def test_failures_while_running_are_status_1_with_a_traceback(capsys, monkeypatch):
    def break_down(*args):
        raise ValueError("the engine is on fire")

    monkeypatch.setattr(generate_verb, "drive", break_down)
    assert main(["generate", *PROMPT]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error and "the engine is on fire" in error and "dspark: error" not in error


def test_an_interrupt_is_status_130(capsys, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_verb, "drive", interrupt)
    assert main(["generate", *PROMPT]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "dspark: interrupted"


def test_the_rank_comes_from_any_launcher():
    assert rank_from({}) == rank_from({"RANK": "\u00b2"}) == 0
    assert rank_from({"RANK": "3", "SLURM_PROCID": "0"}) == 3
    assert rank_from({"OMPI_COMM_WORLD_RANK": "2"}) == rank_from({"PMI_RANK": "2"}) == 2
    assert rank_from({"SLURM_PROCID": "5"}) == 5
    assert rank_from({"RANK": "x"}) == 0


def test_importing_the_package_is_cheap():
    code = "import sys, dspark.runtime, dspark.runtime.cli; print('torch' in sys.modules, 'numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, env=CLEAN)
    assert result.stdout.split() == ["False", "False"], result.stderr
    with pytest.raises(AttributeError, match="no attribute 'Magic'"):
        from dspark import runtime

        _ = runtime.Magic


def test_a_closed_pipe_is_no_traceback():
    command = [sys.executable, "-m", "dspark.runtime", "generate", "--prompt", "def main():", "--max-new-tokens", "400"]
    process = subprocess.Popen(command, env=CLEAN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.read(1)
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(timeout=60) == 1
    assert "Traceback" not in error and "BrokenPipe" not in error, error


def test_an_interrupted_process_ends_with_130():
    command = [sys.executable, "-m", "dspark.runtime", "generate", "--prompt", "x", "--max-new-tokens", "4000"]
    process = subprocess.Popen(
        [*command, "--ignore-eos"], env=CLEAN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and error.splitlines()[-1] == "dspark: interrupted"


def test_two_ranks_print_once():
    result = launch(["generate", "--prompt", GOLDEN[0]["prompt"], "--ignore-eos", "--show-special-tokens"], world=2)
    assert result.returncode == 0, result.stderr
    assert result.stdout == GOLDEN[0]["output_text"] + "\n"
    assert result.stderr.count("64 new tokens") == 1
    assert "2 x cpu" in result.stderr


def test_a_mistake_on_two_ranks_is_one_line():
    result = launch(["generate", "--input", "/nowhere/in.jsonl"], world=2)
    lines = [line for line in result.stderr.splitlines() if line.startswith("dspark: ")]
    assert result.returncode != 0
    assert len(lines) == 1 and "/nowhere/in.jsonl" in lines[0]
    assert "exitcode  : 2" in result.stderr
