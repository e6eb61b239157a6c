"""The counting model of dispatchers: worked examples, exact enumeration, published buffer sizes, the command line."""

import itertools
import json

import numpy as np
import pytest
from dspark.runtime.bench.dispatch_model import (
    MODES,
    Cluster,
    Counts,
    Hop,
    expected_copies,
    low_latency_buffer_bytes,
    message_bytes,
    row_bytes,
    seconds,
)
from dspark.runtime.bench.routing_laws import RoutingLaw
from dspark.runtime.cli import main


def copies(counts, mode):
    return [(hop.across, hop.inside, hop.kept) for hop in counts.hops[mode]]


def test_the_worked_example():
    """Two nodes of two ranks, eight experts, all tokens on rank 0: counted by hand."""
    counts = Counts(Cluster(2, 2), 8)
    counts.add(0, np.array([[4, 5, 6], [0, 1, 2], [0, 4, 7], [2, 3, -1]]))
    assert counts.per_rank.tolist() == [2, 2, 2, 2]
    assert counts.per_slot.tolist() == [2, 1, 2, 1, 2, 1, 1, 1]
    assert [(across, inside) for across, inside, _ in copies(counts, "normal")] == [(2, 0), (0, 4)]
    assert copies(counts, "low_latency") == [(5, 3, 3)]
    assert copies(counts, "flat") == [(5, 3, 3)]
    assert copies(counts, "flat_by_rank") == [(4, 2, 2)]
    assert copies(counts, "standard") == [(8, 4, 4)]


def test_no_tokens_and_tokens_without_experts_move_nothing():
    counts = Counts(Cluster(2, 2), 8)
    counts.add(1, np.empty((0, 3), np.int64))
    counts.add(2, np.full((5, 3), -1))
    for mode in ("flat", "flat_by_rank", "normal", "low_latency"):
        assert all(hop == (0, 0, 0) for hop in copies(counts, mode))


@pytest.mark.parametrize(
    "law",
    [
        RoutingLaw(8, 3),
        RoutingLaw(8, 2, num_slots=12),
        RoutingLaw(8, 3, "group_limited", num_groups=4, top_groups=2),
        RoutingLaw(8, 2, "group_limited", num_groups=2, top_groups=1, num_slots=12),
    ],
)
def test_expected_copies_are_those_of_every_possible_token(law):
    """All sets of experts of all sets of groups, with all choices of copies, from every rank."""
    cluster = Cluster(2, 2)
    total = dict.fromkeys(MODES, (0.0, 0.0))
    group_sets = list(itertools.combinations(range(law.num_groups), law.top_groups))
    for groups in group_sets:
        experts = [group * law.group_size + i for group in groups for i in range(law.group_size)]
        sets = list(itertools.combinations(experts, law.top_k))
        for chosen in sets:
            slots = [range(expert, law.num_slots, law.num_experts) for expert in chosen]
            tokens = np.array(list(itertools.product(*slots)))
            for source in range(4):
                counts = Counts(cluster, law.num_slots)
                counts.add(source, tokens)
                share = 1.0 / (4 * len(tokens) * len(sets) * len(group_sets))
                for mode in MODES:
                    across = sum(hop.across for hop in counts.hops[mode])
                    inside = sum(hop.inside for hop in counts.hops[mode])
                    total[mode] = (total[mode][0] + across * share, total[mode][1] + inside * share)
    exact = expected_copies(cluster, law)
    for mode in MODES:
        assert exact[mode] == pytest.approx(total[mode], abs=1e-9), mode


def test_published_means_of_uniform_routing():
    two, four = (expected_copies(Cluster(n, 8), RoutingLaw(256, 8)) for n in (2, 4))
    assert two["normal"][0] == pytest.approx(0.9965, abs=5e-5) and two["low_latency"][0] == 4.0
    assert four["normal"][0] == pytest.approx(2.7107, abs=5e-5) and four["low_latency"][0] == 6.0


@pytest.mark.parametrize("name", ["uniform", "group_limited"])
def test_simulated_copies_come_close_to_the_expected(name):
    cluster, law = Cluster(4, 4), RoutingLaw(64, 6, name, num_groups=8, top_groups=3, num_slots=80)
    counts = Counts.simulate(cluster, law, 2000, seed=3)
    for mode, (across, inside) in expected_copies(cluster, law).items():
        assert sum(hop.across for hop in counts.hops[mode]) / counts.num_tokens == pytest.approx(across, rel=0.01)
        assert sum(hop.inside for hop in counts.hops[mode]) / counts.num_tokens == pytest.approx(inside, rel=0.01)


