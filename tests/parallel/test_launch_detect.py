"""Environments of the launchers, as they were recorded, to launch facts."""

import dataclasses

import pytest
from dspark.parallel.environment import LaunchError
from dspark.parallel.launch import LaunchInfo, detect
from dspark.parallel.slurm import expand_counts, expand_hosts

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.77.0.10",
    "MASTER_PORT": "29512",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
# srun of 4 tasks on 3 nodes (2, 1, 1), task 3, inside a batch job
SRUN = {
    "ENVIRONMENT": "BATCH",
    "SLURM_JOB_ID": "31234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_NNODES": "3",
    "SLURM_JOB_NODELIST": "n[0-2]",
    "SLURM_STEP_NODELIST": "n[0-2]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
    "SLURM_TASKS_PER_NODE": "2,1(x2)",
}
BATCH_SCRIPT = {
    "ENVIRONMENT": "BATCH",
    "SLURM_JOB_ID": "3",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "5",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "n[0-1]",
    "SLURM_TASKS_PER_NODE": "4,1",
}
SALLOC_SHELL = {"SLURM_JOB_ID": "2", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[0-1]"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "11"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}


def test_no_launcher():
    assert detect({"PATH": "/bin", "MASTER_ADDR": "elsewhere"}) == LaunchInfo("single")
    assert detect(SALLOC_SHELL) == LaunchInfo("single")
    assert detect(BATCH_SCRIPT) == LaunchInfo("single")
    assert detect({"RANK": "0", "WORLD_SIZE": "1"}).world == 1


def test_torchrun():
    assert detect(TORCHRUN) == LaunchInfo("torchrun", 5, 8, 1, 4, "1", "10.77.0.10", 29512, True, 2, "run")
    plain = {k: v for k, v in TORCHRUN.items() if not k.startswith("TORCHELASTIC")}
    info = detect(plain)
    assert (info.launcher, info.agent_store, info.attempt, info.one_node) == ("torchrun", False, 0, False)


def test_torchrun_wins_over_what_is_around_it():
    """One task a node runs torchrun: Slurm's and MPI's numbers then count nodes, not ranks."""
    one_task_a_node = {**SRUN, "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    assert detect({**one_task_a_node, **TORCHRUN}) == detect(TORCHRUN)
    assert detect({**OPEN_MPI, **TORCHRUN}) == detect(TORCHRUN)
    assert detect({**BATCH_SCRIPT, **TORCHRUN}) == detect(TORCHRUN)


def test_srun():
    info = detect(SRUN)
    assert info == LaunchInfo("slurm", 3, 4, 0, 1, "2", "n0", 15000 + 31234 % 15000, job="31234.0")
    assert detect({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "77"}).master_addr == "10.0.0.1"
    assert detect({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "77"}).master_port == 77
    other_step, other_job = detect({**SRUN, "SLURM_STEP_ID": "1"}), detect({**SRUN, "SLURM_JOB_ID": "31235"})
    assert len({info.master_port, other_step.master_port, other_job.master_port}) == 3
    assert len({info.job, other_step.job, other_job.job}) == 3
    assert detect({**SRUN, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}) == info
    assert detect({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}) == info


def test_srun_with_only_the_oldest_variables():
    env = {k: v for k, v in SRUN.items() if "STEP" not in k and k not in ("ENVIRONMENT", "SLURM_NPROCS")}
    assert detect(env) == dataclasses.replace(detect(SRUN), job="31234")


def test_a_step_on_one_node_meets_on_loopback():
    """Inside a job of two nodes, a step of one: the step's lists count, not the job's."""
    step = {
        **SRUN,
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    info = detect(step)
    assert (info.master_addr, info.one_node, info.local_size) == ("127.0.0.1", True, 2)


def test_mpi():
    assert detect(MPICH) == LaunchInfo("mpi", 1, 2, 1, 2)
    assert detect(OPEN_MPI) == LaunchInfo("mpi", 3, 4, 1, 2)
    assert detect({"PMI_RANK": "1", "PMI_SIZE": "2"}) == LaunchInfo("mpi", 1, 2, None, None)
    # mpirun inside a Slurm job: Slurm's numbers are those of the batch script, or of mpirun's own helpers
    assert detect({**BATCH_SCRIPT, **OPEN_MPI}) == detect(OPEN_MPI)
    assert detect({**SRUN, "SLURM_PROCID": "0", **MPICH}) == detect(MPICH)


def test_by_hand():
    assert detect(BY_HAND) == LaunchInfo("env", 1, 2, 1, None, None, "::1", 29500)


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    "environ, words",
    [
        (without(TORCHRUN, "WORLD_SIZE"), ["torchrun", "WORLD_SIZE not set"]),
        (without(TORCHRUN, "LOCAL_RANK"), ["LOCAL_RANK not set"]),
        (without(TORCHRUN, "MASTER_PORT"), ["MASTER_PORT not set"]),
        ({**TORCHRUN, "RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK=-1", "whole number"]),
        ({**TORCHRUN, "WORLD_SIZE": "²"}, ["WORLD_SIZE=²"]),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, ["local rank 4", "4 ranks"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, ["9 ranks", "WORLD_SIZE=8"]),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, ["MASTER_PORT=70000"]),
        (without(BY_HAND, "RANK"), ["RANK not set"]),
        (without(BY_HAND, "WORLD_SIZE"), ["WORLD_SIZE not set"]),
        (without(BY_HAND, "LOCAL_RANK"), ["LOCAL_RANK not set"]),
        (without(BY_HAND, "MASTER_ADDR"), ["MASTER_ADDR not set"]),
        ({**SRUN, "WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "SLURM_NTASKS=4", "unset WORLD_SIZE"]),
        ({**SRUN, "RANK": "0"}, ["RANK=0", "SLURM_PROCID=3"]),
        ({**SRUN, "LOCAL_RANK": "3"}, ["LOCAL_RANK=3", "SLURM_LOCALID=0"]),
        (without(SRUN, "SLURM_LOCALID"), ["SLURM_LOCALID not set"]),
        (without(SRUN, "SLURM_PROCID"), ["SLURM_PROCID not set"]),
        (without(SRUN, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), ["SLURM_NTASKS not set"]),
        (without(SRUN, "SLURM_JOB_ID"), ["SLURM_JOB_ID", "not set"]),
        (without(SRUN, "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"), ["SLURM_JOB_NODELIST", "not set"]),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "2"}, ["3 hosts", "SLURM_NNODES=2"]),
        ({**SRUN, "SLURM_NODEID": "3"}, ["SLURM_NODEID=3", "3 hosts"]),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, ["6 tasks", "4 tasks"]),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "two"}, ["'two'"]),
        ({**SRUN, "SLURM_STEP_NODELIST": "n[0-2"}, ["n[0-2", "brackets"]),
        ({**OPEN_MPI, "WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "OMPI_COMM_WORLD_SIZE=4"]),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_RANK"), ["OMPI_COMM_WORLD_RANK not set"]),
        ({**MPICH, "PMI_RANK": "2", "MPI_LOCALRANKID": "0"}, ["PMI_RANK=2", "PMI_SIZE=2"]),
    ],
)
def test_what_is_missing_or_contradicts_is_named(environ, words):
    with pytest.raises(ValueError) as error:
        detect(environ)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "environ, rank, world, address, port",
    [
        (without(TORCHRUN, "LOCAL_RANK"), 5, 8, "10.77.0.10", 29512),
        (without(SRUN, "SLURM_LOCALID"), 3, 4, "n0", 15000 + 31234 % 15000),
        ({**SRUN, "WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "7"}, 3, 4, "h", 7),
        (without(BY_HAND, "WORLD_SIZE"), 1, 2, "::1", 29500),
    ],
)
def test_a_rank_with_a_mistake_may_know_whom_to_tell(environ, rank, world, address, port):
    with pytest.raises(LaunchError) as error:
        detect(environ)
    known = error.value.known
    assert (known.rank, known.world, known.master_addr, known.master_port) == (rank, world, address, port)
    assert known.agent_store == ("TORCHELASTIC_RUN_ID" in environ)


@pytest.mark.parametrize(
    "environ", [without(TORCHRUN, "RANK"), without(BY_HAND, "MASTER_PORT"), OPEN_MPI | {"RANK": "0"}]
)
def test_a_rank_may_know_too_little_to_tell_anybody(environ):
    with pytest.raises(LaunchError) as error:
        detect(environ)
    assert error.value.known is None


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("a[01-03,7],b2", ["a01", "a02", "a03", "a7", "b2"]),
        ("n0", ["n0"]),
        ("n[0-1]", ["n0", "n1"]),
        ("gpu[008-011]-ib", ["gpu008-ib", "gpu009-ib", "gpu010-ib", "gpu011-ib"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("a-b.c,d", ["a-b.c", "d"]),
        ("x[9-11]", ["x9", "x10", "x11"]),
    ],
)
def test_node_lists(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["a[1-", "a]1[", "a[[1]]", "a[3-1]", "a[x]", "a[]", "", "a,,b", "a[1-99999999]", "a[1-999]b[1-999]c[1-999]"],
)
def test_malformed_node_lists(text):
    with pytest.raises(ValueError, match="node list"):
        expand_hosts(text)


def test_task_counts():
    assert expand_counts("8(x2),4") == [8, 8, 4]
    assert expand_counts("3") == [3] and expand_counts("1(x3)") == [1, 1, 1]
    for text in ("", "x2", "4(2)", "4,", "1(x999999999)"):
        with pytest.raises(ValueError, match="tasks per node"):
            expand_counts(text)
