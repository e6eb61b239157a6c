"""``generate --resume``: the output file only grows, and an interrupted run is completed without repeats or losses."""

import json

import pytest
from dspark.runtime.cli import main
from dspark.runtime.results_file import OutputFailed, ResultsFile, read_earlier

PROMPTS = ["def main():", "import os", "Once upon", "x = [", "The", "class A"]


@pytest.fixture
def files(tmp_path):
    """An input of six requests, half of them sampled, and the name of an output."""
    source = tmp_path / "in.jsonl"
    lines = [{"id": f"r{i}", "prompt": p, "max_new_tokens": 6, "temperature": i % 2} for i, p in enumerate(PROMPTS)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"id": "bad"}\n')
    return source, tmp_path / "out.jsonl"


def generate(files, *flags):
    return main(["generate", "--input", str(files[0]), "--output", str(files[1]), *flags])


def results(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["id"] for one in found}) == len(found)
    # What a draft guessed of a sampled request depends on nothing but the request, so all of a result is compared.
    return {one["id"]: one for one in found}


def test_what_was_cut_off_is_completed_exactly(files, capfd):
    assert generate(files) == 0
    whole = results(files[1])
    assert len(whole) == len(PROMPTS) + 1
    lines = files[1].read_bytes().splitlines(keepends=True)
    for kept, torn in ((0, b'{"id": "r'), (2, lines[2][:-1]), (3, b""), (len(lines) - 1, lines[-1][:5])):
        files[1].write_bytes(b"".join(lines[:kept]) + torn)
        assert generate(files, "--resume") == 0
        assert files[1].read_bytes().startswith(b"".join(lines[:kept])), "what was complete is untouched"
        assert results(files[1]) == whole
        assert f"{kept} results were there before" in capfd.readouterr().err or kept == 0


def test_nothing_left_and_nothing_there(files):
    assert generate(files, "--resume") == 0
    before = files[1].read_bytes()
    assert generate(files, "--resume") == 0
    assert files[1].read_bytes() == before
    files[1].write_text("anything")
    assert generate(files) == 0
    assert results(files[1]) == results(files[1]) and b"anything" not in files[1].read_bytes()


def test_lines_that_repeat_an_id_or_have_none_do_not_stand_in_the_way(files, capfd):
    with files[0].open("a") as source:  # beside an id that is the number of a line without one
        source.write('{"id": "r0", "prompt": "x"}\n{"id": "9", "prompt": "x", "max_new_tokens": 2}\nno json\n')
    assert generate(files) == 0
    lines, whole = files[1].read_bytes().splitlines(keepends=True), results(files[1])
    assert {"r0", "r0#7", "9", "9#9"} <= set(whole) and len(whole) == len(PROMPTS) + 4
    for kept in (4, len(lines)):
        files[1].write_bytes(b"".join(lines[:kept]))
        assert generate(files, "--resume") == 0
        assert results(files[1]) == whole


@pytest.mark.parametrize(
    "content, words",
    [
        ('{"id": "else", "prompt_tokens": 3}\n', "line 1 is a result of 'else', which is no request of this run"),
        ('{"id": "r0", "prompt_tokens": 99}\n', "'r0' for a prompt of 99 tokens, but it has 6 now"),
        ('{"id": "r1", "prompt_tokens": 3}\n' * 2, "line 2: a second result of 'r1'"),
        ("no json\n", "line 1 is no JSON"),
        ('{"id": 3}\n', "line 1 has no id and prompt_tokens"),
        ("[" * 100_000 + "\n", "line 1 is no JSON"),
    ],
)
def test_a_file_of_something_else_is_left_alone(files, capfd, content, words):
    files[1].write_text(content)
    assert generate(files, "--resume") == 2
    error = capfd.readouterr().err
    assert words in error and "reading weights" not in error and "INFO" not in error, "found before the weights"
    assert files[1].read_text() == content


def test_resume_needs_an_output(files, capfd):
    assert main(["generate", "--input", str(files[0]), "--resume"]) == 2
    assert "--output" in capfd.readouterr().err


def test_a_full_disk_is_named_and_leaves_whole_lines(tmp_path, capfd):
    path = tmp_path / "out.jsonl"
    with ResultsFile(path) as results_file:
        results_file.write({"id": "a", "prompt_tokens": 1})
        results_file.write({"id": "b", "prompt_tokens": 2})
    assert read_earlier(path, ["a", "b", "c"]) == ({"a": 1, "b": 2}, path.stat().st_size)
    assert main(["generate", "--prompt", "x", "--max-new-tokens", "2", "--output", "/dev/full"]) == 1
    error = capfd.readouterr().err
    assert "--output /dev/full: No space left on device; the 0 results" in error and "Traceback" not in error


def test_a_line_that_does_not_fit_is_taken_back(tmp_path):
    resource = pytest.importorskip("resource", reason="limits of file sizes are a Unix thing")
    signal = pytest.importorskip("signal")
    path, before = tmp_path / "out.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with ResultsFile(path) as results_file:
            results_file.write({"id": "a", "prompt_tokens": 1})
            size = path.stat().st_size
            with pytest.raises(OutputFailed, match="the 1 results of this run before it are complete"):
                results_file.write({"id": "b", "text": "x" * 2000})
            assert path.stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
