"""A few broken files for every reader; ``scripts/fuzz_readers.py`` makes many more."""

import pathlib
import random
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "scripts"))
import fuzz_readers  # noqa: E402

READERS = fuzz_readers.readers()


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_broken_file_is_read_or_refused_with_words(name, tmp_path):
    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(0, 2**64))
    def case(seed):
        assert fuzz_readers.run_case(READERS[name], random.Random(seed), tmp_path) in ("read", "refused")

    case()


# What once ended in something else than a refusal.
FOUND = {
    "loads": [("l.csv", b"layer,expert,count,more\n0,0,5\n"), ("l.csv", b"layer,expert,count\n999999,999999,1\n")],
    "maps": [
        ("m.jsonl", b'{"record_type": "eplb_initial_mapping", "version": 1, "num_slots": null, '
         b'"num_redundant_experts": 0, "initial_global_assignments": {"0": [0]}}'),
        ("m.npz", b"PK\x03\x04" + bytes(40) + b"PK\x05\x06" + b"\x01" * 18),
    ],
    "config": [("config.json", b'{"model_type": {}}')],
}  # fmt: skip


@pytest.mark.parametrize("name, file, data", [(name, *case) for name, cases in FOUND.items() for case in cases])
def test_what_was_found_stays_refused(name, file, data, tmp_path):
    (tmp_path / file).write_bytes(data)
    with pytest.raises(ValueError):
        READERS[name].read(tmp_path / file)


@pytest.mark.parametrize("name", sorted(set(READERS) - {"headers", "index"}))
def test_the_good_files_are_good(name, tmp_path):
    for file, data in READERS[name].files.items():
        folder = tmp_path / file
        folder.mkdir()
        (folder / file).write_bytes(data)
        READERS[name].read(folder / file)


def test_a_few_cases_led_by_coverage():
    pytest.importorskip("atheris", reason="atheris is not installed (dspark[fuzz])")
    script = str(pathlib.Path(fuzz_readers.__file__).with_name("fuzz_atheris.py"))
    command = [sys.executable, script, "--only", "hosts", "--runs", "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    name, cases, places, *_ = done.stdout.splitlines()[1].split()
    assert (name, cases) == ("hosts", "200") and int(places) > 9, "the branches of the parser are seen"
