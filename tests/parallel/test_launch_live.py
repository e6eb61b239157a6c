"""Live jobs: forked ranks without a launcher, torchrun with a rank that dies, mpirun."""

import multiprocessing
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from dspark.parallel import launch
from dspark.parallel.launch import LaunchInfo, Limits


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listening_addresses():
    """Addresses this process listens on, as /proc writes them (IPv4 hexadecimal, byte-swapped)."""
    fds = pathlib.Path("/proc/self/fd")
    links = [os.readlink(fd) for fd in fds.iterdir() if fd.is_symlink() and fd.exists()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [row.split() for name in ("tcp", "tcp6") for row in pathlib.Path(f"/proc/net/{name}").open()]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def _rank(info, timeout, pipe):
    torch.set_num_threads(1)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    try:
        process = launch.init(info, "cpu", Limits(timeout=timeout, failure_timeout=0))
        total = torch.tensor([process.rank + 1])
        dist.all_reduce(total)
        pipe.send((total.item(), process.nodes, process.info.local_size, listening_addresses()))
        dist.barrier()
        process.close()
        process.close()
    except (ValueError, OSError) as error:
        pipe.send((type(error).__name__, str(error)))
    os._exit(0)


def run(infos, timeout=20):
    """Fork one process per launch info; what each sent."""
    context = multiprocessing.get_context("fork")
    pipes, ranks = [], []
    for info in infos:
        receive, send = context.Pipe(duplex=False)
        ranks.append(context.Process(target=_rank, args=(info, timeout, send)))
        ranks[-1].start()
        send.close()
        pipes.append(receive)
    try:
        return [pipe.recv() if pipe.poll(30) else "nothing within 30 s" for pipe in pipes]
    finally:
        for process in ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def infos(world, port, **fields):
    return [
        LaunchInfo(**{"launcher": "env", "rank": rank, "world": world, "local_rank": rank, "local_size": world,
                      "master_addr": "127.0.0.1", "master_port": port} | fields)
        for rank in range(world)
    ]  # fmt: skip


def test_three_ranks_by_hand_meet_and_listen_on_loopback_only():
    for total, nodes, local_size, addresses in run(infos(3, free_port())):
        assert (total, nodes, local_size) == (6, (0, 0, 0), 3)
        if sys.platform == "linux":
            assert addresses == {"0100007F"}, "127.0.0.1 alone"


def test_nodes_are_numbered_as_they_appear_whatever_they_are_called():
    port = free_port()
    named = [infos(4, port, local_size=None, node=name)[rank] for rank, name in enumerate(["b", "a", "b", "c"])]
    results = run(named)
    assert [result[:3] for result in results] == [(10, (0, 1, 0, 2), n) for n in (2, 1, 2, 1)]


def test_a_missing_rank_is_named():
    for kind, text in run(infos(3, free_port())[:2], timeout=2):
        assert kind == "TimeoutError"
        assert text.startswith("1 of 3 ranks did not start within 2 s: [2]; those that did are on ")


def test_a_head_that_is_not_there():
    port = free_port()
    ((kind, text),) = run(infos(2, port)[1:], timeout=1)
    assert kind == "TimeoutError" and f"127.0.0.1:{port}" in text and "MASTER_ADDR" in text
    ((kind, text),) = run(infos(2, port, master_addr="no-such-host.invalid", local_size=None)[1:], timeout=1)
    assert kind == "ValueError" and "no-such-host.invalid" in text


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ((kind, text),) = run(infos(2, port)[:1], timeout=1)
    assert kind == "ValueError" and str(port) in text and "MASTER_PORT" in text


def test_one_rank_needs_no_group():
    process = launch.init(LaunchInfo("single"), "cpu")
    assert (process.rank, process.world, process.nodes, process.store) == (0, 1, (0,), None)
    assert not dist.is_initialized()
    process.close()


def test_devices(monkeypatch):
    with pytest.raises(ValueError, match="'tpu' is none of auto, cpu, cuda"):
        launch.init(LaunchInfo("single"), "tpu")
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert launch._choose_device(infos(8, 1)[3], "auto") == torch.device("cuda", 3)
    with pytest.raises(ValueError, match="local rank 5 has no GPU: 4 visible"):
        launch._choose_device(infos(8, 1)[5], "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="local rank 0 has no GPU: 0 visible here; choose the device cpu"):
        launch._choose_device(infos(8, 1)[0], "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert launch._choose_device(infos(8, 1, launcher="slurm")[3], "cuda").index == 0, "srun bound one GPU to the task"
    assert chosen == [3, 0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launch._choose_device(infos(8, 1)[3], "auto") == torch.device("cpu")


def test_mpi_without_mpi4py_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ValueError, match=r"dspark\[mpi\]"):
        launch.init(LaunchInfo("mpi", 0, 2, 0, 2), "cpu")


SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist
from dspark.parallel.launch import Limits, detect, init
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology
from dspark.comm import collectives

torch.set_num_threads(1)
process = init(detect(), "cpu", Limits(timeout=60, failure_timeout=60))
groups = Groups.build(Topology.make(process.world, nodes=process.nodes), process.rank)
total = collectives.all_reduce(torch.tensor([process.rank + 1]), groups.world).item()
stale = process.store.check(["left behind"])
collectives.barrier(groups.world)
process.store.set("left behind", "1")
if "--die" in sys.argv and process.info.attempt == 0 and process.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
collectives.barrier(groups.world)
i = process.info
line = (f"result {i.launcher} rank {i.rank} of {i.world} local {i.local_rank} of {i.local_size} "
        f"attempt {i.attempt} nodes {process.nodes} total {total} stale {stale}\\n")
os.write(1, line.encode())  # at once: print would let another rank's line in before the line's end
process.close()
"""


def started(tmp_path, *command):
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(SCRIPT))
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [str(script) if part is None else part for part in command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=quiet, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(line for line in done.stdout.splitlines() if line.startswith("result"))


def test_torchrun_restarts_after_a_rank_was_killed(tmp_path):
    """The second attempt must see nothing of the first in the agent's store: gloo's old addresses are there."""
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    lines = started(tmp_path, *torchrun, "--max-restarts=1", None, "--die")
    ranks = [f"rank {r} of 2 local {r} of 2" for r in range(2)]
    assert lines == [f"result torchrun {rank} attempt 1 nodes (0, 0) total 3 stale False" for rank in ranks]


def test_mpirun_does_not_wait_for_ever_for_a_rank_that_failed_before_mpi(tmp_path):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    mpirun = pathlib.Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("there is no mpirun of MPICH, which takes no notice of such ranks")
    ranks = f'[ "$PMI_RANK" = 0 ] || exit 2; exec {sys.executable} -P -m dspark.runtime generate --prompt x --timeout 2'
    command = [str(mpirun), "-n", "2", "bash", "-c", ranks]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode != 0 and "dspark: error: rank 0 on " in done.stderr
    assert "MPI did not start within 2 s; are all 2 ranks there" in done.stderr


def test_mpirun_broadcasts_address_and_port(tmp_path):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    mpirun = pathlib.Path(sys.executable).with_name("mpirun")
    mpirun = str(mpirun) if mpirun.exists() else shutil.which("mpirun")
    if not mpirun:
        pytest.skip("there is no mpirun; the mpich wheel has one")
    lines = started(tmp_path, mpirun, "-n", "2", sys.executable, "-P", None)
    ranks = [f"rank {r} of 2 local {r} of 2" for r in range(2)]
    assert lines == [f"result mpi {rank} attempt 0 nodes (0, 0) total 3 stale False" for rank in ranks]
