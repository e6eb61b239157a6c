"""The newer of the library's two buffers: one kind of call for prefill and decoding."""

import deep_ep_limits as limits
import torch
from deep_ep_parts import (
    EventOverlap,
    check_ranks,
    check_rows,
    check_topk,
    check_weights,
    event_of,
    exchange,
    reduce_rows,
    require,
    round_up,
    same_everywhere,
    share_counts,
    token_in_rank,
)


class EPHandle:
    """What one dispatch leaves for its combine and for dispatches of the same routing."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


class ElasticBuffer:
    """See the library's class of this name."""

    def __init__(
        self,
        group,
        num_bytes=None,
        num_cpu_bytes=0,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        deterministic=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
        prefer_overlap_with_compute=True,
        sl_idx=3,
        num_allocated_qps=0,
        num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100,
        explicitly_destroy=False,
    ):
        self.rank_idx, self.num_ranks, self.group = group.rank(), group.size(), group
        require(self.num_ranks <= limits.ELASTIC_RANKS, f"{self.num_ranks} ranks are more than 1024")
        check_ranks(self.num_ranks)
        require(num_topk <= limits.ELASTIC_TOPK, f"topk {num_topk} is above 32")
        if num_bytes is None:
            require(num_max_tokens_per_rank > 0 and hidden > 0, "neither num_bytes nor MoE sizes")
            flags = (num_topk, use_fp8_dispatch, allow_hybrid_mode, allow_multiple_reduction)
            num_bytes = self.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, *flags)
        require(num_bytes % limits.ELASTIC_ALIGNMENT == 0, f"num_bytes {num_bytes} is not a multiple of 2 MiB")
        self.num_bytes, self.num_max_tokens_per_rank = num_bytes, num_max_tokens_per_rank
        self.deterministic, self.explicitly_destroy = deterministic, explicitly_destroy
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self._fp8, self._destroyed = use_fp8_dispatch, False
        same_everywhere((num_bytes, num_max_tokens_per_rank, hidden, num_topk), group, "the buffer")

    def destroy(self):
        require(self.explicitly_destroy and not self._destroyed, "destroy() without explicitly_destroy, or twice")
        self._destroyed = True

    @staticmethod
    def get_buffer_size_hint(
        group,
        num_max_tokens_per_rank,
        hidden,
        num_topk=0,
        use_fp8_dispatch=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
    ):
        topk = num_topk or limits.ELASTIC_TOPK
        row = hidden * (1 if use_fp8_dispatch else 2) + 12 * topk + (hidden // 32 * 4 if use_fp8_dispatch else 0)
        out = (group.size() + 1) * num_max_tokens_per_rank * row
        planes = min(group.size(), topk) if allow_multiple_reduction else topk
        back = (planes + 1) * num_max_tokens_per_rank * (2 * hidden + 4 * topk)
        return round_up(max(out, back), limits.ELASTIC_ALIGNMENT)

    @staticmethod
    def capture():
        return EventOverlap(lambda: None)

    def get_physical_domain_size(self):
        return max(1, self.num_ranks // limits.NVL_PEERS), min(self.num_ranks, limits.NVL_PEERS)

    def get_logical_domain_size(self):
        return self.get_physical_domain_size() if self.allow_hybrid_mode else (1, self.num_ranks)

    def barrier(self, use_comm_stream=True, with_cpu_sync=False, sequential=True):
        self.group.barrier().wait()

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        cumulative_local_expert_recv_stats=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
        handle=None,
        do_handle_copy=True,
        do_cpu_sync=None,
        do_expand=False,
        do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):
        require(not self._destroyed, "the buffer is destroyed")
        rows, scales = check_rows(x)
        require((scales is not None) <= self._fp8, "fp8 rows, but the buffer was made without use_fp8_dispatch")
        require(not do_zero_padding or do_expand, "do_zero_padding needs do_expand")
        require(not do_expand, "this stand-in does not expand")
        require(previous_event is None or allocate_on_comm_stream, "previous_event needs allocate_on_comm_stream")
        if handle is not None:
            require(topk_idx is None, "a cached handle and topk_idx")
            require(not do_cpu_sync, "Cannot do CPU sync with cached handle")
            topk_idx, num_experts = handle.topk_idx, handle.num_experts
            given = (num_experts, expert_alignment, num_max_tokens_per_rank)
            kept = (handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank)
            require(all(g is None or g == k for g, k in zip(given, kept)), f"the handle is of {kept}, not of {given}")
            expert_alignment, num_max_tokens_per_rank = kept[1:]
            do_cpu_sync = False
        require(num_experts is not None, "num_experts is missing")
        most = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
        alignment = 1 if expert_alignment is None else expert_alignment
        self._check_dispatch(rows, topk_idx, topk_weights, num_experts, most)
        in_rank = token_in_rank(topk_idx, num_experts, self.num_ranks)
        send, order = in_rank.sum(0).tolist(), in_rank.t().nonzero()[:, 1]
        receive = share_counts(send, self.group)
        received = exchange(rows[order], send, receive, self.group)
        local = num_experts // self.num_ranks
        first = torch.arange(self.num_ranks).repeat_interleave(torch.tensor(send))[:, None] * local
        ids = topk_idx[order] - first
        ids = torch.where((ids >= 0) & (ids < local) & (topk_idx[order] >= 0), ids, -1)
        ids = exchange(ids, send, receive, self.group)
        weights = None if topk_weights is None else exchange(topk_weights[order], send, receive, self.group)
        counts = torch.bincount(ids[ids >= 0], minlength=local)
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats += counts.to(torch.int32)
        aligned = [round_up(count, alignment) for count in counts.tolist()]
        if scales is not None:
            received = (received, exchange(scales[order], send, receive, self.group))
        if do_cpu_sync is False and handle is None:
            received, ids, weights = self._without_counts(received, ids, weights, most)
            aligned = []
        if handle is None:
            handle = EPHandle(
                do_expand=False,
                num_experts=num_experts,
                expert_alignment=alignment,
                num_max_tokens_per_rank=most,
                num_sms=num_sms,
                topk_idx=topk_idx.clone() if do_handle_copy else topk_idx,
                num_recv_tokens=ids.shape[0],
                num_recv_tokens_per_expert_list=aligned,
                psum_num_recv_tokens_per_scaleup_rank=torch.tensor(receive).cumsum(0).to(torch.int32),
                psum_num_recv_tokens_per_expert=torch.tensor(
                    [round_up(count, alignment) for count in counts.tolist()]
                ).cumsum(0),
                recv_src_metadata=torch.tensor(receive),
            )
        return received, ids, weights, handle, event_of(async_with_compute_stream, received, ids, weights)

    def _check_dispatch(self, rows, topk_idx, topk_weights, num_experts, most):
        check_topk(topk_idx, num_experts, self.num_ranks)
        require(num_experts <= limits.ELASTIC_EXPERTS, f"{num_experts} experts are more than 2048")
        require(num_experts // self.num_ranks <= limits.ELASTIC_LOCAL_EXPERTS, "more than 256 experts a rank")
        require(topk_idx.shape[0] == rows.shape[0], "topk_idx has another number of tokens")
        require(topk_idx.shape[1] <= limits.ELASTIC_TOPK, f"topk {topk_idx.shape[1]} is above 32")
        if topk_weights is not None:
            check_weights(topk_weights, topk_idx)
        require(rows.shape[0] <= most, f"{rows.shape[0]} tokens are more than num_max_tokens_per_rank {most}")
        same_everywhere((most, num_experts), self.group, "the dispatch")
        flags = (topk_idx.shape[1], self._fp8, self.allow_hybrid_mode, self.allow_multiple_reduction)
        need = self.get_buffer_size_hint(self.group, most, rows.shape[1], *flags)
        require(self.num_bytes >= need, f"{self.num_bytes} bytes; these rows need {need}")

    def _without_counts(self, received, ids, weights, most):
        """The host knows no counts: tensors have the worst size, and what is beyond the real rows is rubbish."""
        missing = most * self.num_ranks - ids.shape[0]
        require(not isinstance(received, tuple), "this stand-in has no fp8 without counts")
        received = torch.cat((received, received.new_full((missing, received.shape[1]), torch.nan)))
        ids = torch.cat((ids, ids.new_full((missing, ids.shape[1]), 1 << 30)))
        if weights is not None:
            weights = torch.cat((weights, weights.new_full((missing, weights.shape[1]), torch.nan)))
        return received, ids, weights

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        num_sms=0,
        num_qps=0,
        previous_event=None,
        previous_event_before_epilogue=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    ):
        require(not self._destroyed, "the buffer is destroyed")
        require(isinstance(handle, EPHandle), "not a handle of dispatch")
        rows, scales = check_rows(x)
        require(scales is None, "combine takes no scales")
        require(previous_event is None or allocate_on_comm_stream, "previous_event needs allocate_on_comm_stream")
        receive = handle.recv_src_metadata.tolist()
        require(rows.shape[0] >= sum(receive), f"{rows.shape[0]} rows to combine, {sum(receive)} were received")
        in_rank = token_in_rank(handle.topk_idx, handle.num_experts, self.num_ranks)
        send = in_rank.sum(0).tolist()
        back = exchange(rows[: sum(receive)], receive, send, self.group)
        several = self.get_logical_domain_size()[0] > 1 and self.allow_multiple_reduction
        combined = reduce_rows(back, in_rank, limits.NVL_PEERS, by_node=several)
        for one in (bias if isinstance(bias, tuple) else (bias,)) if bias is not None else ():
            combined = (combined.float() + one.float()).bfloat16()
        weights = None
        if topk_weights is not None:
            summed = exchange(topk_weights[: sum(receive)], receive, send, self.group)
            weights = torch.zeros((in_rank.shape[0], topk_weights.shape[1]))
            weights.index_add_(0, in_rank.t().nonzero()[:, 1], summed)
        return combined, weights, event_of(async_with_compute_stream, combined, weights)
