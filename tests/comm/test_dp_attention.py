"""Rows between attention ranks and experts: the published table of layouts, and the exchange against plain sums."""

import pytest
import torch
from dspark.comm.dp_attention import Padding, TokenExchange, choose_padding, round_up
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology


@pytest.mark.parametrize(
    "counts,has_prefill,padding,num_rows",
    [
        ([8, 8, 8, 8], False, Padding.MAX_LEN, 32),
        ([8, 0, 0, 0], False, Padding.SUM_LEN, 8),
        ([8, 8, 0, 0], False, Padding.MAX_LEN, 32),
        ([8, 7, 0, 0], False, Padding.SUM_LEN, 15),
        ([10, 5, 3, 2], False, Padding.MAX_LEN, 40),
        ([10, 1, 1, 1], False, Padding.SUM_LEN, 13),
        ([1, 0], False, Padding.MAX_LEN, 2),
        ([16, 16, 4, 4, 4, 4, 0, 0], False, Padding.SUM_LEN, 48),
        ([9, 9, 9, 0, 0, 0, 0, 0], False, Padding.SUM_LEN, 27),
        ([512, 512], True, Padding.SUM_LEN, 1024),
        ([0, 900, 0, 0], True, Padding.SUM_LEN, 900),
        ([7], False, Padding.MAX_LEN, 7),
    ],
)
def test_the_published_table(counts, has_prefill, padding, num_rows):
    assert choose_padding(counts, has_prefill) is padding
    assert (sum(counts) if padding is Padding.SUM_LEN else max(counts) * len(counts)) == num_rows


WIDTH = 5
CASES = [([3, 0, 0, 1], False), ([3, 2, 2, 3], False), ([3, 2, 2, 3], True), ([0, 0, 4, 0], True), ([0] * 4, False)]


def exchange(rank, world, attn_tp):
    """Gathered rows and returned sums of every case against plain maths; the payload bytes of each."""
    groups = Groups.build(Topology(tp=world, dp=world // attn_tp), rank)
    owner, payloads = groups.attn_rows.rank, []
    for counts, has_prefill in CASES:
        counts = counts[: world // attn_tp]
        rows = [torch.arange(1.0, 1 + n * WIDTH).view(n, WIDTH) + 100 * i for i, n in enumerate(counts)]
        groups.reset_traffic()
        step = TokenExchange(groups, counts, has_prefill)
        got = step.start_gather(rows[owner]).wait()
        longest = round_up(max(counts), attn_tp)
        padded = [torch.cat((x, x.new_zeros(longest - len(x), WIDTH))) for x in rows]
        want = torch.cat(rows if step.padding is Padding.SUM_LEN else padded)
        assert torch.equal(got, want), (counts, has_prefill)
        payloads.append(groups.attn_rows.traffic.total().bytes)
        own = len(rows[owner]) if step.padding is Padding.SUM_LEN else longest
        assert payloads[-1] == own * WIDTH * 4
        summed = step.start_scatter_sum(got * (rank + 1))()
        assert torch.equal(summed, rows[owner] * sum(range(1, world + 1)))
    return payloads


@pytest.mark.parametrize("world,attn_tp", [(4, 1), (4, 2), (8, 2)])
def test_gather_and_sum_are_exact(world, attn_tp, run_ranks):
    """Both layouts, idle owners, nobody with a row; every rank of an attention group holds the same rows."""
    found = run_ranks(exchange, world, attn_tp)
    assert all(found[rank] == found[rank - rank % attn_tp] for rank in range(world))
