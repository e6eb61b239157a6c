"""Breaks running jobs in every way and under every launcher, and prints how each ended: the table of docs/failures.md.

    python scripts/inject_faults.py [--only hosts,kill]

Needs root (hosts are network namespaces), Slurm and mpirun; what is absent is left out. Every job decodes the same
requests on two ranks. Once some have finished, something happens to one rank or host; measured is the time from there
until the ranks and until the launcher have ended. Then: no process of the job may be left, every line of
the output must be whole and right, and a rerun with --resume must complete the set exactly.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from machines import HOSTS_NEED, SLURM_NEEDS, Hosts, Slurm, missing

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT = 400.0
NUM_REQUESTS = 10
NUM_TOKENS = 48
# Slurm looks every half minute whether a job's time is over, and the job must not have finished by then.
NUM_TOKENS_BY_FAULT = {"time limit": 600}
# SIGUSR2 raises in whatever the rank's main thread is doing, which nearly always is a layer.
RAISES = """
import signal
def handler(number, frame):
    raise FloatingPointError("injected")
signal.signal(signal.SIGUSR2, handler)
"""


class Started(NamedTuple):
    """A job under way: has it ended (its status then), what it said; its hosts, or its Slurm and its number there."""

    status: Callable[[], int | None]
    text: Callable[[], str]
    hosts: Hosts | None = None
    slurm: Slurm | None = None
    number: str = ""


def command(folder: pathlib.Path, *more: str) -> list[str]:
    """The dspark command of every job."""
    files = ["--input", str(folder / "in.jsonl"), "--output", str(folder / "out.jsonl")]
    return ["generate", "--pp", "2", *files, "--max-running", "2", "--draft", "none", *more]


@contextlib.contextmanager
def on_hosts(folder: pathlib.Path, *more: str) -> Iterator[Started]:
    """torchrun.sh on two hosts."""
    with Hosts(2) as hosts, (folder / "log").open("w") as log:
        nodes = []
        for rank, name in enumerate(hosts.names):
            script = [
                "bash",
                str(ROOT / "scripts/torchrun.sh"),
                "--nodes",
                "2",
                "--procs",
                "1",
                "--node-rank",
                str(rank),
            ]
            fabric = ["--head", hosts.addresses[0], "--interface", "eth0", "--logs", str(folder / name)]
            nodes.append(hosts.start(rank, [*script, *fabric, *command(folder, *more)], stdout=log, stderr=log))

        def status() -> int | None:
            found = [node.poll() for node in nodes]
            return None if None in found else max(found, key=abs)

        yield Started(status, (folder / "log").read_text, hosts)


def on_slurm(kind: str, *options: str) -> Callable[..., contextlib.AbstractContextManager[Started]]:
    """One of the batch scripts on two nodes."""

    @contextlib.contextmanager
    def start(folder: pathlib.Path, *more: str) -> Iterator[Started]:
        with Slurm(2) as slurm:
            script = [str(ROOT / f"scripts/slurm-{kind}.sbatch"), *options, "--logs", str(folder / "logs")]
            spread = ["--nodes=2", "--ntasks-per-node=1", f"--output={folder / 'log'}"]
            job = slurm.submit(*spread, *script, *command(folder, *more), cwd=ROOT)

            def status() -> int | None:
                state = slurm.job(job)
                if state["JobState"] in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                    return None
                code, number = map(int, state["ExitCode"].split(":"))
                return 128 + number if number else code

            log = folder / "log"
            yield Started(status, lambda: log.read_text() if log.exists() else "", slurm=slurm, number=job)

    return start


@contextlib.contextmanager
def on_mpirun(folder: pathlib.Path, *more: str) -> Iterator[Started]:
    """mpirun.sh with two ranks."""
    with (folder / "log").open("w") as log:
        script = ["bash", str(ROOT / "scripts/mpirun.sh"), "--procs", "2"]
        job = subprocess.Popen([*script, *command(folder, *more)], stdout=log, stderr=log)
        try:
            yield Started(job.poll, (folder / "log").read_text)
        finally:
            job.terminate()
            job.wait()


LAUNCHERS = {
    "torchrun, 2 hosts": (on_hosts, HOSTS_NEED),
    "Slurm, srun": (on_slurm("srun"), SLURM_NEEDS),
    "Slurm, torchrun": (on_slurm("torchrun", "--procs", "1"), SLURM_NEEDS),
    "mpirun": (on_mpirun, ("mpirun",)),
}

ONLY_UNDER = {
    "link of host 1 down": ("torchrun, 2 hosts",),
    "scancel": ("Slurm, srun", "Slurm, torchrun"),
    "time limit": ("Slurm, srun", "Slurm, torchrun"),
    "scontrol requeue": ("Slurm, srun", "Slurm, torchrun"),
}
# Slurm runs the same job a second time by itself, two minutes later: it has to say --resume from the start.
RUNS_AGAIN = ("scontrol requeue",)


def send(number: int, rank: int) -> Callable[[Started, list[int]], None]:
    """A fault that is a signal to one rank."""
    return lambda job, pids: os.kill(pids[rank], number)


def cut_link(job: Started, pids: list[int]) -> None:
    """The second host's link goes down."""
    job.hosts.cut_off(1)


