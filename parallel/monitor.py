"""A rank's side of the watch over a job: it tells its guard what it does, and ends when the guard says so.

See :mod:`.guard` for who notices what. Everything here runs beside the work, in one thread; the work itself only
writes the :class:`~.journal.Journal`, and reports its own failure by :meth:`Monitor.fail`.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import faulthandler
import json
import os
import pathlib
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from . import guard
from .journal import Journal

if TYPE_CHECKING:
    import torch.distributed as dist

# Noticing takes this share of the time in which a job has to have ended.
NOTICE = 0.75


class Verdict(NamedTuple):
    """Why the job ends: the exit status, the rank that it is about, and the line that was printed."""

    status: int
    rank: int
    text: str


class JobEnded(RuntimeError):
    """The job ended for a reason that lies elsewhere; ``verdict`` was printed already."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__(verdict.text)


class Monitor:
    """The watch over one rank of a running job; :meth:`start` is collective, in that every rank must call it."""

    def __init__(self, process: subprocess.Popen, rank: int, journal: Journal) -> None:
        self._process, self._rank, self._journal = process, rank, journal
        self._lock = threading.Lock()
        self._lines = guard.Lines()
        self._verdict: Verdict | None = None
        self._judged = threading.Event()
        self._is_waiting = self._has_left = self._listens = False
        self._signals, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    @classmethod
    def start(
        cls,
        store: dist.Store,
        rank: int,
        hosts: Sequence[str],
        address: str,
        journal: Journal,
        failure_timeout: float,
        watchdog: float,
    ) -> Monitor:
        """Start this rank's guard and connect it to that of rank 0, which listens at ``address`` of its host.

        ``hosts`` names the host of every rank, for messages. A rank that dies, fails or falls silent ends the job
        within ``failure_timeout`` seconds, a step without progress after ``watchdog``. Raises what the store raises.
        """
        command = [sys.executable, "-I", "-S", str(pathlib.Path(guard.__file__).resolve())]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        monitor = cls(process, rank, journal)
        secret = secrets.token_hex(16) if rank == 0 else None
        if rank:
            host, port, secret = json.loads(store.get("guard"))
        setup = {"rank": rank, "hosts": list(hosts), "pid": os.getpid(), "secret": secret, "address": address}
        monitor._tell(setup | {"silence": NOTICE * failure_timeout, "watchdog": watchdog})
        if rank:
            monitor._tell({"kind": "hub", "host": host, "port": port})
        ready = monitor._read()
        if not ready or ready[0]["kind"] == "end":
            raise OSError(ready[0]["text"] if ready else f"the guard of rank {rank} did not start")
        if rank == 0:
            store.set("guard", json.dumps([address, ready[0]["port"], secret]))
        monitor._thread.start()
        atexit.register(monitor._at_exit)
        return monitor

    # --- what the work says

    def listen_for_signals(self) -> None:
        """Stop the whole job on SIGINT and SIGTERM, also while this rank waits in a collective. Main thread only."""
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._listens = True

    def fail(self, error: BaseException) -> Verdict | None:
        """This rank cannot go on; returns why the job ends, or None where nobody answers in time."""
        self._is_waiting = True
        self._beat()
        if isinstance(error, KeyboardInterrupt):
            number = getattr(error, "signal_number", signal.SIGINT)
            self._tell({"kind": "signal", "number": int(number)})
        else:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:2000]
            self._tell({"kind": "failed", "text": f"failed with {text}", "follows": _is_of_others(error)})
        self._judged.wait(guard.SETTLE + guard.PATIENCE)
        return self._verdict

    def leave(self) -> None:
        """This rank has done its part; its end is none of the others' business. Main thread, if it listens."""
        if self._has_left:
            return
        self._has_left = True
        atexit.unregister(self._at_exit)
        if self._listens:
            signal.set_wakeup_fd(-1)
        self._tell({"kind": "bye"})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(guard.PATIENCE)

    def _at_exit(self) -> None:
        """A program that ends without having closed its job: in order, or by an exception nobody caught."""
        error = getattr(sys, "last_value", None)
        if error is not None and not self._has_left:
            self.fail(error)
        self.leave()

    # --- beside the work

    def _tell(self, message: guard.Message) -> None:
        with self._lock, contextlib.suppress(OSError):
            os.write(self._process.stdin.fileno(), json.dumps(message).encode() + b"\n")

    def _read(self) -> list[guard.Message] | None:
        """The next messages of the guard; None when it is gone."""
        data = os.read(self._process.stdout.fileno(), guard.MAX_LINE)
        return self._lines.feed(data) if data else None

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._process.stdout, selectors.EVENT_READ)
        selector.register(self._signals, selectors.EVENT_READ)
        while not self._has_left:
            for key, _ in selector.select(guard.INTERVAL):
                if key.fileobj == self._signals:
                    self._on_signals(os.read(self._signals, 64))
                else:
                    self._on_messages(self._read())
            self._beat()

    def _beat(self) -> None:
        journal = self._journal
        still = time.monotonic() - journal.changed
        state = {"count": journal.count, "still": still, "last": journal.last()[:500], "in_step": journal.in_step}
        self._tell({"kind": "beat", **state})

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in (signal.SIGINT, signal.SIGTERM):
                self._tell({"kind": "signal", "number": number})

    def _on_messages(self, messages: list[guard.Message] | None) -> None:
        if self._has_left:
            return
        if messages is None:
            print(f"dspark: error: the guard of rank {self._rank} is gone", file=sys.stderr, flush=True)
            return self._end(Verdict(1, self._rank, "its guard is gone"))
        for message in messages:
            if message["kind"] == "dump":
                _dump(self._rank, self._journal)
            elif message["kind"] == "end":
                self._end(Verdict(message["status"], message["rank"], message["text"]))

    def _end(self, verdict: Verdict) -> None:
        """End this process: by its own work if that waits for the verdict or can be interrupted, else from here."""
        self._verdict = verdict
        self._judged.set()
        if verdict.status != 1 and not self._is_waiting:
            _thread.interrupt_main(verdict.status - 128)
            time.sleep(guard.PATIENCE)
        if self._is_waiting:
            time.sleep(guard.PATIENCE / 2)
        os._exit(verdict.status)


