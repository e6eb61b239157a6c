"""The batch scripts under Slurm itself."""

import os
import pathlib
import re
import signal
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
pytestmark = pytest.mark.timeout(600)
KINDS = {"srun": [], "torchrun": ["--procs", "1"]}


def submit(slurm, work, kind, *command, export="ALL"):
    spread = ["--nodes=2", "--ntasks-per-node=1", f"--output={work.log}", f"--export={export}"]
    slurm.environ.update(DSPARK_PYTHON=os.environ["DSPARK_PYTHON"], OMP_NUM_THREADS="1")
    script = [str(ROOT / "scripts" / f"slurm-{kind}.sbatch"), *KINDS[kind], "--logs", str(work.folder / "logs")]
    return slurm.submit(*spread, *script, *command, cwd=ROOT)


@pytest.mark.parametrize("kind", KINDS)
def test_golden_tokens_on_two_nodes(kind, slurm, work):
    loads = work.folder / "loads.npz"
    state = slurm.wait(submit(slurm, work, kind, *work.command("--pp", "2", "--eplb-record", str(loads))))
    assert state["JobState"] == "COMPLETED", work.log.read_text()[-3000:]
    assert "2 ranks on 2 nodes" in work.log.read_text()
    work.check()
    picks = np.load(loads)["load"].sum(axis=(0, 2))
    assert picks.min() == picks.max() >= 3 * 16, "the layers of both ranks are in the file"


def test_a_contradicting_variable_is_named(slurm, work):
    state = slurm.wait(submit(slurm, work, "srun", *work.command("--pp", "2"), export="ALL,WORLD_SIZE=3"))
    # srun may end the second rank before that has said 2 itself, and the job's status is the highest.
    assert state["ExitCode"] in ("2:0", "143:0")
    assert "dspark: error: WORLD_SIZE=3" in work.log.read_text() and "SLURM_NTASKS=2" in work.log.read_text()


def running_ranks(work):
    """The processes of the ranks, once steps are under way."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        text = work.log.read_text() if work.log.exists() else ""
        if "requests at a time" in text:
            return [int(pid) for pid in re.findall(r", cpu, (\d+)$", text, re.MULTILINE)]
        assert "error:" not in text, text[-3000:]
        time.sleep(0.1)  # the ranks need the processor
    raise TimeoutError(text[-3000:])


def gone(pids):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)
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


STOPS = {  # how it is asked for, what becomes of the job
    "a signal to the script": (("scancel", "--signal=TERM", "--batch", "{}"), "FAILED"),
    "scancel": (("scancel", "{}"), "CANCELLED"),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_job_that_is_stopped_ends_cleanly(name, slurm, work):
    command, becomes = STOPS[name]
    job = submit(slurm, work, "srun", *work.command("--pp", "2", num_tokens=3000))
    pids = running_ranks(work)
    slurm.run(*(word.format(job) for word in command))
    state = slurm.wait(job)
    assert state["JobState"] == becomes, work.log.read_text()[-3000:]
    assert becomes == "CANCELLED" or state["ExitCode"] == "143:0"
    assert "dspark: interrupted by SIGTERM" in work.log.read_text() and gone(pids)
