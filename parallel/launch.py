"""How this process was started, and the process group that follows from it.

:func:`detect` reads the environment of a launcher (torchrun, Slurm's srun, mpirun, hand-made ``env://`` variables, or
nothing) and is pure; :func:`init` makes the live ``torch.distributed`` job. This is the one library file that looks at
the environment. torch is imported inside the functions that need it: it takes a second, and :func:`detect` serves
commands that never start a job.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .environment import LOOPBACK, LaunchError, LaunchInfo, launch_info
from .journal import Journal
from .monitor import JobEnded, Monitor, Watchdog
from .roll_call import AgreedError, Present

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


def detect(environ: Mapping[str, str] | None = None) -> LaunchInfo:
    """Which launcher started this process, and what it says. Pure; ``environ`` defaults to the process's own.

    torchrun's variables win over those of a Slurm or MPI job around it, mpirun's over those of the Slurm job it was
    started in. Raises :class:`LaunchError`, a ``ValueError`` naming the variable that is missing, malformed, or
    contradicts another; see :func:`report`.
    """
    return launch_info(os.environ if environ is None else environ)


@dataclass(frozen=True)
class Limits:
    """How long a job waits, in seconds.

    ``timeout`` bounds the start and every collective. A rank that dies, fails, stops or cannot be reached ends the job
    within ``failure_timeout`` (None: 15 on CPUs, 60 on GPUs; 0: nobody watches), a step of the model in which nothing
    happens for ``watchdog`` as well.
    """

    timeout: float = 300.0
    failure_timeout: float | None = None
    watchdog: float = 120.0

    def validate(self) -> Limits:
        """The same limits; raises ``ValueError`` naming the one that is out of range."""
        for name, low in (("timeout", 0.1), ("failure_timeout", 2.0), ("watchdog", 1.0)):
            value, flag = getattr(self, name), "--" + name.replace("_", "-")
            may_be_off = name == "failure_timeout" and (value is None or value == 0)
            if not may_be_off and not (type(value) in (int, float) and low <= value <= 1e6):
                off = " (0: nobody watches)" if name == "failure_timeout" else ""
                raise ValueError(f"{flag} is {value!r}; allowed: {low:g} to 1000000 seconds{off}")
        return self


@dataclass(frozen=True)
class Process:
    """This rank of a live job: its launch facts (completed), its device, and the node of every world rank.

    ``store`` is the job's key-value store under a prefix of this attempt; None in a job of one rank, which has no
    process group either. ``present`` are all ranks as they introduced themselves, ``journal`` is what this one does;
    ``monitor`` watches over the job, where there is somebody to watch; ``watchdog`` over a rank that is alone.
    """

    info: LaunchInfo
    device: torch.device
    nodes: tuple[int, ...]
    present: tuple[Present, ...]
    store: dist.Store | None = None
    journal: Journal = field(default_factory=Journal)
    monitor: Monitor | None = None
    watchdog: Watchdog | None = None

    @property
    def rank(self) -> int:
        """This process's world rank."""
        return self.info.rank

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.info.world

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the job. With an ``error`` that only this rank knows of, the job ends for all of them.

        Raises :class:`~.monitor.JobEnded` where it ends for another reason than ``error``.
        """
        verdict, reason = None, error
        while reason is not None and reason.__cause__ is not None:
            reason = reason.__cause__
        if self.monitor is not None:
            if reason is not None and not isinstance(reason, AgreedError):
                verdict = self.monitor.fail(reason)
            self.monitor.leave()
        if self.watchdog is not None:
            self.watchdog.leave()
        if error is None:
            close()
        if verdict is not None and verdict.rank != self.rank:
            raise JobEnded(verdict) from error


def init(
    info: LaunchInfo,
    device: str = "auto",
    limits: Limits = Limits(failure_timeout=0),  # noqa: B008 (frozen)
    describe: Callable[[torch.device], Mapping[str, str]] = lambda device: {},
) -> Process:
    """The live job that ``info`` describes; collective over all its ranks, and nothing to wait for in a job of one.

    ``device``: ``auto`` (CUDA where there is one), ``cpu`` or ``cuda``; it is made current. CUDA jobs move CUDA tensors
    by NCCL and CPU tensors by gloo, others have gloo only. ``describe`` is told the device and says what this rank is
    going to run, which must be the same on all ranks; its ``ValueError`` or ``OSError`` is reported by all of them.
    The store has a prefix per restart, since gloo would else find the addresses of the ranks that died. Raises
    ``ValueError`` for a device, host or port that cannot be used and for ranks that do not agree (before any process
    group is made), ``TimeoutError`` naming ranks that did not come.
    """
    import torch.distributed as dist

    from .rendezvous import agree_by_mpi, exchange_nodes

    assert not dist.is_initialized(), "the process group was already started"
    limits.validate()
    listener = None
    if info.world > 1 and info.launcher == "mpi":
        info, listener = agree_by_mpi(info, limits.timeout)
    if info.world == 1:
        chosen = _choose_device(info, device)
        describe(chosen)
        alone, journal = Present(socket.gethostname(), os.getpid(), str(chosen)), Journal()
        watchdog = None if limits.failure_timeout == 0 else Watchdog(journal, limits.watchdog)
        return Process(info, chosen, (0,), (alone,), journal=journal, watchdog=watchdog)
    fields, chosen, problem = {}, None, None
    try:
        chosen = _choose_device(info, device)
        fields = describe(chosen)
    except (ValueError, OSError) as error:
        problem = error
    store, present = _meet(info, str(chosen), fields, problem, limits, listener)
    journal = Journal()
    monitor = _watch(info, store, present, journal, limits, chosen)
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    limit = datetime.timedelta(seconds=limits.timeout)
    try:
        dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world, timeout=limit)
        nodes = exchange_nodes(info.world, info.node if info.node is not None else socket.gethostname())
    except BaseException as error:
        Process(info, chosen, (), present, monitor=monitor).close(error)
        raise
    info = replace(info, local_size=nodes.count(nodes[info.rank]))
    return Process(info, chosen, nodes, present, store, journal, monitor)


def report(error: LaunchError) -> None:
    """Tell the other ranks, in their :func:`init`, why this one cannot take part, if it can find them in seconds."""
    if error.known is not None:
        with contextlib.suppress(ValueError, TimeoutError):
            _meet(error.known, "none", {}, error, Limits(), None)


def _meet(
    info: LaunchInfo,
    device: str,
    fields: Mapping[str, str],
    problem: Exception | None,
    limits: Limits,
    listener: socket.socket | None,
) -> tuple[dist.Store, tuple[Present, ...]]:
    """The job's store, after the roll call; ``problem`` is why this rank cannot take part."""
    import torch.distributed as dist

    from .rendezvous import listen, open_store
    from .roll_call import roll_call

    # A rank that cannot take part has to say so, but not to wait long for somebody to listen.
    limit = datetime.timedelta(seconds=limits.timeout if problem is None else min(limits.timeout, 5.0))
    if info.one_node:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        if loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    serve = info.rank == 0 and not info.agent_store
    if serve and listener is None and info.master_addr in (LOOPBACK, "localhost"):
        listener = listen(LOOPBACK, info.master_port)
    try:
        raw = open_store(info.master_addr, info.master_port, info.rank, serve, listener, limit)
        store = dist.PrefixStore(f"dspark/{info.job}/attempt{info.attempt}", raw)
        text = None if problem is None else str(problem)
        return store, roll_call(store, info.rank, info.world, device, fields, text, limit)
    except TimeoutError:
        if problem is not None:
            raise problem from None
        raise


