"""What the variables of torchrun, Slurm's srun, mpirun or a careful hand say about a process. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .slurm import expand_counts, expand_hosts

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class LaunchInfo:
    """What a launcher says about this process.

    ``local_rank`` and ``local_size`` count the ranks on this process's node; ``node`` names the node, in the launcher's
    own terms. None where the launcher does not say; :func:`init` finds it out. ``agent_store`` tells that torchrun's
    agent already runs the store at ``master_addr:master_port``. ``attempt`` counts restarts. ``job`` tells jobs
    apart that meet at the same place by mistake, where the launcher numbers them.
    """

    launcher: str
    rank: int = 0
    world: int = 1
    local_rank: int | None = 0
    local_size: int | None = 1
    node: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    agent_store: bool = False
    attempt: int = 0
    job: str = ""

    @property
    def one_node(self) -> bool:
        """Whether all ranks are known to be on one node."""
        return self.local_size == self.world


class LaunchError(ValueError):
    """A launcher's variables do not fit together. ``known`` is enough of them to tell the other ranks, or None."""

    def __init__(self, text: str, known: LaunchInfo | None) -> None:
        super().__init__(text)
        self.known = known


class _Variables:
    """Reads and cross-checks environment variables on behalf of one launcher."""

    def __init__(self, environ: Mapping[str, str], launcher: str) -> None:
        self.environ, self.launcher = environ, launcher

    def text(self, *names: str) -> str | None:
        """The first of ``names`` that is set and not empty."""
        return next((self.environ[name] for name in names if self.environ.get(name)), None)

    def need(self, *names: str) -> str:
        value = self.text(*names)
        if value is None:
            raise ValueError(f"started by {self.launcher}, but {' and '.join(names)} not set in the environment")
        return value

    def number(self, *names: str) -> int | None:
        return None if self.text(*names) is None else self.need_number(*names)

    def need_number(self, *names: str) -> int:
        value = self.need(*names)
        if not value.isascii() or not value.isdigit():
            name = next(name for name in names if self.environ.get(name))
            raise ValueError(f"{name}={value} is not a whole number of at least 0")
        return int(value)

    def agree(self, name: str, other: str, expected: int | None) -> None:
        """A variable of another launcher, where it is set at all, must say the same."""
        value = self.number(name)
        if value is not None and expected is not None and value != expected:
            raise ValueError(
                f"{name}={value} contradicts {other}={expected} of {self.launcher}; unset {name} or start with torchrun"
            )

    @property
    def agent_store(self) -> bool:
        """Whether torchrun's agent runs a store."""
        return self.text("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @property
    def attempt(self) -> int:
        """How often torchrun's agent has restarted the ranks."""
        return self.number("TORCHELASTIC_RESTART_COUNT") or 0

    @property
    def job(self) -> str:
        """What only processes of this job have in common."""
        numbers = (self.text("SLURM_JOB_ID", "SLURM_JOBID"), self.text("SLURM_STEP_ID", "SLURM_STEPID"))
        ids = {"torchrun": (self.text("TORCHELASTIC_RUN_ID"),), "srun": numbers}
        return ".".join(number for number in ids.get(self.launcher, ()) if number)

    def port(self) -> int | None:
        port = self.number("MASTER_PORT")
        if port is not None and not 0 < port < 65536:
            raise ValueError(f"MASTER_PORT={port} is outside 1..65535")
        return port


def _checked(info: LaunchInfo, rank_name: str, world_name: str) -> LaunchInfo:
    if info.world < 1 or info.rank >= info.world:
        raise ValueError(f"{rank_name}={info.rank} is not a rank of a job with {world_name}={info.world}")
    if info.local_rank is not None and info.local_size is not None and info.local_rank >= info.local_size:
        raise ValueError(f"the local rank {info.local_rank} is not one of {info.local_size} ranks of this node")
    if info.local_size is not None and info.local_size > info.world:
        raise ValueError(f"{info.local_size} ranks on this node are more than {world_name}={info.world}")
    return info


def launch_info(environ: Mapping[str, str]) -> LaunchInfo:
    """As :func:`.launch.detect`, of any environment."""
    if environ.get("TORCHELASTIC_RUN_ID") or environ.get("GROUP_RANK"):
        return _read(_from_torchrun, _Variables(environ, "torchrun"), "RANK", "WORLD_SIZE")
    if environ.get("OMPI_COMM_WORLD_RANK") or environ.get("OMPI_COMM_WORLD_SIZE"):
        return _read(_from_mpi, _Variables(environ, "mpirun"), "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    # srun speaks PMI too: then both say the same, and Slurm's variables say more.
    slurm = _is_slurm_task(environ)
    same = slurm and environ.get("PMI_RANK") == environ.get("SLURM_PROCID")
    if (environ.get("PMI_RANK") or environ.get("PMI_SIZE")) and not same:
        return _read(_from_mpi, _Variables(environ, "mpirun"), "PMI_RANK", "PMI_SIZE")
    if slurm:
        return _read(_from_slurm, _Variables(environ, "srun"), "SLURM_PROCID", "SLURM_NTASKS")
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return _read(_from_env, _Variables(environ, "RANK and WORLD_SIZE"), "RANK", "WORLD_SIZE")
    return LaunchInfo("single")


def _is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process. A batch script also has a SLURM_PROCID (0), but is no step."""
    if environ.get("SLURM_STEP_ID"):
        return True
    return bool(environ.get("SLURM_PROCID")) and environ.get("ENVIRONMENT") != "BATCH"


_Reader = Callable[["_Variables", str, str], LaunchInfo]


def _read(reader: _Reader, env: _Variables, rank_name: str, world_name: str) -> LaunchInfo:
    try:
        return reader(env, rank_name, world_name)
    except ValueError as error:
        raise LaunchError(str(error), _known(env, rank_name, world_name)) from None


def _known(env: _Variables, rank_name: str, world_name: str) -> LaunchInfo | None:
    """The rank and where rank 0 is, if the variables say at least that."""
    with contextlib.suppress(ValueError):
        rank = env.need_number(rank_name)
        host, port = _slurm_head(env) if rank_name == "SLURM_PROCID" else (env.need("MASTER_ADDR"), env.port())
        world = max(env.number(world_name) or 0, rank + 1, 2)
        if port is not None:
            where = {"master_addr": host, "master_port": port, "agent_store": env.agent_store, "job": env.job}
            return LaunchInfo(env.launcher, rank, world, None, None, attempt=env.attempt, **where)
    return None


def _from_torchrun(env: _Variables, rank_name: str, world_name: str) -> LaunchInfo:
    info = LaunchInfo(
        "torchrun",
        rank=env.need_number(rank_name),
        world=env.need_number(world_name),
        local_rank=env.need_number("LOCAL_RANK"),
        local_size=env.need_number("LOCAL_WORLD_SIZE"),
        node=env.text("GROUP_RANK"),
        master_addr=env.need("MASTER_ADDR"),
        master_port=env.port() or env.need_number("MASTER_PORT"),
        agent_store=env.agent_store,
        attempt=env.attempt,
        job=env.job,
    )
    return _checked(info, rank_name, world_name)


def _from_env(env: _Variables, rank_name: str, world_name: str) -> LaunchInfo:
    rank, world = env.need_number(rank_name), env.need_number(world_name)
    if world == 1:
        return _checked(LaunchInfo("env", rank=rank), rank_name, world_name)
    info = LaunchInfo(
        "env",
        rank=rank,
        world=world,
        local_rank=env.need_number("LOCAL_RANK"),
        local_size=env.number("LOCAL_WORLD_SIZE"),
        master_addr=env.need("MASTER_ADDR"),
        master_port=env.port() or env.need_number("MASTER_PORT"),
    )
    return _checked(info, rank_name, world_name)


def _from_slurm(env: _Variables, rank_name: str, world_name: str) -> LaunchInfo:
    rank, local_rank = env.need_number(rank_name), env.need_number("SLURM_LOCALID")
    world = env.need_number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    node = env.need_number("SLURM_NODEID")
    env.agree("RANK", rank_name, rank)
    env.agree("WORLD_SIZE", world_name, world)
    env.agree("LOCAL_RANK", "SLURM_LOCALID", local_rank)
    hosts = _slurm_hosts(env)
    num_nodes = env.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    if num_nodes is not None and num_nodes != len(hosts):
        raise ValueError(f"the Slurm node list has {len(hosts)} hosts, but SLURM_NNODES={num_nodes}")
    if node >= len(hosts):
        raise ValueError(f"SLURM_NODEID={node} is not one of the {len(hosts)} hosts of the Slurm node list")
    per_node = env.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    tasks = expand_counts(per_node) if per_node else [world] if len(hosts) == 1 else None
    if tasks is not None and (len(tasks) != len(hosts) or sum(tasks) != world):
        raise ValueError(
            f"SLURM_TASKS_PER_NODE={per_node} describes {sum(tasks)} tasks on {len(tasks)} nodes, but there are "
            f"{world} tasks (SLURM_NTASKS) on {len(hosts)} hosts"
        )
    host, port = _slurm_head(env)
    info = LaunchInfo(
        "slurm",
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_size=tasks[node] if tasks else None,
        node=str(node),
        master_addr=host,
        master_port=port,
        job=env.job,
    )
    return _checked(info, rank_name, world_name)


def _slurm_hosts(env: _Variables) -> list[str]:
    return expand_hosts(env.need("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))


def _slurm_head(env: _Variables) -> tuple[str, int]:
    """Where rank 0 is: the step's first host, and a port that every task of the step computes alike and that two jobs
    or steps on one host rarely share."""
    hosts, port = _slurm_hosts(env), env.port()
    if port is None:
        job, step = env.need_number("SLURM_JOB_ID", "SLURM_JOBID"), env.number("SLURM_STEP_ID", "SLURM_STEPID") or 0
        port = 15000 + (job + 997 * step) % 15000
    return env.text("MASTER_ADDR") or (LOOPBACK if len(hosts) == 1 else hosts[0]), port


def _from_mpi(env: _Variables, rank_name: str, world_name: str) -> LaunchInfo:
    rank, world = env.need_number(rank_name), env.need_number(world_name)
    local_rank = env.number("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    env.agree("RANK", rank_name, rank)
    env.agree("WORLD_SIZE", world_name, world)
    env.agree("LOCAL_RANK", "the local rank", local_rank)
    info = LaunchInfo(
        "mpi",
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_size=env.number("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
        master_addr=env.text("MASTER_ADDR"),
        master_port=env.port(),
    )
    return _checked(info, rank_name, world_name)
