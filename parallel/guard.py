"""A small process beside every rank that ends the job when a rank, its host or its link falls silent.

Run as a script by :mod:`.monitor`, on the standard library alone: it starts in milliseconds and lives through what
stops a rank (SIGSTOP, a collective that never returns, a library that keeps the interpreter's lock). The rank tells it
through a pipe every half second what it does. The guard of rank 0 is the hub: all others connect to it and pass that
on, so it notices a rank that died, failed, stopped or cannot be reached, and has every guard end its rank with one
message. A guard that no longer hears the hub ends its rank by itself.

Messages are JSON objects, one a line of at most :data:`MAX_LINE` bytes, on pipes and on sockets. A connection begins
with a secret that the ranks learn through the job's store.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_LINE = 1 << 16
TICK = 0.25
INTERVAL = 0.5
# A failure that may follow from another rank's waits so long for that one to be heard of.
SETTLE = 1.5
# Stacks are written for so long before a job without progress is ended.
DUMP = 2.0
# A rank that was told to end has so long to do it: after a failure, after an interruption.
PATIENCE, PATIENCE_INTERRUPTED = 2.0, 5.0

Message = dict[str, Any]


class Lines:
    """Messages out of a stream of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes; raises ``ValueError`` for anything that is none."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            raise ValueError("a line is too long")
        found = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in found):
            raise ValueError("a line is no object")
        return found


@dataclass
class Seen:
    """What the hub knows of a rank. Times are the hub's clock; ``age``: seconds since the rank told its own guard.

    ``changed``: when its journal last grew, to ``count``.
    """

    host: str
    heard: float
    changed: float
    age: float = 0.0
    count: int = -1
    last: str = "starting"
    in_step: bool = False
    left: bool = False
    connection: socket.socket | None = None

    def told(self, message: Message, now: float) -> None:
        """A beat came."""
        self.heard, self.age = now, float(message["age"])
        self.changed = now - self.age - float(message["still"])
        self.count, self.last = int(message["count"]), str(message["last"])
        self.in_step = bool(message["in_step"])


class Hub:
    """Judges from what all ranks tell. ``send(rank, message)`` reaches the guard of a rank."""

    def __init__(
        self, hosts: list[str], silence: float, watchdog: float, send: Callable[[int, Message], None], now: float
    ) -> None:
        self.ranks = [Seen(host, now, now) for host in hosts]
        self.over = False
        self._silence, self._watchdog, self._send = silence, watchdog, send
        self._suspected: float | None = None
        self._suspicion: tuple[int, str] | None = None
        self._dumped: float | None = None

    def take(self, rank: int, message: Message, now: float) -> None:
        """A guard passed something on."""
        seen, kind = self.ranks[rank], message.get("kind")
        if kind == "beat":
            seen.told(message, now)
        elif kind == "bye":
            seen.left = True
        elif kind == "signal":
            number = int(message["number"])
            name = signal.Signals(number).name
            self._end(rank, 128 + number, f"interrupted by {name}, which came to rank {rank} on {seen.host}")
        elif kind == "failed" and not message["follows"]:
            self._end(rank, 1, self._about(rank, str(message["text"])))
        elif kind == "failed" and self._suspected is None:
            self._suspected, self._suspicion = now, (rank, str(message["text"]))

    def lost(self, rank: int) -> None:
        """The connection to a guard broke off."""
        if not self.ranks[rank].left:
            self._end(rank, 1, self._about(rank, "is gone, with its guard"))

    def tick(self, now: float) -> None:
        """Time passed."""
        staying = [(rank, seen) for rank, seen in enumerate(self.ranks) if not seen.left]
        for rank, seen in staying:
            if now - seen.heard > self._silence:
                silent = f"was not heard of for {now - seen.heard:.1f} s (host or link down?)"
                return self._end(rank, 1, self._about(rank, silent))
            if seen.age > self._silence:
                return self._end(rank, 1, self._about(rank, f"did not react for {seen.age:.1f} s (stopped?)"))
        if self._suspected is not None and now - self._suspected > SETTLE:
            # Nobody has a reason of its own, so the one that all wait for is the one that came least far.
            rank, text = self._suspicion
            slow, seen = _least_far(staying) if staying else (rank, self.ranks[rank])
            where = "" if slow == rank else f"; rank {slow} on {seen.host} is behind: {seen.last}"
            return self._end(rank, 1, self._about(rank, text) + where)
        self._watch(staying, now)

    def _watch(self, staying: list[tuple[int, Seen]], now: float) -> None:
        stuck = [(rank, seen) for rank, seen in staying if seen.in_step and now - seen.changed > self._watchdog]
        if not stuck:
            self._dumped = None
        elif self._dumped is None:
            self._dumped = now
            for rank, _ in staying:
                self._send(rank, {"kind": "dump"})
        elif now - self._dumped > DUMP:
            rank, seen = _least_far(stuck)
            self._end(rank, 1, self._about(rank, f"made no progress in a step for {now - seen.changed:.0f} s"))

    def _about(self, rank: int, text: str) -> str:
        seen = self.ranks[rank]
        return f"rank {rank} on {seen.host} {text}; it was last seen at: {seen.last}"

    def _end(self, rank: int, status: int, text: str) -> None:
        if self.over:
            return
        self.over = True
        for peer, seen in enumerate(self.ranks):
            if not seen.left:
                self._send(peer, {"kind": "end", "rank": rank, "status": status, "text": text})


