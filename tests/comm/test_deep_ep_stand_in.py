"""The stand-in for deep_ep is as strict as the library: each rule, broken once."""

import pytest
import torch
import torch.distributed as dist


def _in_group(rank, world, check, *args):
    check(dist.group.WORLD, *args)
    return True


@pytest.fixture
def ranks(run_ranks, deep_ep):
    """Run a check on two ranks, which are one node."""
    return lambda check, *args: run_ranks(_in_group, 2, check, *args)


def _batch(hidden=2048, count=3, experts=4):
    topk = torch.arange(count * 2).reshape(count, 2) % experts
    return torch.ones(count, hidden, dtype=torch.bfloat16), topk, torch.ones(count, 2)


def _buffer(group, hidden=2048, most=8, experts=4, **changes):
    import deep_ep

    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(most, hidden, group.size(), experts)
    nvl = deep_ep.Buffer.get_dispatch_config(group.size()).get_nvl_buffer_size_hint(2 * hidden, group.size())
    options = {"num_nvl_bytes": nvl, "num_rdma_bytes": hint, "low_latency_mode": True} | changes
    return deep_ep.Buffer(group, **options)


def _normal(buffer, x, topk, weights, **options):
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk, 4)
    return buffer.dispatch(
        x,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        **{"num_tokens_per_rank": per_rank, "topk_idx": topk, "topk_weights": weights} | options,
    )


def _normal_rules(group):
    import deep_ep

    buffer, (x, topk, weights) = _buffer(group), _batch()
    for change, text in (
        ({"x": x.float()}, "float32, not bfloat16"),
        ({"topk": topk.int()}, "int32, not int64"),
        ({"weights": weights.double()}, "float64, not float32"),
        ({"topk": topk * 0}, "names an expert twice"),
        ({"topk": topk + 9}, "out of range"),
        ({"x": x[:, ::2]}, "contiguous"),
    ):
        with pytest.raises(deep_ep.Misuse, match=text):
            _normal(buffer, **{"x": x, "topk": topk, "weights": weights} | change)
    with pytest.raises(deep_ep.Misuse, match="of other tokens"):
        _normal(buffer, x, topk, weights, num_tokens_per_rank=torch.tensor([1, 1], dtype=torch.int32))
    received, ids, got, counts, handle, event = _normal(buffer, x, topk, weights, expert_alignment=4, async_finish=True)
    assert received.isnan().all() and all(count % 4 == 0 for count in counts) and len(handle) == 6
    event.current_stream_wait()
    assert not received.isnan().any() and bool(((ids >= 0) == (got > 0)).all())
    with pytest.raises(deep_ep.Misuse, match="no event"):
        buffer.combine(received, handle)[2].current_stream_wait()
    with pytest.raises(deep_ep.Misuse, match="not a handle"):
        buffer.combine(received, handle[:5])
    small = _buffer(group, num_nvl_bytes=128)
    with pytest.raises(deep_ep.Misuse, match="128 NVLink bytes"):
        _normal(small, x, topk, weights)


def test_rules_of_normal_mode(ranks):
    assert all(ranks(_normal_rules))