class Watchdog:
    """The watch over a rank that is alone: nobody misses it, so all there is to notice is a step without progress."""

    def __init__(self, journal: Journal, seconds: float) -> None:
        self._journal, self._seconds = journal, seconds
        self._has_left = threading.Event()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def leave(self) -> None:
        """Nothing is watched any more."""
        self._has_left.set()

    def _run(self) -> None:
        # Its own ticks are counted, not the clock, so that a job that was suspended can go on.
        count, still = self._journal.count, 0.0
        while not self._has_left.wait(guard.INTERVAL):
            still = still + guard.INTERVAL if self._journal.in_step and self._journal.count == count else 0.0
            count = self._journal.count
            if still > self._seconds:
                _dump(0, self._journal)
                text = f"no progress in a step for {still:.0f} s, at: {self._journal.last()}; if it is only slow, raise"
                print(f"dspark: error: {text} --watchdog", file=sys.stderr, flush=True)
                os._exit(1)


def _dump(rank: int, journal: Journal) -> None:
    """Write what a rank does, its last collectives and the stacks of its threads to stderr."""
    lines = [f"[{rank}] no progress; this rank is at: {journal.last()}; its last collectives:"]
    lines += [f"[{rank}]   {entry}" for entry in journal.entries()]
    print("\n".join(lines), file=sys.stderr, flush=True)
    faulthandler.dump_traceback(sys.__stderr__.fileno(), all_threads=True)


def _is_of_others(error: BaseException) -> bool:
    """Whether an error was met while waiting for other ranks, and so may only follow from what happened to them."""
    if not isinstance(error, RuntimeError):
        return False
    import torch.distributed as dist

    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    exchanges = pathlib.Path(__file__).parent.with_name("comm"), pathlib.Path(dist.__file__).parent
    return any(folder in pathlib.Path(trace.tb_frame.f_code.co_filename).parents for folder in exchanges)
