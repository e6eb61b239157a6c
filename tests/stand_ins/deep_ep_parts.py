"""What both buffers of the stand-in share: errors, events, configs, checks and the exchange of rows."""

import math

import deep_ep_limits as limits
import torch
import torch.distributed as dist


class Misuse(AssertionError):
    """A call that the library forbids."""


def require(condition, text):
    if not condition:
        raise Misuse(text)


class EventOverlap:
    """Waits once for work that is under way; without ``async`` there is no event to wait for."""

    def __init__(self, finish=None):
        self.event = finish

    def current_stream_wait(self):
        require(self.event is not None, "no event: the call was not asynchronous")
        finish, self.event = self.event, lambda: None
        finish()


def spoil(tensor):
    """Make the data unusable: NaN, or -(2^30) in integers."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(127)
    else:
        tensor.fill_(torch.nan if tensor.is_floating_point() else -(1 << 30))


def hide(tensors):
    """Spoil ``tensors`` until the function that this returns is called, once."""
    kept = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        spoil(tensor)
    done = []

    def finish():
        require(not done, "the same result was received twice")
        done.append(True)
        for tensor, value in zip(tensors, kept):
            tensor.copy_(value)

    return finish


def event_of(is_async, *tensors):
    """The event of a call that gave ``tensors``; what is no tensor is passed over."""
    if not is_async:
        return EventOverlap()
    flat = [part for tensor in tensors for part in (tensor if isinstance(tensor, tuple) else (tensor,))]
    return EventOverlap(hide([tensor for tensor in flat if isinstance(tensor, torch.Tensor)]))


class Config:
    """A performance setting and the buffer sizes it needs."""

    def __init__(self, num_sms, nvl_send=6, nvl_recv=256, rdma_send=6, rdma_recv=128):
        self.num_sms, self.nvl_recv, self.rdma_recv = num_sms, nvl_recv, rdma_recv

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        check_ranks(num_ranks)
        rows = self.num_sms // 2 * min(num_ranks, limits.NVL_PEERS) * self.nvl_recv
        return round_up(rows * (hidden_bytes + 8 + 128 * 16), limits.ALIGNMENT)

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        check_ranks(num_ranks)
        if num_ranks <= limits.NVL_PEERS:
            return 0
        rows = self.num_sms // 2 * (num_ranks // limits.NVL_PEERS) * self.rdma_recv
        return round_up(2 * rows * (hidden_bytes + 24 + 128 * 16) + (1 << 20), limits.ALIGNMENT)


def round_up(number, multiple):
    return -(-number // multiple) * multiple


def check_ranks(num_ranks):
    peers = limits.NVL_PEERS
    require(num_ranks < peers or num_ranks % peers == 0, f"{num_ranks} ranks are no whole number of nodes of {peers}")


def check_topk(topk_idx, num_experts, num_ranks):
    require(topk_idx.dtype == torch.int64, f"topk_idx is {topk_idx.dtype}, not int64")
    require(topk_idx.dim() == 2 and topk_idx.is_contiguous(), "topk_idx is not [tokens, topk] and contiguous")
    require(num_experts % num_ranks == 0, f"{num_experts} experts do not divide by {num_ranks} ranks")
    require(bool(((topk_idx >= -1) & (topk_idx < num_experts)).all()), "an expert index is out of range")
    for row in topk_idx.tolist():
        real = [expert for expert in row if expert >= 0]
        require(len(set(real)) == len(real), f"a token names an expert twice: {row}")


def check_weights(weights, topk_idx):
    require(weights.dtype == torch.float32, f"topk_weights is {weights.dtype}, not float32")
    require(weights.shape == topk_idx.shape and weights.is_contiguous(), "topk_weights does not fit topk_idx")


def check_rows(x):
    """``x`` or ``(x, scales)`` as normal dispatch takes it; gives (x, scales or None)."""
    x, scales = x if isinstance(x, tuple) else (x, None)
    require(x.dim() == 2 and x.is_contiguous(), "x is not [tokens, hidden] and contiguous")
    require(x.shape[1] * x.element_size() % 16 == 0, f"a row of {x.shape[1]} x {x.dtype} is not a multiple of 16 bytes")
    if scales is None:
        require(x.dtype == torch.bfloat16, f"x is {x.dtype}, not bfloat16")
        return x, None
    require(x.dtype == torch.float8_e4m3fn, f"x with scales is {x.dtype}, not float8_e4m3fn")
    require(x.shape[1] % 128 == 0, f"hidden {x.shape[1]} is not a multiple of 128")
    require(scales.dtype == torch.float32, f"scales are {scales.dtype}, not float32")
    require(scales.shape == (x.shape[0], x.shape[1] // 128), f"scales {list(scales.shape)} do not fit x")
    return x, scales


def token_in_rank(topk_idx, num_experts, num_ranks):
    """[tokens, ranks] bool."""
    rank = torch.where(topk_idx < 0, num_ranks, topk_idx // (num_experts // num_ranks))
    marks = torch.zeros((topk_idx.shape[0], num_ranks + 1), dtype=torch.bool)
    return marks.scatter_(1, rank, True)[:, :num_ranks].contiguous()


def exchange(x, send, receive, group):
    """All-to-all of rows; any number format travels as bytes."""
    width = math.prod(x.shape[1:]) * x.element_size()
    wire = x.contiguous().view(torch.uint8).reshape(x.shape[0], width)
    out = torch.empty((sum(receive), width), dtype=torch.uint8)
    dist.all_to_all_single(out, wire, receive, send, group=group)
    return out.view(x.dtype).reshape(sum(receive), *x.shape[1:])


def share_counts(send, group):
    """What every rank sends here, from what this rank sends to each."""
    out = torch.empty(len(send), dtype=torch.int64)
    dist.all_to_all_single(out, torch.tensor(send, dtype=torch.int64), group=group)
    return out.tolist()


def same_everywhere(numbers, group, what):
    mine = torch.tensor(numbers, dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    require(all(torch.equal(row, mine) for row in rows), f"{what} differs over the ranks: {[r.tolist() for r in rows]}")


def reduce_rows(received, is_token_in_rank, peers, by_node):
    """Sum rows that came back, in rank order, float32 inside: per node first, rounded, if ``by_node``; bfloat16 out."""
    num_tokens, num_ranks = is_token_in_rank.shape
    node_rows = torch.zeros((num_ranks, num_tokens, received.shape[1]))
    start = 0
    for rank in range(num_ranks):
        places = is_token_in_rank[:, rank].nonzero()[:, 0]
        node_rows[rank, places] = received[start : start + len(places)].float()
        start += len(places)
    if by_node:
        sums = [node_rows[first : first + peers].sum(0).bfloat16().float() for first in range(0, num_ranks, peers)]
        node_rows = torch.stack(sums)
    total = torch.zeros((num_tokens, received.shape[1]))
    for rows in node_rows:
        total += rows
    return total.bfloat16()
