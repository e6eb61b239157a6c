"""Tensors straight from one rank of a group to another, a batch at a time.

Both ends know shapes and dtypes. Between two ranks, messages arrive in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.groups import Group


class Message(NamedTuple):
    """A contiguous ``tensor`` to or from the rank ``peer`` of the group; what is received is written into it."""

    peer: int
    tensor: Tensor


def exchange(sends: Sequence[Message], receives: Sequence[Message], group: Group) -> None:
    """Send and receive a batch; returns when everything of this rank has left and come.

    Every message has its counterpart in the other rank's batch; ranks without messages need not call. Not for a rank's
    messages to itself. Raises ``RuntimeError`` where a peer is gone or the group's time is over.
    """
    for message in sends:
        num_bytes = message.tensor.nbytes
        crosses = message.peer in group.remote_peers
        group.traffic.add("send", num_bytes, num_bytes, num_bytes if crosses else 0)
    operations = [(dist.isend, message) for message in sends] + [(dist.irecv, message) for message in receives]
    if not operations:
        return
    # Bytes, since some backends refuse some number formats.
    batch = [dist.P2POp(op, _bytes(x), group.ranks[peer], group.pg) for op, (peer, x) in operations]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    device = operations[0][1].tensor.device
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _bytes(x: Tensor) -> Tensor:
    assert x.is_contiguous(), f"a tensor of strides {x.stride()} cannot travel as it is"
    return x.view(-1).view(torch.uint8)
