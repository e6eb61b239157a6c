"""The shell scripts: they parse, find a Python, and say what is missing."""

import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = sorted([*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


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
