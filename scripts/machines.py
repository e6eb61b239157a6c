"""Several hosts on one machine, for tests of launchers: network namespaces, and a whole Slurm. Needs root.

Imported by the tests and by ``inject_faults.py``; nothing is left behind when a context ends.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time

SLURM_CONF = """\
ClusterName=dspark
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0
SlurmdParameters=config_overrides
KillWait=5
SwitchType=switch/none
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def missing(*programs: str) -> str | None:
    """Why hosts cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [program for program in programs if shutil.which(program) is None]
    return f"there is no {', '.join(absent)}" if absent else None


HOSTS_NEED = ("ip", "nsenter", "unshare", "mount")
SLURM_NEEDS = ("slurmctld", "slurmd", "munged", "setpriv", "sbatch", "srun", "scontrol", "scancel")


class Hosts:
    """``num_hosts`` network namespaces on a bridge, each with a name and an address of its own on eth0."""

    def __init__(self, num_hosts: int) -> None:
        tag = secrets.token_hex(2)
        self.names = [f"h{tag}{i}" for i in range(num_hosts)]
        net = f"10.{64 + int(tag[:2], 16) // 2}.{int(tag[2:], 16)}"
        self.addresses = [f"{net}.{10 + i}" for i in range(num_hosts)]
        self._bridge, self._gateway = f"b{tag}", f"{net}.1/24"

    def __enter__(self) -> Hosts:
        self._folder = tempfile.TemporaryDirectory()
        self._table = pathlib.Path(self._folder.name) / "hosts"
        rows = ["127.0.0.1 localhost", *map(" ".join, zip(self.addresses, self.names))]
        self._table.write_text("\n".join(rows) + "\n")
        try:
            _ip(f"link add {self._bridge} type bridge", f"addr add {self._gateway} dev {self._bridge}")
            _ip(f"link set {self._bridge} up")
            for name, address in zip(self.names, self.addresses):
                _ip(f"netns add {name}", f"link add v{name} type veth peer name eth0 netns {name}")
                _ip(f"link set v{name} master {self._bridge} up", f"-n {name} addr add {address}/24 dev eth0")
                _ip(f"-n {name} link set lo up", f"-n {name} link set eth0 up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, host: int, command: list[str], **options: object) -> subprocess.Popen:
        """Run ``command`` on a host, where its own name resolves; ``options`` as of ``Popen``."""
        inside = 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"'
        name = self.names[host]
        enter = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount", "bash", "-c", inside, name]
        return subprocess.Popen([*enter, str(self._table), *command], **options)

    def cut_off(self, host: int) -> None:
        """Take the host's link down."""
        _ip(f"link set v{self.names[host]} down")

    def pids(self) -> list[int]:
        """Processes that run on any host."""
        found = [
            subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for name in self.names
        ]
        return [int(pid) for pids in found for pid in pids]

    def __exit__(self, *error: object) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in self.names:
            for command in (f"link del v{name}", f"netns del {name}"):
                subprocess.run(["ip", *command.split()], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)
        self._folder.cleanup()


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)


class Slurm:
    """slurmctld and ``num_nodes`` slurmd on this machine, with a munged of their own. ``environ`` reaches them."""

    def __init__(self, num_nodes: int = 2, cpus: int = 4) -> None:
        self.num_nodes, self._cpus = num_nodes, cpus
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> Slurm:
        self._folder = tempfile.TemporaryDirectory(prefix="slurm-")
        folder, host = pathlib.Path(self._folder.name), socket.gethostname().split(".")[0]
        folder.chmod(0o755)
        ports = free_ports(1 + self.num_nodes)
        nodes = [
            f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus} Sockets=1 "
            f"CoresPerSocket={self._cpus} ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN"
            for i, port in enumerate(ports[1:])
        ]
        for name in ("state", *(f"spool/n{i}" for i in range(self.num_nodes))):
            (folder / name).mkdir(parents=True)
        # Jobs choose ports by their number, so two clusters on one machine must not number them alike.
        text = SLURM_CONF.format(host=host, port=ports[0], folder=folder, nodes="\n".join(nodes))
        (folder / "slurm.conf").write_text(text)
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        try:
            self._munge(folder / "munge")
            self._daemon("slurmctld", "-D", "-c")
            for i in range(self.num_nodes):
                self._daemon("slurmd", "-D", "-N", f"n{i}")
            self._until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _munge(self, folder: pathlib.Path) -> None:
        folder.mkdir()
        key = folder / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        for path in (folder, key):
            shutil.chown(path, "munge", "munge")
        files = [f"--{name}-file={folder / name}" for name in ("key", "pid", "log", "seed")]
        become = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
        self._daemon(*become, "munged", "--foreground", "--force", f"--socket={folder}/munge.sock", *files)

    def _daemon(self, *command: str) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": self.environ}
        self._daemons.append(subprocess.Popen(command, start_new_session=True, **quiet))

    def _until_idle(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            idle = self.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.split()
            if sum(map(int, idle)) == self.num_nodes:
                return
            time.sleep(0.1)
        raise RuntimeError(f"Slurm has not started: {self.run('sinfo', '-N', '-l').stdout}")

    def run(self, *command: str, **options: object) -> subprocess.CompletedProcess:
        """A command of Slurm's, to its end."""
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, **options)

    def submit(self, *command: str, **options: object) -> str:
        """``sbatch`` of ``command``; the job's id."""
        done = self.run("sbatch", "--parsable", *command, **options)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What ``scontrol show job`` says of a job, such as its JobState and ExitCode."""
        words = self.run("scontrol", "show", "job", number, "-o").stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, seconds: float = 500) -> dict[str, str]:
        """The same once the job has ended."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            state = self.job(number)
            if state["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                return state
            time.sleep(0.2)
        raise TimeoutError(f"job {number} still runs after {seconds} s")

    def __exit__(self, *error: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._folder.cleanup()


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens at now."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