def _low_latency_rules(group):
    import deep_ep

    buffer, (x, topk, weights) = _buffer(group), _batch()
    for change, text in (
        ({"most": 3}, "2 ranks x 3 tokens are not a multiple of 4"),
        ({"most": 2}, "3 tokens are more than .* 2"),
        ({"most": 16}, "low latency needs"),
        ({"x": x.float()}, "not bfloat16"),
        ({"x": torch.ones(3, 1024).bfloat16()}, "hidden 1024 is not one of"),
        ({"async_finish": True, "return_recv_hook": True}, "exclude each other"),
        ({"use_ue8m0": True}, "needs round_scale"),
    ):
        call = {"x": x, "topk_idx": topk, "most": 8} | change
        with pytest.raises(deep_ep.Misuse, match=text):
            buffer.low_latency_dispatch(call.pop("x"), call.pop("topk_idx"), call.pop("most"), 4, **call)
    received, counts, handle, event, hook = buffer.low_latency_dispatch(
        x, topk, 8, 4, use_fp8=False, return_recv_hook=True
    )
    assert received.isnan().all() and bool((counts < 0).all())
    hook()
    assert counts.tolist() == ([4, 4] if group.rank() == 0 else [2, 2])
    later = buffer.low_latency_dispatch(x, topk, 8, 4, use_fp8=False, return_recv_hook=True)
    with pytest.raises(deep_ep.Misuse, match="sending while a result is awaited"):
        buffer.low_latency_combine(received, topk, weights, handle)
    later[-1]()
    buffer.low_latency_combine(later[0], topk, weights, later[2])
    received, counts, handle, event, hook = buffer.low_latency_dispatch(
        x, topk, 8, 4, use_fp8=False, return_recv_hook=True
    )
    hook()
    with pytest.raises(deep_ep.Misuse, match="received twice"):
        hook()
    with pytest.raises(deep_ep.Misuse, match="normal mode while"):
        _normal(buffer, x, topk, weights)
    with pytest.raises(deep_ep.Misuse, match="of get_next_low_latency_combine_buffer"):
        buffer.low_latency_combine(received, topk, weights, handle, zero_copy=True)
    combined, _, _ = buffer.low_latency_combine(received, topk, weights, handle)
    assert torch.equal(combined, 2 * x)
    again = buffer.low_latency_dispatch(x, topk, 8, 4, use_fp8=False)
    assert not combined.isnan().any()
    buffer.low_latency_combine(again[0], topk, weights, again[2])  # the second kernel since: the buffer is used again
    assert combined.isnan().all()


def test_rules_of_low_latency(ranks):
    assert all(ranks(_low_latency_rules))


def _two_buffers(group):
    import deep_ep

    buffer, (x, topk, _) = _buffer(group), _batch()
    for _ in range(2):
        buffer.low_latency_dispatch(x, topk, 8, 4, use_fp8=False)
    with pytest.raises(deep_ep.Misuse, match="a third dispatch"):
        buffer.low_latency_dispatch(x, topk, 8, 4, use_fp8=False)


def _dirty(group):
    import deep_ep

    buffer, (x, topk, weights) = _buffer(group), _batch()
    _normal(buffer, x, topk, weights)
    with pytest.raises(deep_ep.Misuse, match="without clean_low_latency_buffer"):
        buffer.low_latency_dispatch(x, topk, 8, 4)
    buffer.clean_low_latency_buffer(8, 2048, 4)
    buffer.low_latency_dispatch(x, topk, 8, 4)


@pytest.mark.parametrize("check", [_two_buffers, _dirty])
def test_results_and_switches_of_low_latency(ranks, check):
    assert all(ranks(check))


def _other_sizes(group):
    import deep_ep

    with pytest.raises(deep_ep.Misuse, match="differs over the ranks"):
        _buffer(group, most=8 + 8 * group.rank())
    with pytest.raises(deep_ep.Misuse, match="not a multiple of 128"):
        deep_ep.Buffer(group, num_nvl_bytes=100)
    with pytest.raises(deep_ep.Misuse, match="not a multiple of 2 MiB"):
        deep_ep.ElasticBuffer(group, num_bytes=100)
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=64, num_topk=2)
    x, topk, weights = _batch(64)
    with pytest.raises(deep_ep.Misuse, match="more than num_max_tokens_per_rank 2"):
        buffer.dispatch(x, topk, weights, num_experts=4, num_max_tokens_per_rank=2)
    with pytest.raises(deep_ep.Misuse, match="needs allocate_on_comm_stream"):
        buffer.dispatch(x, topk, weights, num_experts=4, previous_event=buffer.capture())
    *_, handle, _ = buffer.dispatch(x, topk, weights, num_experts=4)
    with pytest.raises(deep_ep.Misuse, match="a cached handle and topk_idx"):
        buffer.dispatch(x, topk, handle=handle)
    with pytest.raises(deep_ep.Misuse, match="CPU sync with cached"):
        buffer.dispatch(x, handle=handle, do_cpu_sync=True)


def test_rules_of_making_buffers_and_of_elasticbuffer(ranks):
    assert all(ranks(_other_sizes))
