"""Penalties per verified row against a plain loop that decodes one token at a time."""

import numpy as np
import pytest
import torch
from dspark.runtime.spec.penalties import PenaltyParams, Written, penalise
from dspark.runtime.spec.rows import PackedRows
from dspark.runtime.spec.verdict import NO_TOKEN

VOCAB = 12


def stepwise(logits, prompt, output, setting):
    """What one row becomes when the request has written ``output`` so far: plain Python, float64."""
    out = [float(x) for x in logits]
    for token in set(prompt) | set(output):
        out[token] = out[token] / setting["repetition"] if out[token] > 0 else out[token] * setting["repetition"]
    for token in set(output):
        out[token] -= setting["frequency"] * output.count(token) + setting["presence"]
    for token, value in setting["bias"].items():
        out[token] += value
    if len(output) < setting["min_tokens"]:
        for token in setting["stops"]:
            out[token] = -np.inf
    return np.array(out)


def random_request(rng):
    """A request in the middle of decoding; half of the settings are neutral."""
    pick = lambda value, neutral: value if rng.random() < 0.5 else neutral
    return {
        "prompt": rng.integers(0, VOCAB, rng.integers(1, 6)).tolist(),
        "output": rng.integers(0, VOCAB, rng.integers(0, 8)).tolist(),
        "repetition": pick(float(rng.uniform(0.5, 2.0)), 1.0),
        "presence": pick(float(rng.uniform(-1, 1)), 0.0),
        "frequency": pick(float(rng.uniform(-1, 1)), 0.0),
        "min_tokens": pick(int(rng.integers(0, 12)), 0),
        "stops": rng.choice(VOCAB, rng.integers(0, 3), replace=False).tolist(),
        "bias": {int(t): float(rng.normal()) for t in rng.choice(VOCAB, rng.integers(0, 3), replace=False)},
    }


def as_arguments(requests):
    """The tensors of :func:`penalise` for these requests."""
    counts = torch.tensor([[r["output"].count(t) for t in range(VOCAB)] for r in requests])
    seen = torch.tensor([[t in r["prompt"] for t in range(VOCAB)] for r in requests])
    written = Written(seen, counts, torch.tensor([len(r["output"]) for r in requests]))
    width = max(len(r["stops"]) for r in requests)
    bias = [(i, token, value) for i, r in enumerate(requests) for token, value in r["bias"].items()]
    column = lambda name: torch.tensor([r[name] for r in requests], dtype=torch.float64)
    params = PenaltyParams(
        column("repetition"),
        column("presence"),
        column("frequency"),
        torch.tensor([r["min_tokens"] for r in requests]),
        torch.tensor([r["stops"] + [NO_TOKEN] * (width - len(r["stops"])) for r in requests], dtype=torch.int64),
        torch.tensor([b[0] for b in bias], dtype=torch.int64),
        torch.tensor([b[1] for b in bias], dtype=torch.int64),
        torch.tensor([b[2] for b in bias], dtype=torch.float64),
    )
    return written, params


def test_every_row_is_what_decoding_step_by_step_would_see():
    rng = np.random.default_rng(0)
    for _ in range(60):
        requests = [random_request(rng) for _ in range(rng.integers(1, 5))]
        gamma = int(rng.integers(0, 6))
        rows = PackedRows.from_lens(rng.integers(0, gamma + 1, len(requests)), gamma)
        drafts = rng.integers(0, VOCAB, (len(requests), gamma))
        logits = torch.from_numpy(rng.normal(size=(rows.num_rows, VOCAB)) * 3)
        before = logits.clone()
        written, params = as_arguments(requests)
        out = penalise(logits, rows, torch.from_numpy(drafts), written, params)
        assert torch.equal(logits, before)
        row = 0
        for r, request in enumerate(requests):
            for k in range(rows.lens[r] + 1):
                so_far = request["output"] + drafts[r, :k].tolist()
                expected = stepwise(logits[row], request["prompt"], so_far, request)
                np.testing.assert_allclose(out[row].numpy(), expected, rtol=0, atol=1e-12)
                row += 1


def test_a_verified_row_is_bitwise_the_row_of_plain_decoding():
    rng = np.random.default_rng(1)
    request = random_request(rng) | {"repetition": 1.3, "presence": 0.2, "frequency": 0.7, "min_tokens": 9}
    drafts = torch.tensor([[3, 3, 7, 3]])
    logits = torch.from_numpy(rng.normal(size=(5, VOCAB))).float()
    block = penalise(logits, PackedRows.from_lens([4], 4), drafts, *as_arguments([request]))
    for k in range(5):
        later = request | {"output": request["output"] + drafts[0, :k].tolist()}
        alone = PackedRows.from_lens([0], 0)
        single = penalise(logits[k : k + 1], alone, drafts[:, :0], *as_arguments([later]))
        assert torch.equal(single[0], block[k])


def test_neutral_settings_change_nothing_and_half_precision_is_widened():
    neutral = {
        "prompt": [1, 2],
        "output": [3],
        "repetition": 1.0,
        "presence": 0.0,
        "frequency": 0.0,
        "min_tokens": 0,
        "stops": [4],
        "bias": {},
    }
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = penalise(logits, PackedRows.from_lens([2], 2), torch.tensor([[0, 5]]), *as_arguments([neutral]))
    assert out.dtype == torch.float32 and torch.equal(out, logits.float())


@pytest.mark.parametrize("num_output", [2, 3, 4])
def test_min_tokens_counts_the_drafts_of_the_block(num_output):
    request = {
        "prompt": [0],
        "output": [1] * num_output,
        "repetition": 1.0,
        "presence": 0.0,
        "frequency": 0.0,
        "min_tokens": 4,
        "stops": [5, 6],
        "bias": {},
    }
    logits = torch.zeros(4, VOCAB)
    out = penalise(logits, PackedRows.from_lens([3], 3), torch.tensor([[1, 1, 1]]), *as_arguments([request]))
    banned = torch.isinf(out)
    for k in range(4):
        expected = [5, 6] if num_output + k < 4 else []
        assert banned[k].nonzero()[:, 0].tolist() == expected
