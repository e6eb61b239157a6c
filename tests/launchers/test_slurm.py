"""The batch scripts under Slurm itself."""

import os
import pathlib
import re
import signal
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.timeout(600)
KINDS = {"srun": [], "torchrun": ["--procs", "1"]}


def submit(slurm, work, kind, *command):
    spread = ["--nodes=2", "--ntasks-per-node=1", f"--output={work.log}", "--export=ALL"]
    slurm.environ.update(DSPARK_PYTHON=os.environ["DSPARK_PYTHON"], OMP_NUM_THREADS="1")
    script = [str(ROOT / "scripts" / f"slurm-{kind}.sbatch"), *KINDS[kind], "--logs", str(work.folder / "logs")]
    return slurm.submit(*spread, *script, *command, cwd=ROOT)


@pytest.mark.parametrize("kind", KINDS)
def test_golden_tokens_on_two_nodes(kind, slurm, work):
    state = slurm.wait(submit(slurm, work, kind, *work.command("--pp", "2")))
    assert state["JobState"] == "COMPLETED", work.log.read_text()[-3000:]
    assert "2 ranks on 2 nodes" in work.log.read_text()
    work.check()


def running_ranks(work):
    """The processes of the ranks, once steps are under way."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        text = work.log.read_text() if work.log.exists() else ""
        if "requests at a time" in text:
            return [int(pid) for pid in re.findall(r", cpu, (\d+)$", text, re.MULTILINE)]
    raise TimeoutError(text[-3000:])


def gone(pids):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
        pass
    return not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_killed_task_ends_the_job_and_the_rest_is_resumed(slurm, work):
    job = submit(slurm, work, "srun", *work.command("--pp", "2", "--max-running", "1", num_tokens=3000))
    pids = running_ranks(work)
    os.kill(pids[1], signal.SIGKILL)
    state = slurm.wait(job)
    assert state["JobState"] == "FAILED" and state["ExitCode"] != "0:0"
    assert "dspark: error: rank 1 on" in work.log.read_text() and "was killed or crashed" in work.log.read_text()
    assert gone(pids)
    work.output.write_text("")
    state = slurm.wait(submit(slurm, work, "srun", *work.command("--pp", "2", "--resume")))
    assert state["JobState"] == "COMPLETED", work.log.read_text()[-3000:]
    work.check()


def test_a_cancelled_job_stops_cleanly_with_its_own_status(slurm, work):
    job = submit(slurm, work, "srun", *work.command("--pp", "2", num_tokens=3000))
    pids = running_ranks(work)
    slurm.run("scancel", "--signal=TERM", "--batch", job)
    state = slurm.wait(job)
    assert state["ExitCode"] == "143:0", work.log.read_text()[-3000:]
    assert "dspark: interrupted by SIGTERM" in work.log.read_text() and gone(pids)
