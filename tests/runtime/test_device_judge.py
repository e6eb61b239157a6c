"""Where the logits are on a device, drafts are judged there: the same tokens as by the host, greedy and sampled."""

import importlib.util

import pytest
import torch
from dspark.layers.kernels import Kernels
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.decide import Decider
from dspark.runtime.request import Request, SamplingParams
from dspark.runtime.spec.schedule import StaticPolicy


@pytest.mark.parametrize("joint", [False, True], ids=["by token", "by block"])
@pytest.mark.parametrize("temperatures", [(0.0, 0.0), (0.0, 0.9, 1.3)], ids=["greedy", "sampled"])
def test_same_tokens(drafted, temperatures, joint):
    loaded, results = drafted.alone(bundled_model()), []
    judges = [None, Kernels("torch")]
    if not joint and importlib.util.find_spec("triton") and not torch.cuda.is_available():
        judges.append(Kernels("triton"))  # in the interpreter
    for kernels in judges:
        engine = loaded.engine(loaded.own)
        engine._drafting.decider = Decider(engine.drafter.gamma, StaticPolicy(), joint=joint, kernels=kernels)
        requests = []
        for i, temperature in enumerate(temperatures):
            params = SamplingParams(max_new_tokens=24, temperature=temperature, ignore_eos=True)
            requests.append(Request(str(i), (5 + i, 9, 31, 2 + i), params, i))
        results.append({name: (ids, spec) for name, (ids, _, spec) in drafted.run(engine, requests).items()})
    assert all(result == results[0] for result in results[1:])