def _watch(
    info: LaunchInfo,
    store: dist.Store,
    present: tuple[Present, ...],
    journal: Journal,
    limits: Limits,
    device: torch.device,
) -> Monitor | None:
    from .rendezvous import address_towards

    seconds = limits.failure_timeout
    if seconds is None:
        seconds = 15.0 if device.type == "cpu" else 60.0
    if not seconds:
        return None
    address = LOOPBACK if info.one_node else address_towards(info.master_addr, info.master_port)
    hosts = [one.host for one in present]
    return Monitor.start(store, info.rank, hosts, address, journal, seconds, limits.watchdog)


def close() -> None:
    """End the process group of this process, if there is one. Not collective."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _choose_device(info: LaunchInfo, device: str) -> torch.device:
    import torch

    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"the device {device!r} is none of auto, cpu, cuda")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    # srun and mpirun may show each task only its own GPU; torchrun shows all of them.
    index = 0 if count == 1 and info.launcher in ("slurm", "mpi") else info.local_rank or 0
    if index >= count:
        way_out = f"start at most {count} ranks a node" if count else "choose the device cpu"
        raise ValueError(f"local rank {index} has no GPU: {count} visible here; {way_out}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def use_interface(name: str) -> None:
    """Let gloo speak through the network interface ``name``; call it before the job starts."""
    os.environ["GLOO_SOCKET_IFNAME"] = name
