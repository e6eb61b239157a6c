"""Counts of expert picks: every row once, whatever the layout, and files that the balancer reads and writes."""

import numpy as np
import pytest
import torch
from dspark.eplb.balance import plan
from dspark.eplb.files import read_loads, write_map
from dspark.eplb.loads import read_windows
from dspark.parallel.topology import Topology
from dspark.runtime import job
from dspark.runtime.cli import main
from dspark.runtime.engine_config import EngineConfig

TOP_K = 2


def recorded(rank, world, placed, folder, topology, dispatcher):
    options = {"dispatcher": dispatcher, "num_redundant_experts": 4, "num_redundant_draft_experts": 4}
    files = {"eplb_record": f"{folder}/target.npz", "eplb_draft_record": f"{folder}/draft.npz"}
    engine = placed.make_engine(topology, rank, draft="dspark", eplb_interval=8, **files, **options)
    run_stage, rows = engine.model.run_stage, []

    def counted(parts, *rest):
        rows.extend(step.tokens.shape[0] for step in parts)
        return run_stage(parts, *rest)

    with engine.keeper.paused():
        placed.run(engine, 3)
    engine.model.run_stage = counted
    placed.run(engine, 12)
    owns = engine.groups.attn_tp.rank == 0 and engine.groups.pp.rank == 0
    return sum(rows) if owns else 0


def recorded_under_cp(rank, world, placed, folder, cp_decode):
    topology = Topology(tp=world, cp=world, ep=world) if world > 1 else None
    files = {"eplb_record": f"{folder}/{world}.npz", "eplb_draft_record": f"{folder}/{world}_draft.npz"}
    engine = placed.make_engine(topology, rank, draft="dspark", cp_decode=cp_decode, **files)
    placed.run(engine, 12)


@pytest.mark.parametrize("cp_decode", ["split", "replicate"])
def test_rows_that_all_context_ranks_have_are_counted_once(run_ranks, placed, tmp_path, cp_decode):
    recorded_under_cp(0, 1, placed, str(tmp_path), cp_decode)
    run_ranks(recorded_under_cp, 2, placed, str(tmp_path), cp_decode, timeout=180)
    for name in ("", "_draft"):
        one, two = (read_windows(tmp_path / f"{world}{name}.npz") for world in (1, 2))
        assert np.array_equal(sum(window.load for window in one), sum(window.load for window in two))


@pytest.mark.parametrize(
    ("dispatcher", "topology"),
    [("normal", Topology(tp=4, dp=2, ep=4)), ("standard", Topology(tp=2, pp=2, dp=2, ep=2))],
    ids=["normal", "standard"],
)
def test_every_row_is_counted_once(run_ranks, placed, tmp_path, dispatcher, topology):
    rows = sum(run_ranks(recorded, 4, placed, str(tmp_path), topology, dispatcher, timeout=180))
    windows = read_windows(tmp_path / "target.npz")
    total = sum(window.load for window in windows)
    assert total.shape == (4, 16) and (total.sum(1) == rows * TOP_K).all()
    assert [window.num_steps for window in windows[:-1]] == [8] * (len(windows) - 1)
    assert windows[-1].map_version.max() > 0, "experts have moved meanwhile"
    for window in windows:
        for layer in np.flatnonzero(window.first_version == window.map_version):
            found = np.bincount(window.slots[layer], window.physical[layer], 16)
            assert np.array_equal(found, window.load[layer])
        assert (window.physical.sum(1) <= window.load.sum(1)).all()
    draft = read_windows(tmp_path / "draft.npz")
    assert draft[0].load.shape == (2, 8) and len(draft) == len(windows)
    assert sum(window.load.sum() for window in draft) > 0
    assert not list(tmp_path.glob(".*part*"))


def from_a_map(rank, world, placed, path):
    options = {"init_expert_location": path, "num_redundant_experts": 4}
    engine = placed.make_engine(Topology(tp=world, ep=world), rank, draft="none", **options)
    return placed.run(engine, 8), [layer.slots.slots for layer in engine.model.expert_layers]


def test_from_counts_to_a_map_to_the_start(run_ranks, placed, tmp_path):
    record = str(tmp_path / "loads.npz")
    ids = placed.run(placed.make_engine(None, 0, draft="none", eplb_record=record), 8)
    placement = plan(read_loads([record]).total(), 2, num_redundant=4)
    write_map(tmp_path / "map.json", placement)
    for found, slots in run_ranks(from_a_map, 2, placed, str(tmp_path / "map.json"), timeout=120):
        assert found == ids
        assert np.array_equal(slots, placement.slots)


def test_maps_that_do_not_fit(placed, tmp_path):
    placement = plan(np.ones((3, 16)), 1)
    write_map(tmp_path / "map.json", placement)
    with pytest.raises(ValueError, match="maps 3 layers of 16 slots, but there are 4 layers of 16 experts"):
        placed.make_engine(None, 0, draft="none", init_expert_location=str(tmp_path / "map.json"))
    with pytest.raises(ValueError, match="--num-redundant-draft-experts is given, but there is no draft"):
        placed.make_engine(None, 0, draft="none", num_redundant_draft_experts=2)


def test_a_map_that_does_not_fit_is_found_before_ranks_meet(tmp_path):
    write_map(tmp_path / "map.json", plan(np.ones((3, 16)), 1))
    config = EngineConfig(init_expert_location=str(tmp_path / "map.json"))
    found = job._Plan(config, lambda world, nodes: Topology.make(world), 2)
    with pytest.raises(ValueError, match="--init-expert-location .* maps 3 layers of 16 slots"):
        found.describe(torch.device("cpu"))


def test_a_record_without_a_place_is_refused_before_weights_are_read(capfd):
    assert main(["generate", "--prompt", "x", "--eplb-record", "/nowhere/at/all.npz"]) == 2
    assert "--eplb-record /nowhere/at/all.npz: there is no folder /nowhere/at" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eplb_record": "loads.json"}, "--eplb-record is 'loads.json'; loads are recorded as .npz"),
        ({"eplb_record": "x.npz", "eplb_draft_record": "x.npz"}, "--eplb-draft-record are both x.npz"),
        ({"eplb_interval": 0}, "--eplb-interval is 0"),
        ({"eplb_threshold": 1.5}, "--eplb-threshold is 1.5"),
        ({"eplb_target": 0.9}, "--eplb-target 0.9 changes nothing without --eplb-interval"),
        ({"eplb_max_moves": 3, "num_redundant_experts": 4}, "--eplb-max-moves 3 changes nothing"),
        ({"deterministic": True, "num_redundant_experts": 4}, "--deterministic shares out experts by columns"),
    ],
)
def test_options_out_of_range(options, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**options).validate()
