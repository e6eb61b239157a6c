"""Shared fixtures: gloo ranks forked from a parent that already has torch imported.

Forking is only safe with one OpenMP thread, so that is set before torch is imported.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import datetime  # noqa: E402
import multiprocessing  # noqa: E402
import pathlib  # noqa: E402
import tempfile  # noqa: E402
import traceback  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

if not torch.cuda.is_available():
    # Read when Triton is imported: its kernels then run on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _rank_main(fn, rank, world, store, timeout, pipe, args, kwargs):
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout),
        )
        result = fn(rank, world, *args, **kwargs)
        pipe.send((True, result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)


def run_forked(fn, world, *args, timeout=60, **kwargs):
    """Run ``fn(rank, world, *args, **kwargs)`` on ``world`` forked gloo ranks; return the results by rank.

    The first failing rank's traceback is raised. No rank outlives the call.
    """
    ctx = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes, ranks = [], []
        for rank in range(world):
            receive, send = ctx.Pipe(duplex=False)
            process = ctx.Process(
                target=_rank_main, args=(fn, rank, world, store, timeout, send, args, kwargs), daemon=True
            )
            process.start()
            send.close()
            pipes.append(receive)
            ranks.append(process)
        results, errors = [None] * world, []
        waiting = dict(enumerate(pipes))
        try:
            while waiting:
                ready = multiprocessing.connection.wait(list(waiting.values()), timeout=timeout)
                if not ready:
                    errors.append(f"ranks {sorted(waiting)} sent nothing for {timeout} s")
                    break
                for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                    try:
                        ok, value = waiting[rank].recv()
                    except EOFError:
                        ok, value = False, "the process ended without a result"
                    del waiting[rank]
                    if ok:
                        results[rank] = value
                    else:
                        errors.append(f"rank {rank}: {value}")
                if errors:
                    break
        finally:
            for process in ranks:
                process.join(timeout=0 if errors else 10)
                if process.is_alive():
                    process.kill()
                    process.join()
        if errors:
            raise AssertionError("\n".join(errors))
        return results


@pytest.fixture
def run_ranks():
    """``run_ranks(fn, world, *args)``: see :func:`run_forked`."""
    return run_forked


@pytest.fixture(scope="session")
def shared():
    """The folder of large oracles beside the checkout; tests that need it skip with a reason where it is absent."""
    folder = ROOT.parent / "shared"
    if not (folder / "oracle").is_dir():
        pytest.skip(f"the oracle folder {folder} is not here")
    return folder