def test_laws_choose_different_experts_and_keep_to_their_groups():
    rng = np.random.default_rng(0)
    for law in (
        RoutingLaw(16, 6),
        RoutingLaw(16, 6, "skewed", skew=1.5),
        RoutingLaw(16, 4, "group_limited", num_groups=4, top_groups=2),
    ):
        experts = law.draw(500, rng)
        assert experts.min() >= 0 and experts.max() < 16
        assert all(len(set(row)) == law.top_k for row in experts.tolist())
        if law.top_groups > 1:
            assert max(len(set(row)) for row in (experts // 4).tolist()) == 2
    skewed = np.bincount(RoutingLaw(16, 1, "skewed", skew=2.0).draw(20000, rng)[:, 0], minlength=16) / 20000
    weights = np.sort(np.arange(1, 17.0) ** -2)
    assert np.sort(skewed) == pytest.approx(weights / weights.sum(), abs=0.015)
    assert expected_copies(Cluster(2, 2), RoutingLaw(16, 1, "skewed")) is None


@pytest.mark.parametrize(
    "sizes, want",
    [
        ((128, 7168, 256), 1908410496),
        ((128, 4096, 256), 1090521216),
        ((64, 4096, 288), 613419392),
        ((256, 7168, 320), 4771023488),
    ],
)
def test_low_latency_buffers_have_the_published_sizes(sizes, want):
    assert low_latency_buffer_bytes(*sizes) == want


def test_message_sizes():
    assert message_bytes("low_latency", 7168, "fp8", 8) == (7408, 2 * 7168)
    assert message_bytes("low_latency", 4096, "fp8", 6) == (4240, 2 * 4096)
    assert row_bytes(4096, "bfloat16") == 8192 and row_bytes(4096, "float32") == 16384
    with pytest.raises(ValueError, match="hidden size 100 is no multiple of 128"):
        row_bytes(100, "fp8")


def test_time_is_that_of_the_busiest_link():
    cluster = Cluster(2, 2, inside_speed=100.0, across_speed=10.0, latency=0.5)
    hop = Hop(4)
    hop.add(0, np.array([7, 3, 2, 0]), 2)
    hop.add(1, np.array([0, 9, 1, 0]), 2)
    assert hop.kept == 16 and hop.sent_across.tolist() == [2, 1, 0, 0] and hop.received_across.tolist() == [0, 0, 3, 0]
    assert hop.seconds(cluster, 10) == pytest.approx(0.5 + 3 * 10 / 10.0)
    counts = Counts(cluster, 4)
    counts.add(0, np.array([[3], [3]]))  # over the other node's first rank to its second
    times = seconds(counts, "normal", 10, 20)
    assert times["dispatch"] == pytest.approx(0.5 + 2.0 + 0.5 + 0.2)
    assert times["dispatch_pipelined"] == pytest.approx(0.5 + 2.0)
    assert times["combine"] == pytest.approx(0.5 + 4.0 + 0.5 + 0.4)


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: RoutingLaw(8, 9), "top-k 9 of 8 experts"),
        (lambda: RoutingLaw(8, 2, "nearest"), "uniform, skewed, group_limited"),
        (lambda: RoutingLaw(8, 2, num_slots=7), "7 slots cannot hold 8"),
        (lambda: RoutingLaw(8, 2, "group_limited", num_groups=3), "8 experts do not divide into 3"),
        (lambda: RoutingLaw(8, 5, "group_limited", num_groups=4, top_groups=2), "5 is more than the 4 experts"),
        (lambda: Counts(Cluster(2, 8), 24), "24 slots .* do not divide over 16 ranks; .* up to 32"),
    ],
)
def test_sizes_that_do_not_fit_are_named(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def bench(capsys, *flags):
    status = main(["bench", "dispatch", "--simulate", *flags])
    return status, capsys.readouterr()


def test_the_command_line_prints_one_object(capsys):
    status, out = bench(
        capsys, *"--nodes 2 --gpus-per-node 2 --experts 256 --topk 8 --tokens 500 --hidden 512 --json".split()
    )
    result = json.loads(out.out)
    assert status == 0 and set(result) == {*MODES, "setting"}
    assert result["normal"]["remote_copies_per_token"] == pytest.approx(0.9965, abs=0.003)
    assert result["normal"]["remote_copies_per_token_exact"] == pytest.approx(0.9965, abs=5e-5)
    assert result["low_latency"]["remote_copies_per_token"] == pytest.approx(4.0, abs=0.1)
    line = result["low_latency"]
    assert line["dispatch_remote_bytes_per_token"] == pytest.approx(line["remote_copies_per_token"] * (16 + 1024))
    assert sum(hop["remote_copies_per_token"] for hop in line["hops"]) == line["remote_copies_per_token"]
    assert line["buffer_bytes"] == low_latency_buffer_bytes(500, 512, 256)


def test_the_table_holds_every_mode_and_bad_sizes_end_with_status_2(capsys):
    status, out = bench(capsys, "--tokens", "20", "--routing", "skewed", "--sizes", "v4-flash")
    assert status == 0 and [line.split()[0] for line in out.out.splitlines()[2:]] == list(MODES)
    status, out = bench(capsys, "--nodes", "3")
    assert status == 2 and "256 slots" in out.err and "24 ranks" in out.err
    status, out = bench(capsys, "--max-tokens", "4")
    assert status == 2 and "--max-tokens 4" in out.err and "128" in out.err
