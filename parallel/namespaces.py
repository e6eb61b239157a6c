"""Network namespaces of Linux that pose as nodes: ranks of one host whose traffic really crosses a link.

Every node has its own ``eth0``, an end of a pair whose other end is plugged into one bridge, so what its interface
counts is what crosses nodes, and its link can be slowed. Needs root and the programs ``ip`` and, to slow links, ``tc``.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import shutil
import subprocess
import sys
from types import TracebackType
from typing import NamedTuple

INTERFACE = "eth0"
_CLONE_NEWNET = 0x40000000


class Bytes(NamedTuple):
    """Bytes an interface has sent and received so far, with the headers of its link."""

    sent: int
    received: int


def why_not() -> str | None:
    """Why no namespaces can be made here; None if they can."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, not {sys.platform}"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if shutil.which("ip") is None:
        return "the program ip (iproute2) is missing"
    try:
        with Namespaces(1):
            return None
    except RuntimeError as error:
        return str(error)


class Namespaces:
    """``num_nodes`` namespaces on one bridge, from entering the ``with`` block to leaving it.

    ``rate``: what each node may send, in tc's words (``"200mbit"``); None for as fast as it goes. Raises
    ``RuntimeError`` with the program's own words if something cannot be made.
    """

    def __init__(self, num_nodes: int, rate: str | None = None) -> None:
        tag = f"ds{os.getpid():x}"
        self._bridge, self._names, self._rate = f"{tag}b", [f"{tag}n{node}" for node in range(num_nodes)], rate

    @property
    def num_nodes(self) -> int:
        """How many there are."""
        return len(self._names)

    def __enter__(self) -> Namespaces:
        try:
            self._make()
        except RuntimeError:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _make(self) -> None:
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "link", "set", self._bridge, "up")
        for node, name in enumerate(self._names):
            _run("ip", "netns", "add", name)
            _run(*f"ip link add {name}v type veth peer name {INTERFACE} netns {name}".split())
            _run(*f"ip link set {name}v master {self._bridge} up".split())
            _run(*f"ip -n {name} addr add 10.77.{node // 250}.{node % 250 + 1}/16 dev {INTERFACE}".split())
            _run(*f"ip -n {name} link set lo up".split())
            _run(*f"ip -n {name} link set {INTERFACE} up".split())
            if self._rate is not None:
                shape = f"tc -n {name} qdisc add dev {INTERFACE} root tbf rate {self._rate} burst 256kb latency 400ms"
                _run(*shape.split())

    def _remove(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "link", "del", f"{name}v"], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)

    def enter(self, node: int) -> None:
        """Move this process to ``node``, for good; call it before any socket is opened."""
        handle = os.open(f"/run/netns/{self._names[node]}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns to {self._names[node]}")
        finally:
            os.close(handle)


def counted_bytes(interface: str = INTERFACE) -> Bytes:
    """What ``interface`` of the node this process is on has moved so far."""
    for line in pathlib.Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            columns = numbers.split()
            return Bytes(int(columns[8]), int(columns[0]))
    raise ValueError(f"there is no network interface {interface!r} here")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