def _least_far(ranks: list[tuple[int, Seen]]) -> tuple[int, Seen]:
    """The rank that stopped first, and of those that stopped within the same second the one that had done least."""
    first = min(seen.changed for _, seen in ranks)
    return min((item for item in ranks if item[1].changed - first < 1.0), key=lambda item: item[1].count)


class Guard:
    """One guard: the pipe to its rank, and the hub or the way to it."""

    def __init__(self, setup: Message) -> None:
        self.rank, self.hosts, self.pid = setup["rank"], setup["hosts"], setup["pid"]
        self.silence, self.watchdog, self.secret = setup["silence"], setup["watchdog"], setup["secret"]
        self.now = self.rank_heard = self.hub_heard = self.sent = time.monotonic()
        self.state = {"count": 0, "still": 0.0, "last": "starting", "in_step": False}
        self.head_last = "starting"
        self.hub_is_over = self.done = False
        self.deadline: float | None = None
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ, (self.from_rank, Lines()))
        self.hub: Hub | None = None
        self.to_hub: socket.socket | None = None
        if self.rank == 0:
            self.listener = socket.create_server((setup["address"], 0), backlog=1024)
            self.selector.register(self.listener, selectors.EVENT_READ, (self.on_connection, None))
            self.hub = Hub(self.hosts, self.silence, self.watchdog, self.hub_sends, self.now)
            self.tell_rank({"kind": "port", "port": self.listener.getsockname()[1]})

    def join(self, address: tuple[str, int]) -> None:
        """Connect to the hub."""
        try:
            self.to_hub = socket.create_connection(address, timeout=self.silence)
        except OSError as error:
            text = (
                f"rank {self.rank} on {self.hosts[self.rank]} cannot reach the guard of rank 0 at "
                f"{address[0]}:{address[1]} ({error}); open that port, or do without guards: --failure-timeout 0"
            )
            return self.end(1, self.rank, text, is_cut_off=True)
        self.to_hub.settimeout(1.0)
        self.selector.register(self.to_hub, selectors.EVENT_READ, (self.from_hub, Lines()))
        self.tell(self.to_hub, {"kind": "hello", "rank": self.rank, "secret": self.secret})
        self.tell_rank({"kind": "joined"})

    def run(self) -> None:
        """Until the rank has ended."""
        while not self.done:
            events = self.selector.select(TICK)
            self.now = time.monotonic()
            for key, _ in events:
                handler, argument = key.data
                handler(key.fileobj, argument)
            self.tick()

    # --- what comes in

    def read(self, source: Any, lines: Lines) -> list[Message] | None:
        """What ``source`` sent; None when it is closed or talks nonsense."""
        try:
            data = os.read(source, MAX_LINE) if isinstance(source, int) else source.recv(MAX_LINE)
            found = lines.feed(data) if data else None
        except (OSError, ValueError):
            found = None
        if found is None:
            self.selector.unregister(source)
        return found

    def from_rank(self, source: int, lines: Lines) -> None:
        """The rank spoke, or is no more."""
        messages = self.read(source, lines)
        if messages is None:
            return self.rank_ended()
        self.rank_heard = self.now
        for message in messages:
            if message["kind"] == "beat":
                self.state = {name: message[name] for name in self.state}
            elif message["kind"] == "hub":
                self.join((message["host"], message["port"]))
            else:
                self.pass_on(message)
                if message["kind"] == "bye":
                    self.leave()

    def leave(self) -> None:
        """The rank has done its part: nobody is watched from here any more."""
        if self.hub is not None and not self.hub.over:
            for rank in range(1, len(self.hosts)):
                self.hub_sends(rank, {"kind": "over"})
        self.done = True

    def rank_ended(self) -> None:
        """The rank's process is no more, without a word; the others have to know."""
        self.pass_on({"kind": "failed", "text": "was killed or crashed", "follows": False})
        self.done = True

    def on_connection(self, listener: socket.socket, _: None) -> None:
        """Somebody came to the hub."""
        connection, _ = listener.accept()
        connection.settimeout(1.0)
        self.selector.register(connection, selectors.EVENT_READ, (self.from_stranger, Lines()))

    def from_stranger(self, connection: socket.socket, lines: Lines) -> None:
        """A connection proves to be a guard's, or is closed."""
        messages = self.read(connection, lines)
        if messages == []:
            return
        hello = messages[0] if messages else {}
        rank = hello.get("rank")
        is_known = hmac.compare_digest(str(hello.get("secret")), self.secret)
        if not is_known or rank not in range(1, len(self.hosts)) or self.hub.ranks[rank].connection is not None:
            if messages is not None:
                self.selector.unregister(connection)
            return connection.close()
        self.hub.ranks[rank].connection = connection
        self.selector.modify(connection, selectors.EVENT_READ, (self.from_guard, (rank, lines)))
        for message in messages[1:]:
            self.hub.take(rank, message, self.now)

    def from_guard(self, connection: socket.socket, known: tuple[int, Lines]) -> None:
        """A guard told the hub something."""
        rank, lines = known
        messages = self.read(connection, lines)
        if messages is None:
            self.hub.ranks[rank].connection = None
            return self.hub.lost(rank)
        for message in messages:
            self.hub.take(rank, message, self.now)

    def from_hub(self, source: socket.socket, lines: Lines) -> None:
        """The hub told this guard something."""
        messages = self.read(source, lines)
        if messages is None:
            self.to_hub = None
            if not self.hub_is_over:
                self.end(1, 0, self.about_head("is gone, with its guard"), is_cut_off=True)
            return
        self.hub_heard = self.now
        for message in messages:
            self.obey(message)

    def obey(self, message: Message) -> None:
        """Do what the hub says."""
        if message["kind"] == "beat":
            self.head_last = message["last"]
        elif message["kind"] == "over":
            self.hub_is_over = True
        elif message["kind"] == "dump":
            self.tell_rank(message)
        elif message["kind"] == "end":
            self.end(message["status"], message["rank"], message["text"])

    # --- what goes out

    def tell(self, connection: socket.socket, message: Message) -> None:
        """Send to a guard; one that cannot be reached is noticed by its silence."""
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(message).encode() + b"\n")

    def tell_rank(self, message: Message) -> None:
        """Write to the rank, which may be gone."""
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(message).encode() + b"\n")

    def pass_on(self, message: Message) -> None:
        """Tell the hub, here or elsewhere."""
        if self.hub is not None:
            self.hub.take(0, message, self.now)
        elif self.to_hub is not None:
            self.tell(self.to_hub, message)

    def hub_sends(self, rank: int, message: Message) -> None:
        """The hub speaks to a guard, maybe to this one."""
        if rank == 0:
            self.obey(message)
        elif self.hub.ranks[rank].connection is not None:
            self.tell(self.hub.ranks[rank].connection, message)

    def about_head(self, text: str) -> str:
        """``text`` about rank 0, as this guard saw it."""
        return f"rank 0 on {self.hosts[0]} {text}; it was last seen at: {self.head_last}"

    # --- the passing of time

    def tick(self) -> None:
        """Tell that this guard lives, look who does not, and end what has to end."""
        if self.now - self.sent >= INTERVAL:
            self.sent = self.now
            self.pass_on({"kind": "beat", "age": self.now - self.rank_heard, **self.state})
            if self.hub is not None:
                for rank in range(1, len(self.hosts)):
                    self.hub_sends(rank, {"kind": "beat", "last": self.state["last"]})
        if os.getppid() != self.pid and not self.done:  # a child of the rank may keep the pipe open
            self.rank_ended()
        elif self.deadline is not None:
            self.finish()
        elif self.hub is not None:
            self.hub.tick(self.now)
        elif self.to_hub is not None and not self.hub_is_over and self.now - self.hub_heard > self.silence:
            silent = f"was not heard of for {self.now - self.hub_heard:.1f} s (a host or link down?)"
            self.end(1, 0, self.about_head(silent), is_cut_off=True)

    def end(self, status: int, rank: int, text: str, *, is_cut_off: bool = False) -> None:
        """Have the rank end; it is killed if it does not. The guard of rank 0 says why on stderr, and so does one that
        had to find out by itself, since the rank may be past speaking."""
        if self.deadline is not None:
            return
        patience = PATIENCE if status == 1 else PATIENCE_INTERRUPTED
        is_deaf = self.now - self.rank_heard > self.silence / 2
        self.deadline = self.now + (0 if is_deaf else patience)
        self.tell_rank({"kind": "end", "status": status, "rank": rank, "text": text})
        if self.rank == 0 or is_cut_off:
            with contextlib.suppress(OSError):
                print(f"dspark: {'error: ' if status == 1 else ''}{text}", file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Once its time is over, a rank that is still there is killed; its number cannot be another process's yet,
        since it is the parent of this one."""
        if self.now < self.deadline:
            return
        if os.getppid() == self.pid:
            os.kill(self.pid, signal.SIGKILL)
        self.done = True


def main() -> None:
    """Guard the process that started this one, as the first line of the input says."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the rank hears them too, and the guard has to see how it ends
    first = b""
    while not first.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return
        first += byte
    Guard(json.loads(first)).run()


if __name__ == "__main__":
    main()
