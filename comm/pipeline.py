"""Activations from one pipeline stage to the next, between ranks with the same place in their stages.

Shapes and dtype are known to both sides, so a message is one tensor. Sends are asynchronous: a blocking send could wait
for a receive that waits for another send. A sent tensor is kept until it has left.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..parallel.groups import Group


class StageLink:
    """The links of one rank to its neighbours in the pipeline ``group``, whose ranks are the stages in order."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sending: tuple[dist.Work, torch.Tensor] | None = None

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self._group.rank

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self._group.size

    @property
    def is_last(self) -> bool:
        """Whether logits are computed here."""
        return self.stage == self.num_stages - 1

    def send(self, x: torch.Tensor) -> None:
        """Start sending ``x`` to the next stage, which must receive it; waits for the send before this one."""
        self.flush()
        x, peer = x.contiguous(), self._group.ranks[self.stage + 1]
        self._group.traffic.add(
            "send", x.nbytes, x.nbytes, x.nbytes if self.stage + 1 in self._group.remote_peers else 0
        )
        self._sending = (dist.isend(x, peer, group=self._group.pg), x)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The next tensor from the stage before, of a shape and dtype that both sides know. Blocks."""
        x = torch.empty(shape, dtype=dtype, device=device)
        self._group.traffic.note("receive", x.nbytes)
        dist.recv(x, self._group.ranks[self.stage - 1], group=self._group.pg)
        return x

    def flush(self) -> None:
        """Wait until what was sent has left."""
        if self._sending is not None:
            self._sending[0].wait()
            self._sending = None
