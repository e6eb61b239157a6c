"""The older of the library's two buffers: normal dispatch by layout, and low-latency dispatch into fixed buffers."""

import weakref

import deep_ep_limits as limits
import torch
from deep_ep_parts import (
    Config,
    EventOverlap,
    check_ranks,
    check_rows,
    check_topk,
    check_weights,
    event_of,
    exchange,
    hide,
    reduce_rows,
    require,
    round_up,
    same_everywhere,
    share_counts,
    spoil,
    token_in_rank,
)


class Buffer:
    """See the library's class of this name."""

    num_sms = 20

    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=False,
        enable_shrink=False,
        comm=None,
    ):
        require((group is None) != (comm is None), "either group or comm must be given")
        num_ranks = group.size()
        require(num_nvl_bytes % limits.ALIGNMENT == 0, f"num_nvl_bytes {num_nvl_bytes} is not a multiple of 128")
        require(num_rdma_bytes % limits.ALIGNMENT == 0, f"num_rdma_bytes {num_rdma_bytes} is not a multiple of 128")
        check_ranks(num_ranks)
        most = limits.NVL_PEERS * limits.RDMA_PEERS
        require(low_latency_mode or num_ranks <= most, f"{num_ranks} ranks are more than {most}")
        several = num_ranks > limits.NVL_PEERS
        require(num_rdma_bytes == 0 or several or low_latency_mode, "RDMA bytes without several nodes or low latency")
        require(low_latency_mode or num_rdma_bytes < 1 << 31, "RDMA bytes beyond 2 GiB")
        require(num_nvl_bytes < 1 << 31, "NVLink bytes beyond 2 GiB")
        self.rank, self.group, self.group_size = group.rank(), group, num_ranks
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        if several or low_latency_mode:
            require(num_qps_per_rank > 0, "no queue pairs")
            self.nvshmem_qp_depth = limits.QP_DEPTH
        self._num_qps, self._several = num_qps_per_rank, several
        self._dirty, self._open, self._unread, self._results, self._next = False, 0, 0, [], None
        self._destroyed = False
        same_everywhere((num_nvl_bytes, num_rdma_bytes, low_latency_mode), group, "the buffer")

    def destroy(self):
        require(self.explicitly_destroy and not self._destroyed, "destroy() without explicitly_destroy, or twice")
        self._destroyed = True

    @staticmethod
    def set_num_sms(new_num_sms):
        require(new_num_sms % 2 == 0, "The SM count must be even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture():
        return EventOverlap(lambda: None)

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts):
        rows, scales = num_experts * num_max_dispatch_tokens_per_rank, hidden // 128 * 4
        row = max(16 + 2 * hidden, 16 + hidden + scales, 2 * hidden + scales)
        send = max(num_max_dispatch_tokens_per_rank * (16 + 2 * hidden), rows * (2 * hidden + scales))
        return (2 * (send + rows * row + round_up(4 * num_experts, 128)) + 128) // 128 * 128

    @staticmethod
    def get_dispatch_config(num_ranks):
        require(num_ranks in limits.CONFIG_RANKS, f"Unsupported number of EP ranks: {num_ranks}")
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    # --- normal

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        check_topk(topk_idx, num_experts, self.group_size)
        in_rank = token_in_rank(topk_idx, num_experts, self.group_size)
        per_node = None
        if self._several:
            in_node = in_rank.unflatten(1, (self.group_size // limits.NVL_PEERS, limits.NVL_PEERS)).any(2)
            per_node = in_node.sum(0, dtype=torch.int32)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).to(torch.int32)
        per_rank = in_rank.sum(0, dtype=torch.int32)
        event = event_of(async_finish, per_rank, per_node, per_expert, in_rank)
        return per_rank, per_node, per_expert, in_rank, event

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        rows, scales = check_rows(x)
        self._check_normal(rows, config or self.get_dispatch_config(self.group_size))
        require(num_worst_tokens == 0 or not self._several, "num_worst_tokens is for one node")
        require(not allocate_on_comm_stream or previous_event is not None, "allocate_on_comm_stream without an event")
        if handle is not None:
            require(topk_idx is None and topk_weights is None, "a cached handle and topk")
            in_rank, receive = self._unpack(handle)
        else:
            require(None not in (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert), "no layout")
            require((num_tokens_per_rdma_rank is not None) == self._several, "the node counts do not fit the nodes")
            num_experts = num_tokens_per_expert.shape[0]
            layout = self.get_dispatch_layout(topk_idx, num_experts)
            given = (num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank)
            for want, got in zip(layout, given):
                require(want is None or torch.equal(want, got), "the layout is that of other tokens")
            check_weights(topk_weights, topk_idx)
            in_rank = is_token_in_rank.clone()
            receive = share_counts(in_rank.sum(0).tolist(), self.group)
        require(in_rank.shape == (rows.shape[0], self.group_size), "the handle is of another number of tokens")
        send = in_rank.sum(0).tolist()
        order = in_rank.t().nonzero()[:, 1]

        def move(tensor):
            return exchange(tensor[order], send, receive, self.group)

        received = move(rows) if scales is None else (move(rows), move(scales))
        if handle is not None:
            return received, None, None, None, None, event_of(async_finish, received)
        local = topk_idx[order] - torch.arange(self.group_size).repeat_interleave(torch.tensor(send))[:, None] * (
            num_experts // self.group_size
        )
        mine = (local >= 0) & (local < num_experts // self.group_size) & (topk_idx[order] >= 0)
        local_idx = exchange(torch.where(mine, local, -1), send, receive, self.group)
        weights = exchange(torch.where(mine, topk_weights[order], 0.0), send, receive, self.group)
        counts = torch.bincount(local_idx[local_idx >= 0], minlength=num_experts // self.group_size).tolist()
        counts = [round_up(count, expert_alignment) for count in counts]
        if num_worst_tokens:
            counts = []
            missing = num_worst_tokens - local_idx.shape[0]
            require(missing >= 0, f"{local_idx.shape[0]} tokens are more than num_worst_tokens {num_worst_tokens}")
            local_idx = torch.cat((local_idx, local_idx.new_full((missing, local_idx.shape[1]), -1)))
            weights = torch.cat((weights, weights.new_zeros((missing, weights.shape[1]))))
            received = torch.cat((received, received.new_full((missing, received.shape[1]), torch.nan)))
        event = event_of(async_finish, received, local_idx, weights)
        return received, local_idx, weights, counts, self._pack(in_rank, receive), event

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        rows, scales = check_rows(x)
        require(scales is None, "combine takes no scales")
        self._check_normal(rows, config or self.get_combine_config(self.group_size))
        in_rank, receive = self._unpack(handle)
        require(rows.shape[0] >= sum(receive), f"{rows.shape[0]} rows to combine, {sum(receive)} were received")
        send = in_rank.sum(0).tolist()
        back = exchange(rows[: sum(receive)], receive, send, self.group)
        combined = reduce_rows(back, in_rank, limits.NVL_PEERS, by_node=self._several)
        for one in (bias if isinstance(bias, tuple) else (bias,)) if bias is not None else ():
            combined = (combined.float() + one.float()).bfloat16()
        weights = None
        if topk_weights is not None:
            summed = exchange(topk_weights[: sum(receive)], receive, send, self.group)
            weights = torch.zeros((in_rank.shape[0], topk_weights.shape[1]))
            weights.index_add_(0, in_rank.t().nonzero()[:, 1], summed)
        return combined, weights, event_of(async_finish, combined, weights)

    def _check_normal(self, rows, config):
        require(not self._destroyed, "the buffer is destroyed")
        hidden_bytes = rows.shape[1] * max(rows.element_size(), 2)
        need = config.get_nvl_buffer_size_hint(hidden_bytes, self.group_size)
        require(self.num_nvl_bytes >= need, f"{self.num_nvl_bytes} NVLink bytes; rows of {hidden_bytes} need {need}")
        need = config.get_rdma_buffer_size_hint(hidden_bytes, self.group_size)
        require(self.num_rdma_bytes >= need, f"{self.num_rdma_bytes} RDMA bytes; rows of {hidden_bytes} need {need}")
        require(self._open == 0 and self._unread == 0, "normal mode while a low-latency result is awaited")
        self._dirty = True

    def _pack(self, in_rank, receive):
        counts, unused = torch.tensor(receive), torch.empty(0)
        if self._several:
            return (in_rank, unused, unused, unused, unused, counts, *[unused] * 4)
        return (counts, unused, unused, unused, in_rank, unused)

    def _unpack(self, handle):
        num = 10 if self._several else 6
        require(isinstance(handle, tuple) and len(handle) == num, f"not a handle of dispatch, which has {num} parts")
        in_rank, counts = (handle[0], handle[5]) if self._several else (handle[4], handle[0])
        return in_rank, counts.tolist()

    # --- low latency

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank, hidden, num_experts):
        self._check_size(num_max_dispatch_tokens_per_rank, hidden, num_experts)
        require(self._open == 0 and self._unread == 0, "cleaning while a low-latency result is awaited")
        same_everywhere((num_max_dispatch_tokens_per_rank, hidden, num_experts), self.group, "the cleaned buffer")
        self._dirty = False

    def low_latency_dispatch(
        self,
        x,
        topk_idx,
        num_max_dispatch_tokens_per_rank,
        num_experts,
        cumulative_local_expert_recv_stats=None,
        dispatch_wait_recv_cost_stats=None,
        use_fp8=True,
        round_scale=False,
        use_ue8m0=False,
        async_finish=False,
        return_recv_hook=False,
    ):
        most, hidden = num_max_dispatch_tokens_per_rank, x.shape[1]
        require(x.dtype == torch.bfloat16 and x.dim() == 2 and x.is_contiguous(), f"x is {x.dtype}, not bfloat16 rows")
        self._check_size(most, hidden, num_experts)
        require(hidden % (512 if use_fp8 else 128) == 0, f"hidden {hidden} does not fit fp8 packs")
        check_topk(topk_idx, num_experts, self.group_size)
        require(topk_idx.shape[0] == x.shape[0], "topk_idx has another number of tokens")
        require(x.shape[0] <= most, f"{x.shape[0]} tokens are more than num_max_dispatch_tokens_per_rank {most}")
        require(topk_idx.shape[1] <= limits.LOW_LATENCY_TOPK, f"topk {topk_idx.shape[1]} is above 11")
        require(not use_ue8m0 or round_scale, "use_ue8m0 needs round_scale")
        require(not use_ue8m0, "this stand-in packs no ue8m0 scales")
        same_everywhere((most, hidden, num_experts, use_fp8), self.group, "the low-latency call")
        self._begin(async_finish, return_recv_hook)
        self._open += 1
        require(self._open <= 2, "a third dispatch before the first was combined: there are two buffers")
        out = self._low_latency_out(x, topk_idx, most, num_experts, use_fp8)
        received, counts, handle = out
        self._results.append([weakref.ref(t) for t in (received if use_fp8 else (received,))])
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats += counts
        parts = (*received, counts) if use_fp8 else (received, counts)
        event, hook = self._deliver(parts, async_finish, return_recv_hook)
        return received, counts, handle, event, hook

    def _low_latency_out(self, x, topk_idx, most, num_experts, use_fp8):
        ranks, local = self.group_size, num_experts // self.group_size
        token, slot = (topk_idx >= 0).nonzero(as_tuple=True)
        expert = topk_idx[token, slot]
        order = torch.argsort(expert, stable=True)
        token, slot, expert = token[order], slot[order], expert[order]
        send = torch.bincount(expert // local, minlength=ranks).tolist()
        receive = share_counts(send, self.group)
        rows = exchange(x[token], send, receive, self.group)
        info = exchange(torch.stack((expert % local, token, slot), 1), send, receive, self.group)
        source = torch.arange(ranks).repeat_interleave(torch.tensor(receive))
        packed = torch.full((local, ranks * most, x.shape[1]), torch.nan, dtype=torch.bfloat16)
        src_info = torch.full((local, ranks * most, 3), -1, dtype=torch.int64)
        layout = torch.zeros((local, ranks, 2), dtype=torch.int64)
        counts = torch.zeros(local, dtype=torch.int32)
        blocks = [(rank + 1) % ranks for rank in range(ranks)]  # sources in any order but their own
        for e in range(local):
            begin = 0
            for rank in blocks:
                mine = ((info[:, 0] == e) & (source == rank)).nonzero()[:, 0]
                packed[e, begin : begin + len(mine)] = rows[mine]
                src_info[e, begin : begin + len(mine), 0] = rank
                src_info[e, begin : begin + len(mine), 1:] = info[mine, 1:]
                layout[e, rank] = torch.tensor((len(mine), begin))
                begin += len(mine)
            counts[e] = begin
        handle = (src_info, layout, most, x.shape[1], num_experts)
        if not use_fp8:
            return packed, counts, handle
        blocks = packed.float().view(local, ranks * most, -1, 128)
        scales = blocks.abs().amax(3).clamp(min=1e-4) / 448.0
        quantised = (blocks / scales.unsqueeze(3)).nan_to_num().to(torch.float8_e4m3fn).view(packed.shape)
        return (quantised, scales.transpose(1, 2).contiguous().transpose(1, 2)), counts, handle

    def low_latency_combine(
        self,
        x,
        topk_idx,
        topk_weights,
        handle,
        use_logfmt=False,
        zero_copy=False,
        async_finish=False,
        return_recv_hook=False,
        out=None,
        combine_wait_recv_cost_stats=None,
    ):
        require(isinstance(handle, tuple) and len(handle) == 5, "not a handle of low_latency_dispatch")
        src_info, layout, most, hidden, num_experts = handle
        local, ranks = num_experts // self.group_size, self.group_size
        require(not (zero_copy and use_logfmt), "zero_copy and use_logfmt exclude each other")
        require(not zero_copy or x is self._next, "zero_copy without the buffer of get_next_low_latency_combine_buffer")
        require(x.dtype == torch.bfloat16, f"x is {x.dtype}, not bfloat16")
        require(x.shape == (local, ranks * most, hidden) and x.is_contiguous(), f"x has the shape {list(x.shape)}")
        check_topk(topk_idx, num_experts, ranks)
        check_weights(topk_weights, topk_idx)
        require(self._open > 0, "combine without a dispatch")
        self._begin(async_finish, return_recv_hook)
        self._open -= 1
        # Row ``(rank, token, slot)`` of each source goes back to it.
        valid = src_info[:, :, 0] >= 0
        meta, rows = src_info[valid], x[valid]
        order = torch.argsort(meta[:, 0], stable=True)
        send = torch.bincount(meta[:, 0], minlength=ranks).tolist()
        receive = share_counts(send, self.group)
        rows = exchange(rows[order], send, receive, self.group)
        places = exchange(meta[order, 1:].contiguous(), send, receive, self.group)
        slots = torch.zeros((*topk_idx.shape, hidden))
        slots[places[:, 0], places[:, 1]] = rows.float()
        total = torch.zeros((topk_idx.shape[0], hidden))
        for slot in range(topk_idx.shape[1]):
            weight = torch.where(topk_idx[:, slot] >= 0, topk_weights[:, slot], 0.0)
            total += slots[:, slot] * weight[:, None]
        combined = total.bfloat16() if out is None else out.copy_(total)
        self._results.append([weakref.ref(combined)])
        event, hook = self._deliver((combined,), async_finish, return_recv_hook)
        return combined, event, hook

    def get_next_low_latency_combine_buffer(self, handle):
        _, _, most, hidden, num_experts = handle
        shape = (num_experts // self.group_size, self.group_size * most, hidden)
        self._next = torch.full(shape, torch.nan, dtype=torch.bfloat16)
        return self._next

    def _check_size(self, most, hidden, num_experts):
        require(self.low_latency_mode, "the buffer was not made for low latency")
        require(not self._destroyed, "the buffer is destroyed")
        require(hidden in limits.LOW_LATENCY_HIDDEN, f"hidden {hidden} is not one of {limits.LOW_LATENCY_HIDDEN}")
        require(num_experts % self.group_size == 0, f"{num_experts} experts do not divide by {self.group_size} ranks")
        require(most <= limits.LOW_LATENCY_TOKENS, f"{most} tokens a rank are more than 1024")
        require(self.nvshmem_qp_depth >= 2 * (most + 1), f"queue depth {self.nvshmem_qp_depth} is below 2 ({most} + 1)")
        require(self.group_size * most % 4 == 0, f"{self.group_size} ranks x {most} tokens are not a multiple of 4")
        local = num_experts // self.group_size
        require(self._num_qps >= local, f"{self._num_qps} queue pairs a rank for {local} local experts")
        need = self.get_low_latency_rdma_size_hint(most, hidden, self.group_size, num_experts)
        require(self.num_rdma_bytes >= need, f"{self.num_rdma_bytes} RDMA bytes; low latency needs {need}")

    def _begin(self, async_finish, return_recv_hook):
        """A kernel that uses the next of the two buffers: what the kernel before the last gave is overwritten."""
        require(not (async_finish and return_recv_hook), "async_finish and return_recv_hook exclude each other")
        require(self._unread == 0, "sending while a result is awaited: the flags of the other buffer are cleared")
        require(not self._dirty, "low latency after normal mode without clean_low_latency_buffer")
        if len(self._results) == 2:
            for reference in self._results.pop(0):
                tensor = reference()
                if tensor is not None:
                    spoil(tensor)

    def _deliver(self, parts, async_finish, return_recv_hook):
        """Results now, or hidden until the event or the hook was waited for."""
        if not (async_finish or return_recv_hook):
            return EventOverlap(), None
        self._unread += 1
        show = hide(parts)

        def finish():
            show()
            self._unread -= 1

        return (EventOverlap(finish), None) if async_finish else (EventOverlap(), finish)
