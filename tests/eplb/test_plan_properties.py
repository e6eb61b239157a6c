"""What holds for any legal input, over thousands of random shapes and loads."""

import numpy as np
import pytest
from dspark.eplb.balance import plan, rebalance_experts
from dspark.eplb.cores import CORES, load_core
from dspark.eplb.placement import Placement, trivial_slots
from dspark.eplb.schedule import Effort
from dspark.eplb.shape import Shape

QUICK = Effort(num_rounds=2, num_cycles=3, num_shakes=1, patience=3)


def cores():
    return [name for name in CORES if name == "plain" or _has_numba()]


def _has_numba():
    try:
        load_core("compiled")
    except ValueError:
        return False
    return True


def random_case(rng, most_gpus=24, most_slots=10):
    """A deployment and loads of every kind of awkwardness."""
    num_gpus, slots_per_gpu = int(rng.integers(1, most_gpus + 1)), int(rng.integers(1, most_slots + 1))
    num_slots = num_gpus * slots_per_gpu
    num_experts = int(rng.integers(min(slots_per_gpu, num_slots), num_slots + 1))
    load = np.exp(rng.normal(0, rng.choice([0.1, 0.8, 2.0, 5.0]), (int(rng.integers(1, 4)), num_experts)))
    kind = rng.integers(0, 7)
    if kind == 1:
        load = rng.integers(0, 4, load.shape).astype(float)
    elif kind == 2:
        load[rng.random(load.shape) < 0.7] = 0
    elif kind == 3:
        load[:, rng.integers(0, num_experts)] *= 1e6
    elif kind == 4:
        load[:] = 7
    elif kind == 5:
        load[0] = 0
    elif kind == 6:
        load = np.floor(load * 2**30)
    return load, num_gpus, num_slots - num_experts


def check(placement, load, shape):
    assert placement.slots.shape == (len(load), shape.num_slots)
    assert (placement.counts >= 1).all() and (placement.counts.sum(1) == shape.num_slots).all()
    assert (placement.num_duplicates == shape.num_forced_copies).all()
    placement.check_groups()


@pytest.mark.parametrize("core", cores())
def test_no_duplicate_no_missing_expert(core):
    seed = 20240
    rng = np.random.default_rng(seed)
    for case in range(2000 if core == "compiled" else 60):
        load, num_gpus, redundant = random_case(rng)
        placement = plan(load, num_gpus, num_redundant=redundant, core=core, effort=QUICK)
        try:
            check(placement, load, Shape(load.shape[1], load.shape[1] + redundant, num_gpus))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, case {case}: {load.shape}, {num_gpus} GPUs, {redundant}") from error


