"""bench overlap: equal outputs, a trace in which what was promised is in flight beside what, and refusals."""

import json

import pytest
from dspark.runtime.cli import main


def spans(trace, mode, rank):
    """(category, name, start, stop) of one rank of a mode."""
    events = trace["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    pids = [pid for pid, name in named.items() if name.startswith(f"{mode},") and name.endswith(f"rank {rank}")]
    assert len(pids) == 1
    return [
        (e["cat"], e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == pids[0]
    ]


def beside(found, travelling, computing):
    """Whether any span named ``travelling`` shares time with one named ``computing``."""
    pairs = ((a, b) for a in found for b in found if (a[1], b[1]) == (travelling, computing))
    return any(a[2] < b[3] and b[2] < a[3] for a, b in pairs)


def test_modes_agree_and_overlap_what_they_promise(tmp_path, capsys):
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.png"
    command = ["bench", "overlap", "--tokens", "150", "--rounds", "1", "--json", "--trace", str(trace)]
    try:
        import matplotlib  # noqa: F401

        command += ["--picture", str(picture)]
    except ImportError:
        picture = None
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out)["150"]
    assert result["same_tokens"] and result["largest_difference"] < 1e-3 and not result["overlaps_by_default"]
    assert set(result["ratio"]) == {"none", "tbo", "sbo"} and result["ratio"]["none"] == 1
    assert picture is None or picture.stat().st_size > 0
    trace = json.loads(trace.read_text())
    for rank in range(2):
        plain, halves, pieces = (spans(trace, mode, rank) for mode in ("none", "tbo", "sbo"))
        assert {name[-1] for _, name, _, _ in plain + pieces} == {"A"}
        assert [cat for cat, *_ in plain].count("dispatch") == [cat for cat, *_ in plain].count("combine") == 2
        # Half B computes while rows of A are on their way to experts and back.
        assert beside(halves, "dispatch A", "stage B") and beside(halves, "combine A", "stage B")
        assert beside(halves, "dispatch B", "stage A")
        # Without overlap all of a combine is waited for; in pieces most of it lies before the wait.
        share = {"none": [], "sbo": []}
        for mode, found in (("none", plain), ("sbo", pieces)):
            waits = {stop: start for cat, _, start, stop in found if cat == "wait"}
            for cat, _, start, stop in found:
                if cat == "combine":
                    end = min(waits, key=lambda at, stop=stop: abs(at - stop))
                    share[mode].append((waits[end] - start) / (stop - start))
        assert max(share["none"]) < min(share["sbo"])


@pytest.mark.parametrize(
    "flags,problem", [(["--rate", "1mbit"], "give --nodes"), (["--picture", "/no/where.png"], "folder")]
)
def test_refusals(flags, problem, capsys):
    assert main(["bench", "overlap", *flags]) == 2
    assert problem in capsys.readouterr().err
