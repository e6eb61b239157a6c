"""Machines to launch on: hosts in network namespaces and a whole Slurm, where root and their programs are at hand."""

import json
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import machines  # noqa: E402

ITEMS = json.loads((ROOT / "tests" / "data" / "models" / "golden.json").read_text())["items"][:3]
NUM_TOKENS = 16


@pytest.fixture(scope="session")
def slurm():
    """Slurm with two nodes of four CPUs."""
    reason = machines.missing(*machines.SLURM_NEEDS)
    if reason:
        pytest.skip(f"no Slurm: {reason}")
    with machines.Slurm(2) as running:
        yield running


@pytest.fixture
def hosts():
    """``hosts(n)``: a context with n hosts."""
    reason = machines.missing(*machines.HOSTS_NEED)
    if reason:
        pytest.skip(f"no hosts: {reason}")
    return machines.Hosts


class Work:
    """The golden prompts as files, the command that decodes them, and whether the result is right."""

    def __init__(self, folder):
        self.folder, self.output, self.log = folder, folder / "out.jsonl", folder / "log"
        lines = [{"id": str(i), "token_ids": item["prompt_ids"]} for i, item in enumerate(ITEMS)]
        (folder / "in.jsonl").write_text("".join(json.dumps({**line, "ignore_eos": True}) + "\n" for line in lines))

    def command(self, *more, num_tokens=NUM_TOKENS):
        files = ["--input", str(self.folder / "in.jsonl"), "--output", str(self.output)]
        return ["generate", *files, "--max-new-tokens", str(num_tokens), *more]

    def check(self):
        results = {one["id"]: one["token_ids"] for one in map(json.loads, self.output.read_text().splitlines())}
        assert results == {str(i): item["output_ids"][:NUM_TOKENS] for i, item in enumerate(ITEMS)}


@pytest.fixture
def work(tmp_path, monkeypatch):
    """One :class:`Work`; the scripts then use the Python of the tests."""
    monkeypatch.setenv("DSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    return Work(tmp_path)
