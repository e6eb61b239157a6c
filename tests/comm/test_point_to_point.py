"""Messages between ranks of a group: contents of every dtype, order, and what is counted."""

import torch
from dspark.comm.point_to_point import Message, exchange
from dspark.parallel.groups import Group, Groups
from dspark.parallel.topology import Topology

TYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8]


def content(source, target, number):
    generator = torch.Generator().manual_seed(100 * source + 10 * target + number)
    return torch.randint(0, 200, (3, 5), generator=generator).to(TYPES[number])


def everyone_to_everyone(rank, world):
    group = Group("tp", tuple(range(world)), rank, torch.distributed.group.WORLD, remote_peers=(world - 1,))
    peers = [peer for peer in range(world) if peer != rank]
    pairs = [(peer, number) for peer in peers for number in range(len(TYPES))]
    sends = [Message(peer, content(rank, peer, number)) for peer, number in pairs]
    receives = [Message(peer, torch.empty(3, 5, dtype=TYPES[number])) for peer, number in pairs]
    exchange(sends, receives, group)
    for (peer, number), message in zip(pairs, receives):
        assert torch.equal(message.tensor.view(torch.uint8), content(peer, rank, number).view(torch.uint8))
    # One pair only; the others have nothing to do.
    part = torch.arange(6.0).view(2, 3)
    exchange([Message(1, part[1])] if rank == 0 else [], [Message(0, part[0].zero_())] if rank == 1 else [], group)
    assert part[0].tolist() == ([3, 4, 5] if rank == 1 else [0, 1, 2])
    each = sum(15 * dtype.itemsize for dtype in TYPES)
    sent = group.traffic["send"]
    assert sent.sent_bytes == each * len(peers) + (12 if rank == 0 else 0)
    assert sent.cross_node_bytes == (each if rank != world - 1 else 0)
    return True


def test_contents_order_and_counts(run_ranks):
    assert run_ranks(everyone_to_everyone, 4) == [True] * 4


def two_connections(rank, world):
    groups = Groups.build(Topology(tp=world, ep=2), rank)
    beside = groups.twin("moe_ep")
    assert beside.ranks == groups.moe_ep.ranks and beside.pg is not groups.moe_ep.pg
    x = torch.full((4,), float(rank))
    exchange([Message(1 - beside.rank, x)], [Message(1 - beside.rank, y := torch.empty(4))], beside)
    assert groups.moe_ep.traffic.total().calls == 0
    return int(y[0])


def test_a_second_group_over_the_same_ranks(run_ranks):
    assert run_ranks(two_connections, 4) == [2, 3, 0, 1]
