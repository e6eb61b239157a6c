"""Ranks forked from this process, on this host and the CPU: many layouts in one run without starting anything anew."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .launch import use_interface
from .namespaces import INTERFACE, Namespaces


def run_forked(
    fn: Callable[[int], Any], world: int, timeout: float = 300.0, nodes: Namespaces | None = None
) -> list[Any]:
    """``fn(rank)`` on ``world`` forked gloo ranks; the results by rank, which must be JSON values.

    ``nodes``: namespaces that the ranks are dealt to in equal runs. ``timeout``: seconds that a collective may wait.
    Forking is safe only without CUDA in this process and with one OpenMP thread, now (``ValueError`` otherwise) and at
    all times before. Raises
    ``RuntimeError`` with the traceback of a rank that failed.
    """
    if torch.get_num_threads() != 1:
        raise ValueError(f"{torch.get_num_threads()} threads are in use, but ranks can be forked only with 1")
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _rank_main(fn, rank, world, pathlib.Path(folder), timeout, nodes)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
        replies = [_read(pathlib.Path(folder) / f"rank{rank}.json") for rank in range(world)]
    failed = [f"rank {rank}: {reply['error']}" for rank, reply in enumerate(replies) if "error" in reply]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [reply["value"] for reply in replies]


def _read(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"error": "ended without a result"}


def _rank_main(
    fn: Callable[[int], Any], rank: int, world: int, folder: pathlib.Path, timeout: float, nodes: Namespaces | None
) -> None:
    """The forked rank's whole life; does not return, so that nothing of the parent's runs a second time."""
    status = 1
    try:
        if nodes is not None:
            nodes.enter(rank * nodes.num_nodes // world)
            use_interface(INTERFACE)
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=limit
        )
        reply = {"value": fn(rank)}
        dist.barrier()
        status = 0
    except BaseException:
        reply = {"error": traceback.format_exc()}
    (folder / f"rank{rank}.json").write_text(json.dumps(reply))
    os._exit(status)
