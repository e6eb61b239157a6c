"""Starts jobs that cannot run, under every launcher, and prints how each ended: the second table of docs/failures.md.

    python scripts/inject_mistakes.py [--only srun,layout]

Needs what ``inject_faults.py`` needs. Both ranks are started with a mistake, or only rank 1 is. Measured is the time
from when the last rank came to meet the others, before which nobody could know, until an error could be read, and until
both ranks and the launcher had ended. Where a rank waits in vain, --timeout is 5 seconds, which are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

from inject_faults import LAUNCHERS, Started, command, is_running, prepare, until
from machines import free_ports, missing

TIMEOUT = 5.0
# Runs in every Python first: makes the mistake, and notes the process and when it looks for the others.
HOOK = """
import json, os, pathlib, sys, time
folder = pathlib.Path(__file__).parent
ranks = [os.environ[name] for name in ("RANK", "PMI_RANK", "SLURM_PROCID") if name in os.environ]
if "dspark.runtime" in sys.orig_argv and "dspark.parallel.agent" not in sys.orig_argv and ranks:
    rank = int(ranks[0])
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    mistake = json.loads((folder / "mistake.json").read_text())
    if rank or mistake["of_all"]:
        for name, value in mistake["variables"].items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        sys.argv += mistake["options"]
    def hook(event, args):
        if event == "socket.getaddrinfo":
            (folder / f"met{rank}").write_text(str(time.monotonic()))
    sys.addaudithook(hook)