def test_groups_stay_on_their_nodes():
    rng = np.random.default_rng(7)
    for _ in range(150):
        nodes, gpus, groups, size = rng.integers(1, 5), rng.integers(1, 5), rng.integers(1, 4), rng.integers(1, 5)
        num_groups, num_gpus = int(nodes * groups), int(nodes * gpus)
        num_experts = int(num_groups * size)
        per_gpu = int(-(-num_experts // num_gpus) + rng.integers(0, 3))
        per_gpu = min(per_gpu, num_experts // int(nodes))
        if per_gpu * num_gpus < num_experts:
            continue
        load = np.exp(rng.normal(0, 1, (2, num_experts)))
        sizes = {"num_redundant": per_gpu * num_gpus - num_experts, "num_nodes": int(nodes), "num_groups": num_groups}
        placement = plan(load, num_gpus, effort=QUICK, **sizes)
        check(placement, load, placement.shape)


@pytest.mark.skipif(not _has_numba(), reason="numba is not installed")
def test_cores_agree_on_every_slot():
    rng = np.random.default_rng(11)
    for case in range(40):
        load, num_gpus, redundant = random_case(rng)
        efforts = (None if load.shape[1] + redundant > 40 else QUICK, QUICK)
        found = [
            plan(load, num_gpus, num_redundant=redundant, core=core, effort=efforts[case % 2]).slots
            for core in ("plain", "compiled")
        ]
        assert np.array_equal(*found), (case, load.shape, num_gpus, redundant)


@pytest.mark.skipif(not _has_numba(), reason="numba is not installed")
@pytest.mark.parametrize("sizes", [(32, 32), (72, 32), (144, 176), (320, 384), (320, 64), (12, 8)])
def test_cores_agree_on_a_whole_model(model_load, sizes):
    num_gpus, redundant = sizes
    found = [plan(model_load[:6], num_gpus, num_redundant=redundant, core=core).slots for core in CORES]
    assert np.array_equal(*found)


def test_a_layer_does_not_depend_on_the_others(model_load):
    whole = plan(model_load[:5], 72, num_redundant=32).slots
    assert np.array_equal(whole[3:4], plan(model_load[3:4], 72, num_redundant=32).slots)
    assert np.array_equal(whole, plan(model_load[:5] * 1024, 72, num_redundant=32).slots), "the unit does not matter"


def test_one_expert_a_million_times_hotter():
    load = np.ones((1, 16))
    load[0, 5] = 1e6
    for redundant in (8, 48):
        placement = plan(load, 8, num_redundant=redundant)
        assert placement.counts[0, 5] == 8, "one copy on every GPU, no more"
        assert placement.balance(load)[0] > 0.999


def test_idle_layers_keep_experts_in_order():
    load = np.ones((3, 16))
    load[1] = 0
    placement = plan(load, 8, num_redundant=8)
    assert placement.slots[1].tolist() == [*range(16), *range(8)]
    assert placement.num_duplicates.sum() == 0
    assert np.ptp(placement.counts[1]) == 1


def test_mostly_idle_experts():
    load = np.zeros((1, 16))
    load[0, [3, 9]] = 50
    assert plan(load, 8, num_redundant=16).balance(load)[0] > 0.999


def test_more_slots_than_experts_on_a_gpu():
    for num_gpus, experts, redundant in ((1, 16, 8), (8, 1, 15), (2, 3, 9)):
        load = np.arange(1.0, experts + 1)[None]
        placement = plan(load, num_gpus, num_redundant=redundant)
        assert placement.num_duplicates[0] == placement.shape.num_forced_copies > 0
        assert placement.balance(load)[0] == pytest.approx(1)
    assert np.array_equal(trivial_slots(1, Shape(3, 12, 2))[0], [0, 1, 2, 0, 1, 2] * 2)


def test_public_signature(readme_load):
    phy2log, log2phy, logcnt = rebalance_experts(readme_load, 16, 4, 2, 8)
    assert phy2log.shape == (2, 16) and logcnt.shape == (2, 12) and log2phy.shape == (2, 12, logcnt.max())
    assert all(array.dtype == np.int64 for array in (phy2log, log2phy, logcnt))
    for layer in range(2):
        for expert in range(12):
            slots = [slot for slot in log2phy[layer, expert] if slot >= 0]
            assert slots == np.flatnonzero(phy2log[layer] == expert).tolist()
            assert len(slots) == logcnt[layer, expert]
    anywhere = rebalance_experts(readme_load, 16, None, 2, 8)
    assert np.array_equal(anywhere.phy2log, rebalance_experts(readme_load, 16, 1, 1, 8).phy2log)


def test_tensors_in_tensors_out(readme_load):
    torch = pytest.importorskip("torch")
    arrays = rebalance_experts(readme_load, 16, 4, 2, 8)
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        tensors = rebalance_experts(torch.from_numpy(readme_load).to(dtype), 16, 4, 2, 8)
        assert all(torch.is_tensor(one) and one.dtype == torch.int64 for one in tensors)
        assert all(np.array_equal(one.numpy(), two) for one, two in zip(tensors, arrays))


def test_a_placement_says_what_is_wrong_with_it():
    shape = Shape(4, 6, 3)
    with pytest.raises(ValueError, match="layer 0 has no slot for expert 2"):
        Placement(np.array([[0, 1, 3, 0, 1, 3]]), shape)
    with pytest.raises(ValueError, match=r"layer 1, slot 5 holds expert 4, but experts are 0..3"):
        Placement(np.array([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 4]]), shape)
    with pytest.raises(ValueError, match="group 0 on nodes"):
        Placement(np.array([[0, 1, 2, 3]]), Shape(4, 4, 2)).check_groups()
        Placement(np.array([[0, 2, 1, 3]]), Shape(4, 4, 2, 2, 2)).check_groups()
