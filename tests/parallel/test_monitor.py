"""Live jobs in which something goes wrong with one rank: every rank ends, with a message that names it."""

import multiprocessing
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from dspark.parallel import launch
from dspark.parallel.groups import Groups
from dspark.parallel.launch import LaunchInfo, Limits
from dspark.parallel.monitor import JobEnded
from dspark.parallel.topology import Topology

LIMITS = Limits(timeout=60, failure_timeout=8, watchdog=60)


def _boom():
    raise FloatingPointError("boom")


def _rank(info, limits, fault, culprit, folder):
    """Barriers for ever; ``fault()`` happens to ``culprit`` once its guard has told of some. Ends with the job's
    status."""
    torch.set_num_threads(1)
    os.dup2(os.open(folder / f"rank{info.rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = launch.init(info, "cpu", limits)
    process.monitor.listen_for_signals()
    groups = Groups.build(Topology.make(info.world), process.rank, journal=process.journal)
    status, start = 0, time.monotonic()
    try:
        while True:
            with process.journal.step():
                if info.rank == culprit and time.monotonic() - start > 1.5:
                    fault()
                groups.world.traffic.add("barrier", 0, 0, 0)
                dist.barrier()
    except BaseException as error:
        try:
            process.close(error)
            status = 70
        except JobEnded as ended:
            status = ended.verdict.status
    os._exit(status)


def run(fault, culprit, tmp_path, world=3, limits=LIMITS):
    """(seconds until all had ended, exit codes, what each wrote)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    infos = [LaunchInfo("env", rank, world, rank, world, None, "127.0.0.1", port) for rank in range(world)]
    ranks = [context.Process(target=_rank, args=(info, limits, fault, culprit, tmp_path)) for info in infos]
    start = time.monotonic()
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    seconds = time.monotonic() - start
    left = [process for process in ranks if process.is_alive()]
    for process in left:
        process.kill()
        process.join()
    assert not left, f"{len(left)} ranks were still there after 60 s"
    return seconds, [process.exitcode for process in ranks], [
        pathlib.Path(tmp_path / f"rank{rank}.err").read_text() for rank in range(world)
    ]  # fmt: skip


FAULTS = {
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed or crashed"),
    "stopped": (lambda: os.kill(os.getpid(), signal.SIGSTOP), "did not react for"),
    "failed": (_boom, "failed with FloatingPointError: boom"),
}


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_ends_all(name, culprit, tmp_path):
    fault, words = FAULTS[name]
    _, codes, texts = run(fault, culprit, tmp_path)
    assert all(code != 0 for code in codes), codes
    assert all(code == 1 for rank, code in enumerate(codes) if rank != culprit), codes
    line = next(line for line in texts[0].splitlines() if line.startswith("dspark: error: "))
    assert f"rank {culprit} on {socket.gethostname()} {words}" in line and "last seen at: step " in line
    assert "barrier over world" in line
    assert _no_guard_stays()


def test_interrupting_one_rank_stops_all(tmp_path):
    _, codes, texts = run(lambda: os.kill(os.getpid(), signal.SIGINT), 1, tmp_path)
    assert codes == [130, 70, 130] or codes == [130] * 3
    assert "dspark: interrupted by SIGINT, which came to rank 1" in texts[0]


def test_a_step_without_progress_is_explained(tmp_path):
    limits = Limits(timeout=60, failure_timeout=30, watchdog=2)
    _, codes, texts = run(lambda: time.sleep(600), 1, tmp_path, limits=limits)
    assert codes == [1, 1, 1]
    assert f"rank 1 on {socket.gethostname()} made no progress in a step" in texts[0]
    for rank, text in enumerate(texts):
        assert f"[{rank}] no progress; this rank is at: step " in text and "barrier over world" in text
        assert "in _rank" in text, "the stack"
    assert "time.sleep" in pathlib.Path(__file__).read_text() and "in <lambda>" in texts[1]


ALONE = """
import time
from dspark.parallel import launch
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
process = launch.init(launch.LaunchInfo("single"), "cpu", launch.Limits(watchdog=1))
with Groups.build(Topology(), 0, journal=process.journal).journal.step():
    time.sleep(600)
"""


def test_a_rank_alone_is_watched_too():
    done = subprocess.run([sys.executable, "-P", "-c", ALONE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "[0] no progress; this rank is at: step 1" in done.stderr
    assert 'File "<string>", line 8 in <module>' in done.stderr, "the stack"
    assert "dspark: error: no progress in a step for " in done.stderr and "--watchdog" in done.stderr


def _no_guard_stays():
    """Whether all orphaned guards are gone soon; they may need a moment after their rank."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        listing = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True).stdout.splitlines()
        if not any("parallel/guard.py" in line and line.split()[0] in ("1", str(os.getpid())) for line in listing):
            return True
    return False
