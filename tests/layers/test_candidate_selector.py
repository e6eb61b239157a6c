"""What DFlash 2 adds, the selector's walk and the convolution along a block, against reference outputs."""

import json
import pathlib

import numpy as np
import pytest
import torch
from dspark.layers.candidate_selector import Candidates, CandidateSelector, Codebooks, SelectorSizes
from dspark.layers.params import Scope
from dspark.layers.suffix_conv import grouped_conv
from safetensors import safe_open

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "speculative" / "dflash2.safetensors"


@pytest.fixture(scope="module")
def oracle():
    with safe_open(DATA, "pt") as file:
        return json.loads(file.metadata()["meta"]), {key: file.get_tensor(key) for key in file.keys()}


@pytest.fixture(scope="module")
def walked(oracle):
    data = {key: value.numpy() for key, value in oracle[1].items()}
    features = data["hidden"] @ data["hidden_projection"].T
    found = Candidates(data["candidate_ids"], data["unary"], features)
    return data, found, Codebooks(data["predecessor_codebook"], data["successor_codebook"])


class Weights:
    def __init__(self, data):
        self.data = data

    def take(self, name, *, dim=0, start=0, stop=None, dtype=None):
        return self.data[name.removesuffix(".weight")].to(dtype or torch.float64)


def test_edge_scores(walked):
    """Behind every candidate of the place before; behind the anchor at the first."""
    data, found, books = walked
    for place in range(found.ids.shape[1]):
        for a in range(found.ids.shape[2]):
            previous = data["anchor"] if place == 0 else found.ids[:, place - 1, a]
            expected = data["edge_scores"][:, place, a]
            np.testing.assert_allclose(books.scores(found, place, previous), expected, atol=1e-12)


def test_walk(walked):
    """Greedy and sampled rows in one batch, and rows that are all greedy."""
    data, found, books = walked
    temperatures = np.where(data["greedy_mask"], 0.0, data["temperatures"])
    assert 0 < data["greedy_mask"].sum() < len(temperatures)
    tokens, laws = books.walk(found, data["anchor"], temperatures, data["uniforms"])
    assert (tokens == data["path_tokens"]).all()
    np.testing.assert_allclose(laws, data["path_q"], rtol=1e-5, atol=1e-6)  # the reference rounds to float32
    greedy, none = books.walk(found, data["anchor"], None, None)
    assert none is None and (greedy[data["greedy_mask"]] == tokens[data["greedy_mask"]]).all()


def test_from_logits(oracle, walked):
    """The candidates are the best logits, which may be scaled and bent; the law covers the vocabulary."""
    meta, tensors = oracle
    data, _, _ = walked
    selector = CandidateSelector(Scope(Weights(tensors)), SelectorSizes(5, meta["top_k"]))
    temperatures = np.where(data["greedy_mask"], 0.0, data["temperatures"])
    made = (tensors["hidden"], tensors["logits"], data["anchor"])
    block = selector.draw_block(*made, temperatures, data["uniforms"])
    for b, k in np.ndindex(*block.tokens.shape):
        chosen = data["candidate_ids"][b, k]
        assert set(np.flatnonzero(block.probs[b, k])) <= set(chosen)
        greedy = data["greedy_mask"][b]
        # Sampled rows walk over their candidates in another order, so that only the law behind equal tokens agrees.
        if greedy or (block.tokens[b, :k] == data["path_tokens"][b, :k]).all():
            np.testing.assert_allclose(block.probs[b, k][chosen], data["path_q"][b, k], atol=1e-5)
    assert (block.tokens[data["greedy_mask"]] == data["path_tokens"][data["greedy_mask"]]).all()
    np.testing.assert_allclose(block.probs.sum(-1), 1.0, atol=1e-12)
    bent = CandidateSelector(Scope(Weights(tensors)), SelectorSizes(5, meta["top_k"], 0.5, 3.0)).candidates(*made[:2])
    plain = selector.candidates(*made[:2])
    assert (bent.ids == plain.ids).all()
    np.testing.assert_allclose(bent.unary, 3.0 * np.tanh(0.5 * plain.unary / 3.0), atol=1e-6)


def test_convolution(oracle):
    meta, data = oracle
    made = grouped_conv(data["conv_x"], data["conv_delta"], data["conv_base"], meta["conv_block"])
    assert (made - data["conv_y"]).abs().max() < 1e-12
    assert data["conv_delta"].shape[1] == meta["conv_taps"] and data["conv_base"].shape[1] == 4 * meta["conv_group"]


def test_taps_beyond_the_block():
    """A block of one row is its own tap alone."""
    x, delta, base = torch.randn(3, 8), torch.randn(3, 4, 2), torch.randn(4, 8)
    expected = (base[0] + delta[:, 0].repeat_interleave(4, 1)) * x
    assert torch.allclose(grouped_conv(x, delta, base, 1), expected)
