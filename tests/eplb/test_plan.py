"""Plans: what every placement must satisfy, the published greedy as a floor, and known optima."""

import numpy as np
import pytest
from dspark.eplb.balance import plan, rebalance_experts
from dspark.eplb.baseline import greedy_plan
from dspark.eplb.placement import balance_of, count_copies, load_of_gpus
from dspark.eplb.shape import Shape

# The example that the published balancer's documentation works through: two layers, twelve experts.
EXAMPLE = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ],
    dtype=float,
)


def balance(load, slots, num_gpus):
    """Mean load of a GPU over the largest, per layer, with copies sharing evenly: written from the definition."""
    result = []
    for row, experts in zip(load, slots):
        share = row / np.bincount(experts, minlength=len(row))
        gpus = share[experts].reshape(num_gpus, -1).sum(1)
        result.append(1.0 if gpus.max() == 0 else gpus.mean() / gpus.max())
    return np.array(result)


def random_case(rng):
    num_gpus = int(rng.integers(2, 9))
    num_experts = int(rng.integers(1, 5)) * num_gpus
    num_redundant = int(rng.integers(0, 3)) * num_gpus
    kind = rng.integers(4)
    load = rng.lognormal(0, 1.5, (2, num_experts))
    if kind == 1:
        load = np.floor(load)  # ties and zeros
    elif kind == 2:
        load[:, rng.integers(num_experts)] *= 1e6
    elif kind == 3:
        load[0] = 0
    return load, num_gpus, num_redundant


@pytest.mark.parametrize("seed", range(60))
def test_every_placement_is_legal_and_no_worse_than_the_greedy(seed):
    load, num_gpus, num_redundant = random_case(np.random.default_rng(seed))
    placement = plan(load, num_gpus, num_redundant=num_redundant)
    num_experts = load.shape[1]
    assert placement.slots.shape == (2, num_experts + num_redundant)
    for row in placement.slots:
        counts = np.bincount(row, minlength=num_experts)
        assert counts.min() >= 1 and len(counts) == num_experts
        copies = [len(set(gpu)) for gpu in row.reshape(num_gpus, -1).tolist()]
        # A GPU holds as many different experts as it has slots, or all of them where it has more slots than that.
        assert copies == [min(placement.slots.shape[1] // num_gpus, num_experts)] * num_gpus
    shape = Shape(num_experts, num_experts + num_redundant, num_gpus, 1, 1)
    greedy = greedy_plan(load, shape)
    # The greedy may put two copies of an expert on one GPU, which ours must not.
    fair = [all(len(set(gpu)) == len(gpu) for gpu in row.reshape(num_gpus, -1).tolist()) for row in greedy]
    ours, theirs = balance(load, placement.slots, num_gpus), balance(load, greedy, num_gpus)
    assert (ours >= theirs - 1e-12)[fair].all(), f"seed {seed}: {ours} against {theirs}"


def test_the_same_arguments_give_the_same_plan_on_both_cores():
    load = np.random.default_rng(5).lognormal(0, 0.8, (3, 64))
    plain = plan(load, 16, num_redundant=16, core="plain")
    assert np.array_equal(plain.slots, plan(load, 16, num_redundant=16, core="plain").slots)
    pytest.importorskip("numba")
    assert np.array_equal(plain.slots, plan(load, 16, num_redundant=16, core="compiled").slots)


def test_the_published_example_reaches_its_optimum():
    for groups, nodes, want in ((1, 1, (0.9494, 0.8401)), (4, 2, (0.8551, 0.8050))):
        placement = plan(EXAMPLE, 8, num_redundant=4, num_groups=groups, num_nodes=nodes)
        assert balance(EXAMPLE, placement.slots, 8) == pytest.approx(want, abs=6e-5)


def test_groups_stay_on_one_node():
    placement = plan(EXAMPLE, 8, num_redundant=4, num_groups=4, num_nodes=2)
    for row in placement.slots:
        nodes = [set((half // 3).tolist()) for half in row.reshape(2, -1)]
        assert not nodes[0] & nodes[1], "a group of three experts is split over the nodes"


def test_the_public_call_has_the_public_shapes():
    phy2log, log2phy, logcnt = rebalance_experts(EXAMPLE, 16, 4, 2, 8)
    assert phy2log.shape == (2, 16) and logcnt.shape == (2, 12) and log2phy.shape[:2] == (2, 12)
    assert np.array_equal(logcnt, count_copies(phy2log, 12)) and (logcnt.sum(1) == 16).all()
    for layer in range(2):
        for expert in range(12):
            slots = [slot for slot in log2phy[layer, expert] if slot >= 0]
            assert (phy2log[layer, slots] == expert).all() and len(slots) == logcnt[layer, expert]
    gpus = load_of_gpus(EXAMPLE, phy2log, logcnt, 8)
    assert balance_of(gpus) == pytest.approx(balance(EXAMPLE, phy2log, 8))


@pytest.mark.parametrize(
    ("num_gpus", "num_redundant", "words"),
    [(8, 3, ("15", "8")), (0, 0, ("0",)), (32, 0, ("12", "32"))],
)
def test_sizes_that_cannot_work_are_named(num_gpus, num_redundant, words):
    with pytest.raises(ValueError) as error:
        plan(EXAMPLE, num_gpus, num_redundant=num_redundant)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_loads_that_are_no_loads_are_refused(bad):
    load = EXAMPLE.copy()
    load[1, 3] = bad
    with pytest.raises(ValueError, match="load"):
        plan(load, 8, num_redundant=4)