"""


class Mistake(NamedTuple):
    """Made by rank 1 alone or by all: environment ``variables`` by launcher (None: unset), and ``options``.

    ``waits``: under which launchers somebody can only notice by waiting.
    """

    of_all: bool = False
    variables: dict[str, dict[str, str | None]] = {}  # noqa: RUF012
    options: tuple[str, ...] = ()
    waits: tuple[str, ...] = ()


BY_HAND, SRUN, TORCHRUN, MPIRUN = "by hand", "Slurm, srun", "torchrun, 2 hosts", "mpirun"
ONE_MISSES = {
    BY_HAND: {"LOCAL_RANK": None},
    SRUN: {"SLURM_LOCALID": None},
    TORCHRUN: {"LOCAL_RANK": None},
    MPIRUN: {"PMI_SIZE": None},
}
CONTRADICTS = {BY_HAND: {"RANK": "7"}, SRUN: {"WORLD_SIZE": "3"}, MPIRUN: {"WORLD_SIZE": "3"}}
FIND_A_HEAD = (BY_HAND, SRUN, TORCHRUN)  # under mpirun, MPI tells where it is
MISTAKES = {
    "layout of 3 ranks, of all": Mistake(True, options=("--pp", "3")),
    "layout of 3 ranks, of rank 1": Mistake(options=("--pp", "3")),
    "variable missing, of all": Mistake(True, ONE_MISSES),
    "variable missing, of rank 1": Mistake(False, ONE_MISSES, waits=(MPIRUN,)),
    "contradicting variable, of all": Mistake(True, CONTRADICTS),
    "contradicting variable, of rank 1": Mistake(False, CONTRADICTS, waits=(BY_HAND, MPIRUN)),
    "another checkpoint, of rank 1": Mistake(options=("--model", "MODEL")),
    "an option that is none, of rank 1": Mistake(options=("--no-such-option",), waits=(BY_HAND, TORCHRUN, MPIRUN)),
    "head without an address, of rank 1": Mistake(
        False, {name: {"MASTER_ADDR": "no-such-host.invalid"} for name in FIND_A_HEAD}, waits=(BY_HAND, TORCHRUN)
    ),
    "nobody at the head's port, of rank 1": Mistake(
        False, {name: {"MASTER_PORT": "1"} for name in FIND_A_HEAD}, waits=FIND_A_HEAD
    ),
}


@contextlib.contextmanager
def by_hand(folder: pathlib.Path, *more: str) -> Iterator[Started]:
    """Two processes that are told who they are."""
    hand = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    line = [sys.executable, "-P", "-m", "dspark.runtime", *command(folder, *more)]
    with (folder / "log").open("w") as log:
        ranks = [
            subprocess.Popen(line, env={**os.environ, **hand, "RANK": rank, "LOCAL_RANK": rank}, stdout=log, stderr=log)
            for rank in "01"
        ]

        def status() -> int | None:
            found = [rank.poll() for rank in ranks]
            return None if None in found else max(found, key=abs)

        yield Started(status, (folder / "log").read_text)


STARTS = {BY_HAND: (by_hand, ())} | {name: LAUNCHERS[name] for name in (SRUN, TORCHRUN, MPIRUN)}


def other_model(folder: pathlib.Path) -> pathlib.Path:
    """The bundled checkpoint with one other byte."""
    from dspark.runtime.checkpoint import bundled_model

    shutil.copytree(bundled_model(), folder)
    shard = next(folder.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    return folder


def errors(folder: pathlib.Path, job: Started) -> list[str]:
    """The error lines of the job so far, each once."""
    texts = [job.text(), *(file.read_text() for file in sorted(folder.rglob("*.log")))]
    return list(dict.fromkeys(line for one in texts for line in one.splitlines() if line.startswith("dspark: error")))


def seconds_since(met: list[float], moment: float, waited: float) -> str:
    """Seconds from the last of ``met`` to ``moment``, less those that were waited on purpose if it is behind them."""
    if not met or moment < max(met):
        return "at once"
    passed = moment - max(met)
    return f"{passed - waited:.1f}" if passed >= waited else f"{passed:.1f}"


def experiment(launcher: str, name: str, model: pathlib.Path) -> str:
    """One row of the table."""
    mistake = MISTAKES[name]
    variables, is_waited = mistake.variables.get(launcher, {}), launcher in mistake.waits
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        prepare(folder, 8)
        (folder / "sitecustomize.py").write_text(HOOK)
        options = [str(model) if word == "MODEL" else word for word in mistake.options]
        made = {"of_all": mistake.of_all, "variables": variables, "options": options}
        (folder / "mistake.json").write_text(json.dumps(made))
        waits = ["--timeout", str(TIMEOUT)] if is_waited else []
        with STARTS[launcher][0](folder, *waits) as job:
            until(lambda: errors(folder, job) or job.status() is not None, "an error")
            said = time.monotonic()
            until(lambda: job.status() is not None, "the end")
            ended = time.monotonic()
            pids = [int(file.read_text()) for file in folder.glob("pid?")]
            assert not any(map(is_running, pids)), "ranks are left"
            status, lines = job.status(), errors(folder, job)
        assert status != 0, "it ran"
        assert not (folder / "out.jsonl").exists(), "something was written"
        met = [float(file.read_text()) for file in folder.glob("met?")]
    assert lines, "nothing was said"
    waited = TIMEOUT * is_waited
    words = "; ".join(line.removeprefix("dspark: error: ") for line in lines)
    first, last = (seconds_since(met, moment, waited) for moment in (said, ended))
    return f"| {name} | {launcher} | {first} | {last} | {status} | {words} |"


def main() -> int:
    """Print the table; status 1 if an experiment did not go as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORDS", help="those whose name has all of these, with commas")
    words = parser.parse_args().only.split(",")
    os.environ["DSPARK_PYTHON"] = sys.executable
    print("| mistake | launcher | said after s | all ended after s | status | what ranks say |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    bad = 0
    with tempfile.TemporaryDirectory() as scratch:
        model = other_model(pathlib.Path(scratch) / "model")
        for name, mistake in MISTAKES.items():
            for launcher, (_, needs) in STARTS.items():
                fits = not mistake.variables or launcher in mistake.variables
                if not fits or missing(*needs) or not all(word in f"{launcher} {name}" for word in words):
                    continue
                try:
                    print(experiment(launcher, name, model), flush=True)
                except (AssertionError, TimeoutError) as error:
                    bad += 1
                    print(f"| {name} | {launcher} | FAILED: {' '.join(str(error).split())[-300:]} |", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
