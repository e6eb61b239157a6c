"""The meeting of the ranks of a job: sockets, the key-value store, and who lives on which node."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from .environment import LOOPBACK, LaunchInfo


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at ``host`` ("" for any address) and ``port`` (0 for a free one). Raises ``ValueError``."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"cannot listen on {host or 'any address'}:{port} ({error.strerror}); set MASTER_PORT"
        ) from error
    listener.listen(1024)
    return listener


def outward_address() -> str:
    """An address of this host that other hosts can reach: its name's, unless that is only known as loopback."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = LOOPBACK
    if not address.startswith("127."):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only asks which interface routes outward
            return probe.getsockname()[0]
        except OSError:
            return LOOPBACK


def address_towards(host: str, port: int) -> str:
    """The address of this host that packets to ``host:port`` come from, if others can reach it; else as
    :func:`outward_address`."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        try:
            probe.connect(target)
            address = probe.getsockname()[0]
        except OSError:
            return outward_address()
    return outward_address() if address.startswith("127.") or address == "::1" else address


def open_store(
    host: str, port: int, rank: int, serve: bool, listener: socket.socket | None, limit: datetime.timedelta
) -> dist.Store:
    """The store at ``host:port``, run here when ``serve``, on ``listener`` if one is given.

    Raises ``ValueError`` for a host without address and ``TimeoutError`` when nobody answers within ``limit``.
    """
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"the host {host!r} of rank 0 has no address ({error}); set MASTER_ADDR") from error
    fd = listener.detach() if listener is not None else None  # the store closes it
    try:
        if not serve:
            _until_open(host, port, limit.total_seconds())
        return dist.TCPStore(host, port, is_master=serve, timeout=limit, wait_for_workers=False, master_listen_fd=fd)
    except (RuntimeError, OSError) as error:
        what = "could not run the store" if serve else "could not reach the store of rank 0"
        raise TimeoutError(
            f"rank {rank} {what} at {host}:{port} within {limit.total_seconds():g} s; check MASTER_ADDR and "
            f"MASTER_PORT, and that rank 0 runs ({str(error).splitlines()[0]})"
        ) from error


def _until_open(host: str, port: int, seconds: float) -> None:
    """Return once somebody listens there. The store waits by itself, but so that no signal interrupts it.

    Raises ``OSError``, the last one met, after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((host, port), timeout=max(0.1, min(left, 5.0))).close()
        except OSError:
            if left <= 0:
                raise
        time.sleep(0.1)


def exchange_nodes(world: int, name: str) -> tuple[int, ...]:
    """The node of every world rank, numbered in order of appearance, from each rank's own node name. Collective.

    Names travel as 8-byte digests in one fixed-size all-gather.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    gathered = torch.empty(world, dtype=torch.int64)
    dist.all_gather(list(gathered.chunk(world)), torch.tensor([int.from_bytes(digest, "big", signed=True)]))
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in gathered.tolist())


@contextlib.contextmanager
def _killed_after(seconds: float, text: str) -> Iterator[None]:
    """What is inside may hold the interpreter; after ``seconds``, a child process says ``text`` and kills this one."""
    parent, child = os.getpid(), os.fork()
    if child == 0:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        deadline = time.monotonic() + seconds
        while os.getppid() == parent and time.monotonic() < deadline:
            time.sleep(0.25)
        if os.getppid() == parent:
            os.write(2, text.encode())
            os.kill(parent, signal.SIGKILL)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def agree_by_mpi(info: LaunchInfo, limit: float) -> tuple[LaunchInfo, socket.socket | None]:
    """Local ranks from MPI's shared-memory split; the address and port of rank 0's store by an MPI broadcast.

    The process is killed, with a message, where MPI has not started within ``limit`` seconds: it waits for every rank,
    also for one that has failed already, of which not every mpirun takes notice.
    """
    if None not in (info.master_addr, info.master_port, info.local_rank):
        return info, None
    who = f"dspark: error: rank {info.rank} on {socket.gethostname()}"
    text = (
        f"{who}: MPI did not start within {limit:g} s; are all {info.world} ranks there, or has one of them failed?\n"
    )
    with _killed_after(limit, text):
        return _ask_mpi(info)


def _ask_mpi(info: LaunchInfo) -> tuple[LaunchInfo, socket.socket | None]:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the latter where it finds no MPI library
        raise ValueError(
            "started by mpirun without MASTER_ADDR and MASTER_PORT, which then needs a working mpi4py; install "
            f"dspark[mpi] or export both ({str(error).splitlines()[0]})"
        ) from error
    comm = MPI.COMM_WORLD
    if comm.size != info.world:
        raise ValueError(
            f"mpi4py sees {comm.size} ranks, but mpirun started {info.world}: they belong to different MPI libraries; "
            "use the mpirun of mpi4py's library, or export MASTER_ADDR and MASTER_PORT"
        )
    shared = comm.Split_type(MPI.COMM_TYPE_SHARED)
    info = replace(info, local_rank=shared.rank, local_size=shared.size)
    listener, message = None, bytearray(256)
    if info.rank == 0:
        host = info.master_addr or (LOOPBACK if info.one_node else outward_address())
        listener = listen(LOOPBACK if info.one_node else "", info.master_port or 0)
        text = f"{listener.getsockname()[1]} {host}".encode()
        message[: len(text)] = text
    comm.Bcast([message, MPI.BYTE], root=0)
    port, host = message.rstrip(b"\0").decode().split(" ")
    return replace(info, master_addr=host, master_port=int(port)), listener
