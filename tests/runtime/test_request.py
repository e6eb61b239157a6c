"""Parameters and requests out of range are refused by name, with the number and the range."""

import dataclasses

import pytest
from dspark.runtime.engine_config import EngineConfig, resolve
from dspark.runtime.request import (
    Request,
    SamplingParams,
    random_key,
    sampling_from_dict,
    stop_ids,
    token_budget,
    validate_request,
)

NAN, INF = float("nan"), float("inf")

BAD_PARAMS = [
    ("max_new_tokens", 0),
    ("max_new_tokens", -1),
    ("max_new_tokens", 2.0),
    ("max_new_tokens", True),
    ("max_new_tokens", 1 << 40),
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", INF),
    ("temperature", "hot"),
    ("temperature", None),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", NAN),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("min_p", NAN),
    ("seed", -1),
    ("seed", 1 << 64),
    ("logprobs", -1),
    ("logprobs", 65),
    ("ignore_eos", 1),
    ("skip_special_tokens", "no"),
    ("stop", {"a": 1}),
    ("stop", ["a", ""]),
    ("stop", ("",)),
    ("stop", ("x" * 257,)),
    ("stop", (3,)),
    ("stop", ("x",) * 17),
    ("stop_token_ids", (1,) * 65),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (1.0,)),
]


@pytest.mark.parametrize("name,value", BAD_PARAMS, ids=lambda v: str(v)[:20])
def test_values_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} .*; allowed: ") as error:
        SamplingParams(**{name: value}).validate()
    assert len(str(error.value)) < 200


def test_the_limits_themselves_are_allowed():
    SamplingParams(1, 0, 0, 1, 0, 0, ("x",) * 16, (0,) * 64, False, 0, True).validate()
    SamplingParams(1 << 24, 100.0, 1 << 62, 1e-12, 1.0, (1 << 63) - 1, ("x" * 256,), (), True, 64).validate()


def test_json_fields_replace_the_defaults():
    base = SamplingParams(temperature=0.5, seed=3)
    got = sampling_from_dict({"stop": "END", "stop_token_ids": [5], "top_k": 2}, base)
    assert got == dataclasses.replace(base, stop=("END",), stop_token_ids=(5,), top_k=2)
    assert sampling_from_dict({"stop": ["a", "b"], "seed": None}, base).stop == ("a", "b")
    assert SamplingParams(stop="END", stop_token_ids=[1]) == SamplingParams(stop=("END",), stop_token_ids=(1,))
    with pytest.raises(ValueError, match="unknown sampling field 'beam'"):
        sampling_from_dict({"beam": 4}, base)
    with pytest.raises(ValueError, match="^top_p is 7"):
        sampling_from_dict({"top_p": 7}, base)


@pytest.mark.parametrize(
    "prompt,params,message",
    [
        ((), {}, "'r'.*the prompt is empty"),
        ((1, 2, 50), {}, "'r'.*id 50 at position 2 .* vocabulary of 50"),
        ((1, -1), {}, "'r'.*id -1 at position 1 "),
        ((1, True), {}, "'r'.*True at position 1 is not an integer"),
        ((1, 2.0), {}, "'r'.*2.0 at position 1 is not an integer"),
        ((1,) * 100, {}, "'r'.*100 tokens.*limit is 100.*99"),
        ((1,), {"stop_token_ids": (50,)}, "'r'.*stop token id 50 .* vocabulary of 50"),
        ((1,), {"top_p": NAN}, "'r'.*top_p is nan"),
    ],
)
def test_requests_that_cannot_run_are_refused_by_name(prompt, params, message):
    with pytest.raises(ValueError, match=message):
        validate_request(Request("r", prompt, SamplingParams(**params)), vocab_size=50, max_context=100)


def test_the_context_limits_new_tokens():
    request = Request("r", (1,) * 90, SamplingParams(max_new_tokens=64))
    validate_request(request, 50, 100)
    assert token_budget(request, 100) == 10
    assert token_budget(request, 1000) == 64


def test_end_of_sequence_can_be_ignored_but_not_own_stop_ids():
    assert stop_ids(SamplingParams(stop_token_ids=(7,)), (1, 4)) == {1, 4, 7}
    assert stop_ids(SamplingParams(stop_token_ids=(7,), ignore_eos=True), (1, 4)) == {7}


def test_random_keys_follow_the_id_or_the_own_seed():
    def key(request_id, arrival, seed=None, engine_seed=9):
        return random_key(Request(request_id, (1,), SamplingParams(seed=seed), arrival), engine_seed)

    assert key("a", 0) == key("a", 5) != key("b", 0)
    assert key("a", 0, engine_seed=8) != key("a", 0)
    assert key("a", 0, seed=4) == key("b", 1, seed=4, engine_seed=1) == (4, 0)
    assert len({key(str(i), 0) for i in range(1000)}) == 1000
    assert all(0 < key(str(i), 0)[1] < 1 << 64 for i in range(1000))


@pytest.mark.parametrize(
    "name,value",
    [
        ("device", "tpu"),
        ("dtype", "float16"),
        ("chunk_size", 0),
        ("max_running", 0),
        ("max_context", 1),
        ("seed", -1),
        ("verify", "no"),
        ("overlap", "x"),
        ("dispatcher", "fast"),
        ("admission", None),
        ("deterministic", "no"),
        ("prefix_cache", 1),
        ("model", ""),
        ("sts", 3),
        ("confidence_threshold", 1.5),
        ("confidence_threshold", float("nan")),
        ("confidence_threshold", "x"),
    ],
)
def test_engine_options_out_of_range_are_named(name, value):
    with pytest.raises(ValueError, match=f"^--{name.replace('_', '-')} is .*{value}.*; allowed: "):
        EngineConfig(**{name: value}).validate()


def test_auto_is_decided_once():
    def decide(config, device="cpu", own_draft="none"):
        return resolve(config, model_dir="/m", device_type=device, max_positions=4096, own_draft=own_draft)

    config = decide(EngineConfig())
    assert (config.model, config.device, config.dtype, config.max_context) == ("/m", "cpu", "float32", 4096)
    assert "auto" not in dataclasses.asdict(config).values()
    assert (
        resolve(EngineConfig(), model_dir="/m", device_type="cuda", max_positions=9, own_draft="none").dtype
        == "bfloat16"
    )
    assert resolve(config, model_dir="/m", device_type="cpu", max_positions=4096, own_draft="none") == config
    own = resolve(EngineConfig(), model_dir="/m", device_type="cpu", max_positions=9, own_draft="dspark")
    assert (config.draft, own.draft) == ("none", "dspark")
    with pytest.raises(ValueError, match="--max-context is 5000, but the model has 4096"):
        decide(EngineConfig(max_context=5000))
