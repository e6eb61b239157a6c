"""The recorder: counts of slots and experts, the map in force, windows, dumps."""

import numpy as np
import pytest
from dspark.eplb.files import read_loads
from dspark.eplb.loads import LoadRecorder, read_windows
from dspark.eplb.placement import Placement
from dspark.eplb.shape import Shape


@pytest.fixture
def recorder():
    return LoadRecorder(Placement(np.array([[0, 1, 2, 0], [2, 1, 0, 1]]), Shape(3, 4, 2)), num_windows=2)


def test_slots_become_experts(recorder):
    recorder.count(0, np.array([5, 1, 2, 7]))
    recorder.count(0, np.array([1, 0, 0, 1]))
    recorder.count(1, np.array([4, 4, 4, 4]))
    recorder.end_step()
    window = recorder.close()
    assert window.load.tolist() == [[14, 1, 2], [4, 8, 4]]
    assert window.physical.tolist() == [[6, 1, 2, 8], [4, 4, 4, 4]]
    assert window.num_steps == 1 and window.map_version.tolist() == [0, 0]


def test_a_map_that_changes_within_a_window(recorder):
    """The counts before the change belong to the experts of the old map, those after it to the new one's."""
    recorder.count(0, np.array([10, 0, 0, 0]))
    assert recorder.change_map(0, np.array([1, 0, 2, 1])) == 1
    recorder.count(0, np.array([3, 0, 0, 0]))
    window = recorder.close()
    assert window.load[0].tolist() == [10, 3, 0]
    assert window.physical[0].tolist() == [3, 0, 0, 0]
    assert (window.first_version.tolist(), window.map_version.tolist()) == ([0, 0], [1, 0])
    assert window.slots.tolist() == [[1, 0, 2, 1], [2, 1, 0, 1]]
    assert recorder.close().first_version.tolist() == [1, 0]


def test_paused_steps_do_not_count(recorder):
    with recorder.paused():
        recorder.count(0, np.array([9, 9, 9, 9]))
        recorder.end_step()
    recorder.count(0, np.array([1, 0, 0, 0]))
    recorder.end_step()
    assert recorder.num_steps == 1
    assert recorder.close().load.sum() == 1


def test_the_ring_keeps_the_last_windows(recorder):
    for tokens in (1, 2, 4):
        recorder.count(0, np.array([tokens, 0, 0, 0]))
        recorder.close()
    assert [int(window.load.sum()) for window in recorder.windows] == [2, 4]
    assert recorder.total().sum() == 6 and recorder.total(0.5).sum() == 5


def test_dumps(recorder, tmp_path):
    with pytest.raises(ValueError, match="no closed window"):
        recorder.dump(tmp_path / "loads.npz")
    recorder.count(1, np.array([4, 0, 0, 1]))
    recorder.change_map(1, np.array([0, 1, 2, 2]))
    recorder.close()
    recorder.count(1, np.array([4, 0, 0, 1]))
    recorder.close()
    recorder.dump(tmp_path / "loads.npz")
    assert read_loads([tmp_path / "loads.npz"]).load[:, 1].tolist() == [[0, 1, 4], [4, 0, 1]]
    for one, two in zip(read_windows(tmp_path / "loads.npz"), recorder.windows):
        assert all(np.array_equal(getattr(one, name), getattr(two, name)) for name in one.__dataclass_fields__)
    assert [path.name for path in tmp_path.iterdir()] == ["loads.npz"], "no temporary file is left"


def test_refusals(recorder):
    with pytest.raises(ValueError, match=r"layer 0 has 4 slots, but \[3\] counts"):
        recorder.count(0, np.array([1, 2, 3]))
    with pytest.raises(ValueError, match="least -1"):
        recorder.count(0, np.array([1, 2, 3, -1]))
    with pytest.raises(ValueError, match="every one of 3 experts"):
        recorder.change_map(0, np.array([0, 1, 1, 0]))
    with pytest.raises(ValueError, match="num_windows is 0"):
        LoadRecorder(Placement(np.array([[0, 1]]), Shape(2, 2, 1)), 0)
