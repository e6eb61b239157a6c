"""The meeting of the ranks of a job: sockets, the key-value store, and who lives on which node."""

from __future__ import annotations

import datetime
import hashlib
import socket

import torch
import torch.distributed as dist

from .launch import LOOPBACK


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
        return dist.TCPStore(host, port, is_master=serve, timeout=limit, wait_for_workers=False, master_listen_fd=fd)
    except RuntimeError as error:
        what = "could not run the store" if serve else "could not reach the store of rank 0"
        raise TimeoutError(
            f"rank {rank} {what} at {host}:{port} within {limit.total_seconds():g} s; check MASTER_ADDR and "
            f"MASTER_PORT, and that rank 0 runs ({str(error).splitlines()[0]})"
        ) from error


def check_in(store: dist.Store, rank: int, world: int, limit: datetime.timedelta) -> None:
    """Wait until every rank is there, so that a missing one is named and not just a time-out in gloo. Collective.

    Raises ``TimeoutError``, on rank 0 with the ranks that did not come.
    """
    keys = [f"here/{peer}" for peer in range(world)]
    store.set(keys[rank], "1")
    seconds = f"{limit.total_seconds():g} s"
    try:
        if rank == 0:
            store.wait(keys, limit)
            store.set("here/all", "1")
        else:
            store.wait(["here/all"], limit)
    except RuntimeError as error:
        if rank:
            raise TimeoutError(f"rank {rank}: rank 0 did not see all {world} ranks within {seconds}") from error
        missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
        raise TimeoutError(f"{len(missing)} of {world} ranks did not start within {seconds}: {missing}") from error


def exchange_nodes(world: int, name: str) -> tuple[int, ...]:
    """The node of every world rank, numbered in order of appearance, from each rank's own node name. Collective.

    Names travel as 8-byte digests in one fixed-size all-gather.
    """
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    gathered = torch.empty(world, dtype=torch.int64)
    dist.all_gather(list(gathered.chunk(world)), torch.tensor([int.from_bytes(digest, "big", signed=True)]))
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in gathered.tolist())
