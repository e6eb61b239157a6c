"""torchrun on several hosts, each a network namespace with a name and an address of its own."""

import contextlib
import pathlib
import shutil
import subprocess

import pytest
from dspark.runtime.checkpoint import bundled_model

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@contextlib.contextmanager
def launched(running, work, command):
    """torchrun.sh on every host, with the command that ``command(rank)`` gives: its processes."""
    with running, work.log.open("w") as log:
        nodes = []
        for rank, name in enumerate(running.names):
            place = ["--nodes", str(len(running.names)), "--procs", "1", "--node-rank", str(rank)]
            files = ["--interface", "eth0", "--head", running.addresses[0], "--logs", str(work.folder / name)]
            script = ["bash", str(ROOT / "scripts" / "torchrun.sh"), *place, *files, *command(rank)]
            nodes.append(running.start(rank, script, stdout=log, stderr=subprocess.STDOUT))
        yield nodes


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "num_hosts, layout",
    [(2, ["--pp", "2"]), (2, ["--dp", "2", "--ep", "2"]), (4, ["--pp", "2", "--dp", "2", "--ep", "2"])],
    ids=lambda value: "-".join(value).replace("--", "") if isinstance(value, list) else f"{value}hosts",
)
def test_layouts_that_cross_hosts_give_the_tokens_of_one_rank(num_hosts, layout, hosts, work):
    running = hosts(num_hosts)
    with launched(running, work, lambda rank: work.command(*layout)) as nodes:
        assert [node.wait(550) for node in nodes] == [0] * num_hosts, work.log.read_text()[-3000:]
        text = work.log.read_text()
        assert f"{num_hosts} ranks on {num_hosts} nodes" in text
        assert all(f"{name}, cpu, " in text for name in running.names), "hosts, devices and processes are shown"
    work.check()


@pytest.mark.timeout(600)
def test_a_host_with_another_checkpoint_is_named(hosts, work):
    """One byte of the second host's weights differs."""
    other = work.folder / "model"
    shutil.copytree(bundled_model(), other)
    shard = next(other.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    running, models = hosts(2), (bundled_model(), other)
    with launched(running, work, lambda rank: [*work.command("--pp", "2"), "--model", str(models[rank])]) as nodes:
        assert [node.wait(550) for node in nodes] == [1, 1], "torchrun's own status"
        assert not running.pids()
    text = work.log.read_text()
    assert f"dspark: error: the ranks differ: the checkpoint's digest of rank 1 on {running.names[1]} is " in text
    assert text.count("exitcode  : 2") == 2 and not work.output.exists()
