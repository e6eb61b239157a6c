"""mpirun, which gives ranks nothing but numbers."""

import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.mark.timeout(600)
def test_mpirun_gives_the_tokens_of_one_rank(work, monkeypatch):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    beside = pathlib.Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if not mpirun:
        pytest.skip("there is no mpirun; the mpich wheel has one")
    monkeypatch.setenv("MPIRUN", mpirun)
    script = ["bash", str(ROOT / "scripts" / "mpirun.sh"), "--procs", "2", *work.command("--tp", "2")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    work.check()
