"""Ranks in network namespaces: what the interfaces count is what crosses nodes."""

import pytest
import torch
import torch.distributed as dist
from dspark.parallel.local import run_forked
from dspark.parallel.namespaces import Namespaces, counted_bytes, why_not

torch.set_num_threads(1)
reason = why_not()
pytestmark = pytest.mark.skipif(reason is not None, reason=f"NOT TESTED, bytes between nodes: {reason}")


def _all_to_all(rank):
    """Bytes sent by this node's interface in one all-to-all of 1 MiB for each of 4 ranks."""
    x = torch.ones(4 << 18)
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    dist.barrier()
    before = counted_bytes()
    dist.all_to_all_single(out, x)
    dist.barrier()
    return counted_bytes().sent - before.sent


def test_what_crosses_is_counted_and_the_rest_is_not():
    with Namespaces(2) as nodes:
        sent = run_forked(_all_to_all, 4, nodes=nodes)
    assert all(4 << 20 <= bytes_ <= 1.05 * (4 << 20) for bytes_ in (max(sent[:2]), max(sent[2:]))), sent
    with pytest.raises(RuntimeError, match="ip link set|File exists|Cannot find|tc "):
        with Namespaces(1, rate="nonsense"):
            pass
    with pytest.raises(ValueError, match="no network interface 'none0'"):
        counted_bytes("none0")
