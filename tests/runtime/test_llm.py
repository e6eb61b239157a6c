"""The Python interface, in one process and on several ranks."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from dspark.runtime import LLM, RequestOutput, SamplingParams

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "models"
GOLDEN = json.loads((DATA / "golden.json").read_text())["items"]


@pytest.fixture(scope="module")
def llm():
    with LLM(max_running=4) as llm:
        yield llm


def test_texts_and_ids_give_the_golden_continuations(llm):
    params = SamplingParams(max_new_tokens=64, ignore_eos=True, skip_special_tokens=False)
    from_text = llm.generate([item["prompt"] for item in GOLDEN], params)
    from_ids = llm.generate([item["prompt_ids"] for item in GOLDEN], params)
    for item, a, b in zip(GOLDEN, from_text, from_ids, strict=True):
        assert isinstance(a, RequestOutput)
        assert list(a.prompt_ids) == list(b.prompt_ids) == item["prompt_ids"]
        assert list(a.token_ids) == list(b.token_ids) == item["output_ids"]
        assert a.text == b.text == item["output_text"]
        assert 0 < a.time_to_first_token <= a.time_total


def test_one_text_and_parameters_for_each(llm):
    one = llm.generate(GOLDEN[1]["prompt"])
    assert len(one) == 1 and one[0].finish_reason in ("stop", "length")
    short, long = llm.generate(
        [GOLDEN[1]["prompt"]] * 2,
        [SamplingParams(max_new_tokens=2), SamplingParams(max_new_tokens=5, logprobs=1, ignore_eos=True)],
    )
    assert long.token_ids[:2] == short.token_ids == tuple(GOLDEN[1]["output_ids"][:2])
    assert len(long.logprobs) == 5 and short.logprobs == ()
    with pytest.raises(ValueError, match="1 sampling parameters for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])


def test_prompts_that_cannot_run_keep_their_place(llm):
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)
    outputs = llm.generate([GOLDEN[0]["prompt"], [], [1536], 7, "\ud800", GOLDEN[2]["prompt"]], params)
    assert [o.finish_reason for o in outputs] == ["length", "error", "error", "error", "error", "length"]
    assert "empty" in outputs[1].error and "1536" in outputs[2].error and "Unicode" in outputs[4].error
    assert list(outputs[5].token_ids) == GOLDEN[2]["output_ids"][:2]
    assert llm.generate([], params) == []


def test_sampling_repeats_with_an_own_seed_and_varies_without(llm):
    own = SamplingParams(max_new_tokens=12, temperature=1.0, seed=5)
    free = SamplingParams(max_new_tokens=12, temperature=1.0)
    prompt = "<|user|>Tell me a story.<|assistant|>"
    a, b = (o.token_ids for o in llm.generate([prompt, prompt], own))
    assert a == b == llm.generate(prompt, own)[0].token_ids
    assert len({o.token_ids for o in llm.generate([prompt] * 8, free)}) > 4


def test_mistakes_in_options_are_named():
    with pytest.raises(ValueError, match="unknown option 'speed'; there are model, device"):
        LLM(speed=3)
    with pytest.raises(ValueError, match="tp \\* pp = 2"):
        LLM(tp=2)
    with pytest.raises(ValueError, match="--dtype is 'float8'"):
        LLM(dtype="float8")
    with pytest.raises(ValueError, match="/nowhere"):
        LLM("/nowhere")


def test_mistakes_in_calls_are_named(llm):
    for prompts, params, message in [
        (None, None, "prompts is a NoneType; give a text"),
        ("x", [None], "params holds None; give SamplingParams"),
        ("x", {"temperature": 1}, "params holds 'temperature'; give SamplingParams"),
    ]:
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, params)


SCRIPT = """
import sys
from dspark.runtime import LLM, SamplingParams

llm = LLM(max_running=2)
outputs = llm.generate(["def main():", [], "1+1="], SamplingParams(max_new_tokens=8, logprobs=2))
sys.stdout.write(f"{llm.rank} {[(o.token_ids, o.text, o.finish_reason, o.error) for o in outputs]}\\n")
assert all(len(o.logprobs) == len(o.token_ids) and all(len(e.top) == 2 for e in o.logprobs) for o in outputs)
llm.close()
"""


def test_every_rank_gets_the_same_results(tmp_path, llm):
    script = tmp_path / "use.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    first, second = sorted(result.stdout.splitlines())
    assert first.split(" ", 1)[0] == "0" and second.split(" ", 1)[0] == "1"
    assert first.split(" ", 1)[1] == second.split(" ", 1)[1]
    alone = llm.generate(["def main():", "1+1="], SamplingParams(max_new_tokens=8))
    for output in alone:
        assert str(output.token_ids) in first and repr(output.text) in first