def lose_head(job: Started, pids: list[int]) -> None:
    """Everything on the first host dies and its link with it; without hosts, rank 0 and its guard."""
    if job.hosts is not None:
        job.hosts.cut_off(0)
    children = subprocess.run(["pgrep", "-P", str(pids[0])], capture_output=True, text=True).stdout.split()
    for pid in [*map(int, children), pids[0]]:
        os.kill(pid, signal.SIGKILL)


def cancel(job: Started, pids: list[int]) -> None:
    """scancel of the whole job, as a user types it."""
    job.slurm.run("scancel", job.number)


def let_time_run_out(job: Started, pids: list[int]) -> None:
    """The job gets a time limit that leaves it less than the minute of warning that its script asks for."""
    job.slurm.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=1")


def requeue(job: Started, pids: list[int]) -> None:
    """The job goes back into Slurm's queue."""
    job.slurm.run("scontrol", "requeue", job.number)


FAULTS: dict[str, Callable[[Started, list[int]], None] | None] = {
    "kill -9 of rank 1": send(signal.SIGKILL, 1),
    "exception in a layer of rank 1": send(signal.SIGUSR2, 1),
    "SIGSTOP of rank 1": send(signal.SIGSTOP, 1),
    "SIGTERM to rank 1": send(signal.SIGTERM, 1),
    "link of host 1 down": cut_link,
    "head gone": lose_head,
    "disk full": None,
    "scancel": cancel,
    "time limit": let_time_run_out,
    "scontrol requeue": requeue,
}


