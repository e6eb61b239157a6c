"""How many rows a rank may have to send at once, known and checked before a model is built."""

import pytest
from dspark.parallel.topology import Topology
from dspark.runtime.engine_config import EngineConfig
from dspark.runtime.load_plan import dispatch_options


def limit(topology=Topology(), verified=4, drafted=8, **options):  # noqa: B008
    config = EngineConfig(
        **{"max_running": 10, "max_context": 512, "chunk_size": 100, "dispatch_backend": "torch"} | options
    )
    return dispatch_options(config, topology, verified, drafted).max_tokens_per_rank


def test_rows_of_every_layout():
    assert limit(dispatcher="low_latency") == 140 and limit(dispatcher="auto") == 80
    assert limit(dispatcher="normal") == limit(dispatcher="standard") == 0
    assert limit(Topology(tp=4, ep=4), dispatcher="low_latency") == 35
    assert limit(Topology(tp=4, ep=2), dispatcher="low_latency") == 70  # the rows of both ranks of a moe_tp group
    assert limit(Topology(tp=4, dp=4, ep=4), dispatcher="low_latency") == 140
    # A draft's rows are on every cp rank; the target's are split, if the split is even.
    split = Topology(tp=2, cp=2, ep=2)
    assert limit(split, dispatcher="low_latency") == 80 and limit(split, dispatcher="low_latency", drafted=1) == 70
    assert limit(split, dispatcher="low_latency", cp_split="zigzag", drafted=1) == 140
    assert limit(split, dispatcher="auto", cp_decode="replicate", drafted=1) == 40
    assert limit(dispatcher="low_latency", chunk_size=1 << 20, max_context=8) == 120


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens_per_rank": 9}, "--max-tokens-per-rank 9: the dispatcher standard of torch has no fixed buffers"),
        ({"dispatcher": "normal", "max_tokens_per_rank": 9}, "dispatcher normal of torch has no fixed buffers"),
        ({"dispatcher": "normal", "fp8_dispatch": True}, "--fp8-dispatch: the dispatcher normal of torch"),
        (
            {"dispatcher": "auto", "dispatch_backend": "deep_ep_elastic", "fp8_dispatch": True},
            "--fp8-dispatch: the dispatcher auto of deep_ep_elastic sends no 8-bit floats",
        ),
    ],
)
def test_options_that_a_dispatcher_has_no_use_for(options, words):
    with pytest.raises(ValueError, match=words):
        EngineConfig(**options).validate()
    used = {"max_tokens_per_rank": 9, "fp8_dispatch": True}
    for backend in ("torch", "deep_ep"):
        for name in ("low_latency", "auto"):
            EngineConfig(dispatcher=name, dispatch_backend=backend, **used).validate()


def test_a_limit_below_that_is_refused():
    assert limit(dispatcher="auto", max_tokens_per_rank=80) == 80
    with pytest.raises(ValueError, match="is 79, but a step may have 80 rows on a rank: --max-running 10 .* of 8 rows"):
        limit(dispatcher="auto", max_tokens_per_rank=79)
    with pytest.raises(ValueError, match="is 100, but .* 140 rows .*, and --chunk-size 100"):
        limit(dispatcher="low_latency", max_tokens_per_rank=100)
    assert limit(dispatcher="normal", max_tokens_per_rank=1) == 1
