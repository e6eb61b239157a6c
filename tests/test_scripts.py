"""The shell scripts: they parse, find a Python, and say what is missing."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = sorted([*(ROOT / "scripts").glob("*.sh"), *(ROOT / "scripts").glob("*.sbatch"), ROOT / ".ci" / "run"])
LAUNCHERS = ("torchrun.sh", "mpirun.sh", "slurm-srun.sbatch", "slurm-torchrun.sbatch")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_shellcheck_has_nothing_to_say():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", "-x", *map(str, SCRIPTS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def launcher(name, *args, tools, **variables):
    """A launcher with a Python that prints its arguments, and ``tools`` first in PATH."""
    fake(tools, "python", 'case "$1" in -c) ;; *) printf "%s\\n" "$*" ;; esac')
    environ = {"PATH": f"{tools}:/usr/bin:/bin", "DSPARK_PYTHON": str(tools / "python"), "DSPARK_ROOT": str(ROOT)}
    script = ["bash", str(ROOT / "scripts" / name), *args]
    return subprocess.run(script, env=environ | variables, capture_output=True, text=True, cwd=tools)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_dry_run_prints_the_command_and_starts_nothing(name, tmp_path):
    options = ["--head", "h"] if name == "torchrun.sh" else []
    tools = tmp_path / "tools"
    done = launcher(name, "--dry-run", "--nodes", "2", "--procs", "4", *options, "generate", "--pp", "2", tools=tools)
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert "would run, on each of 2 nodes:" in first and first.endswith("generate --pp 2")
    assert rest[-1] == "-m dspark.runtime dry-run --world 8 --gpus-per-node 4 -- generate --pp 2"
    assert not (tools / "logs").exists()


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize(
    "args, words",
    [
        ([], "what shall run?"),
        (["--nodes", "two", "generate"], "two is no number"),
        (["--speed", "3", "generate"], "unknown option --speed"),
        (["--nodes"], "--nodes needs a value"),
    ],
)
def test_mistakes_are_status_2(name, args, words, tmp_path):
    done = launcher(name, *args, tools=tmp_path / "tools")
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1


def test_torchrun_on_several_nodes_asks_for_the_head(tmp_path):
    done = launcher("torchrun.sh", "--nodes", "2", "--procs", "1", "generate", tools=tmp_path / "tools")
    assert done.returncode == 2 and "--head" in done.stderr
    more = ["--nodes", "2", "--procs", "1", "--node-rank", "2", "--head", "h", "generate"]
    done = launcher("torchrun.sh", *more, tools=tmp_path / "tools")
    assert done.returncode == 2 and "--node-rank 2 is not one of 2 nodes" in done.stderr


def test_the_srun_script_sets_what_ranks_read_and_carries_the_status(tmp_path):
    """Under a fake srun that runs one task: address from the node list, port from the job's id, its status."""
    tools = tmp_path / "tools"
    fake(tools, "srun", 'env | grep -E "^(MASTER|DSPARK)_" | sort; printf "%s\\n" "$*"; exit 7')
    fake(tools, "scontrol", 'case "$*" in *hostnames*) seq -f n%.0f 0 99999 ;; *) echo "x NodeAddr=10.1.2.3 y" ;; esac')
    fake(tools, "getent", "exit 2")
    slurm = {"SLURM_JOB_ID": "20001", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[0-1]"}
    done = launcher("slurm-srun.sbatch", "--logs", str(tmp_path / "l"), "generate", tools=tools, **slurm)
    assert done.returncode == 7, done.stderr
    assert "MASTER_ADDR=10.1.2.3\nMASTER_PORT=20001\n" in done.stdout and "--kill-on-bad-exit=1" in done.stdout
    assert done.stdout.rstrip().endswith("rank generate")


def checkout(tmp_path):
    """A folder with a space in its name that looks like the checkout to the scripts."""
    folder = tmp_path / "my checkout"
    (folder / "scripts").mkdir(parents=True)
    for name in ("scripts/environment.sh", "setup.py", "constraints-cpu.txt"):
        (folder / name).write_text((ROOT / name).read_text())
    return folder


def bash(folder, commands, path):
    script = f'source "{folder}/scripts/environment.sh"\n{commands}'
    return subprocess.run(["/bin/bash", "-c", script], env={"PATH": path}, capture_output=True, text=True)


def fake(folder, name, body):
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def system_tools(tmp_path):
    """A PATH with the few tools the script uses and no Python."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("dirname", "cat", "rm", "mkdir"):
        real = subprocess.run(["bash", "-c", f"type -P {name}"], capture_output=True, text=True, check=True)
        (tools / name).symlink_to(real.stdout.strip())
    return tools


def test_without_python_the_message_says_so(tmp_path):
    result = bash(checkout(tmp_path), "prepare cpu", str(system_tools(tmp_path)))
    assert result.returncode != 0 and "Python 3.10 or later was not found" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_old_python_is_passed_over(tmp_path):
    tools = system_tools(tmp_path)
    fake(tools, "python3", "exit 1")
    fake(tools, "python3.11", "exit 0")
    result = bash(checkout(tmp_path), "find_python", str(tools))
    assert result.stdout == "python3.11\n"


def test_without_ensurepip_the_message_says_what_to_install(tmp_path):
    tools = system_tools(tmp_path)
    fake(tools, "python3", '[ "$2" = venv ] && { echo "ensurepip is not available"; exit 1; }; exit 0')
    folder = checkout(tmp_path)
    result = bash(folder, "prepare cpu", str(tools))
    assert result.returncode != 0
    assert "cannot make a virtual environment" in result.stderr and "python3-venv" in result.stderr
    assert not (folder / ".venv").exists()


PYTHON_WITH_VENV = """
case "$1 $2" in
"-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
"-m pip") [ "$3" = install ] && echo "$@" >>"$(dirname "$0")/pip.log"; exit ${PIP_STATUS:-0} ;;
esac
exit 0
"""


def test_the_second_time_nothing_is_installed(tmp_path):
    tools = system_tools(tmp_path)
    (tools / "cp").symlink_to("/bin/cp")
    fake(tools, "python3", PYTHON_WITH_VENV)
    folder = checkout(tmp_path)
    log = folder / ".venv" / "bin" / "pip.log"
    for _ in range(2):
        assert bash(folder, "prepare cpu", str(tools)).returncode == 0
    assert log.read_text() == "-m pip install --quiet -c constraints-cpu.txt -e .[cpu]\n"
    for extras in ("dev,cpu", "dev", "cpu"):
        bash(folder, f"prepare {extras}", str(tools))
        assert len(log.read_text().splitlines()) == 2
    (folder / "setup.py").write_text("changed")
    bash(folder, "prepare cpu", str(tools))
    assert len(log.read_text().splitlines()) == 3
    moved = folder.rename(tmp_path / "moved")
    bash(moved, "prepare cpu", str(tools))
    assert len((moved / ".venv" / "bin" / "pip.log").read_text().splitlines()) == 1


def test_a_failed_install_is_tried_again(tmp_path):
    tools = system_tools(tmp_path)
    (tools / "cp").symlink_to("/bin/cp")
    fake(tools, "python3", PYTHON_WITH_VENV)
    folder = checkout(tmp_path)
    failed = bash(folder, "export PIP_STATUS=0; make_venv; PIP_STATUS=1; prepare cpu", str(tools))
    assert failed.returncode != 0 and "pip could not install dspark[cpu]" in failed.stderr
    assert bash(folder, "prepare cpu", str(tools)).returncode == 0
