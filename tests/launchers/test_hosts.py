"""torchrun on several hosts, each a network namespace with a name and an address of its own."""

import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "num_hosts, layout",
    [(2, ["--pp", "2"]), (2, ["--dp", "2", "--ep", "2"]), (4, ["--pp", "2", "--dp", "2", "--ep", "2"])],
    ids=lambda value: "-".join(value).replace("--", "") if isinstance(value, list) else f"{value}hosts",
)
def test_layouts_that_cross_hosts_give_the_tokens_of_one_rank(num_hosts, layout, hosts, work):
    with hosts(num_hosts) as running, work.log.open("w") as log:
        nodes = []
        for rank, name in enumerate(running.names):
            place = ["--nodes", str(num_hosts), "--procs", "1", "--node-rank", str(rank), "--interface", "eth0"]
            files = ["--head", running.addresses[0], "--logs", str(work.folder / name)]
            script = ["bash", str(ROOT / "scripts" / "torchrun.sh"), *place, *files, *work.command(*layout)]
            nodes.append(running.start(rank, script, stdout=log, stderr=subprocess.STDOUT))
        assert [node.wait(550) for node in nodes] == [0] * num_hosts, work.log.read_text()[-3000:]
        text = work.log.read_text()
        assert f"{num_hosts} ranks on {num_hosts} nodes" in text
        assert all(f"{name}, cpu, " in text for name in running.names), "hosts, devices and processes are shown"
    work.check()