def results(path: pathlib.Path) -> dict[str, list[int]]:
    """The first token ids by request; raises for a line that is torn or there twice."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["id"] for one in found}) == len(found), "a request is there twice"
    return {one["id"]: one["token_ids"][:NUM_TOKENS] for one in found}


def pids_of(text: str) -> list[int] | None:
    """The processes of the ranks, from the table that rank 0 prints."""
    rows = re.findall(r"^ +(\d+) +\d+ .*, cpu, (\d+)$", text, re.MULTILINE)
    return [int(pid) for _, pid in rows] if len(rows) == 2 else None


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _num_lines(path: pathlib.Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for ``condition``."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {LIMIT:g} s")
        time.sleep(0.05)


def experiment(launcher: str, fault: str, expected: dict[str, list[int]], resume: bool) -> str:
    """One row of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder, start = pathlib.Path(name), LAUNCHERS[launcher][0]
        prepare(folder, NUM_TOKENS_BY_FAULT.get(fault, NUM_TOKENS))
        out = folder / "out.jsonl"
        if FAULTS[fault] is None:
            out.symlink_to("/dev/full")
        with start(folder, *(["--resume"] if fault in RUNS_AGAIN else [])) as job:
            if FAULTS[fault] is None:
                until(lambda: job.status() is not None or "No space left" in job.text(), "a full disk")
                pids = pids_of(job.text())
            else:
                until(lambda: job.status() is not None or _num_lines(out) >= 2, "two results")
                assert job.status() is None, f"ended by itself: {job.text()[-200:]}"
                pids = pids_of(job.text())
                FAULTS[fault](job, pids)
            begun = time.monotonic()
            until(lambda: not any(map(is_running, pids)), "the end of the ranks")
            ranks = time.monotonic() - begun
            num_before = _num_lines(out) if fault in RUNS_AGAIN else 0  # /dev/full has no end to read to
            until(lambda: job.status() is not None, "the end")
            seconds, status, text = time.monotonic() - begun, job.status(), job.text()
        left = subprocess.run(["pgrep", "-f", str(out)], capture_output=True, text=True).stdout.split()
        texts = [text, *(file.read_text() for file in folder.rglob("*.log"))]
        said = [line for one in texts for line in one.splitlines() if line.startswith("dspark: ")]
        said.sort(key=lambda line: " on " not in line)  # first of all what names a host
        checked = "nothing written"
        if FAULTS[fault] is None:
            out.unlink()
        else:
            found = results(out)
            assert all(expected[one] == ids for one, ids in found.items()), "a result differs"
            checked = f"{len(found)} of {NUM_REQUESTS} written, right"
        if fault in RUNS_AGAIN:
            assert found == expected, "the second run did not complete the set"
            checked = f"{num_before} of {NUM_REQUESTS} written; the second run completes them"
        elif resume:
            with start(folder, "--resume") as job:
                until(lambda: job.status() is not None, "the end of the rerun")
                assert job.status() == 0, job.text()[-2000:]
            assert results(out) == expected, "the rerun did not complete the set"
            checked += "; rerun completes them"
    words = said[0].removeprefix("dspark: ").replace(f"{name}/", "") if said else "(nothing)"
    return f"| {fault} | {launcher} | {ranks:.1f}, {seconds:.1f} | {status} | {len(left)} | {checked} | {words} |"


def prepare(folder: pathlib.Path, num_tokens: int) -> None:
    """The requests, and the hook that lets a signal raise."""
    common = {"max_new_tokens": num_tokens, "ignore_eos": True}
    prompts = [{"id": str(i), "prompt": f"Once upon a time {i}", **common} for i in range(NUM_REQUESTS)]
    (folder / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
    (folder / "sitecustomize.py").write_text(RAISES)
    os.environ["PYTHONPATH"] = str(folder)


def main() -> int:
    """Print the table; status 1 if an experiment did not go as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="experiments whose name has all of these, with commas"
    )
    parser.add_argument("--no-resume", action="store_true", help="leave out the reruns")
    args = parser.parse_args()
    os.environ["DSPARK_PYTHON"] = sys.executable
    with tempfile.TemporaryDirectory() as name:
        prepare(pathlib.Path(name), NUM_TOKENS)
        line = [sys.executable, "-P", "-m", "dspark.runtime", *command(pathlib.Path(name))]
        line[line.index("--pp") + 1] = "1"
        subprocess.run(line, check=True, capture_output=True)
        expected = results(pathlib.Path(name) / "out.jsonl")
    print("| fault | launcher | ranks, launcher ended after s | status | left | results | message |")
    print("|---|---|---|---|---|---|---|", flush=True)
    bad = 0
    for launcher, (_, needs) in LAUNCHERS.items():
        reason = missing(*needs) if needs != ("mpirun",) else None
        for fault in FAULTS:
            if not all(word in f"{launcher} {fault}" for word in args.only.split(",")):
                continue
            if reason or launcher not in ONLY_UNDER.get(fault, LAUNCHERS):
                continue
            try:
                print(experiment(launcher, fault, expected, not args.no_resume), flush=True)
            except (AssertionError, TimeoutError) as error:
                bad += 1
                print(f"| {fault} | {launcher} | FAILED: {' '.join(str(error).split())[-300:]} |", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
