"""Markov and confidence heads against reference outputs, in drafting and in training, and their host form."""

import json
import pathlib

import numpy as np
import pytest
import torch
from dspark.layers.draft_heads import (
    ConfidenceHead,
    draw_block,
    init_markov_weights,
    load_confidence_head,
    load_markov_head,
    make_markov_head,
    previous_tokens,
    teacher_forced_logits,
)
from dspark.layers.draft_heads_host import HostHeads
from dspark.layers.kernels import Kernels
from dspark.layers.params import Scope
from safetensors import safe_open
from safetensors.torch import load_file

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "speculative"
KINDS = ("vanilla", "gated", "rnn")


class Tensors:
    """A parameter source over a dict."""

    def __init__(self, tensors):
        self.tensors, self.taken = tensors, set()

    def take(self, name, *, dim=0, start=0, stop=None, dtype=None):
        self.taken.add(name)
        return self.tensors[name].to(dtype or self.tensors[name].dtype)


@pytest.fixture(scope="module", params=KINDS)
def oracle(request):
    """Reference tensors of one kind, its heads, and the temperature of its samples."""
    path = DATA / f"head_{request.param}.safetensors"
    data = load_file(path)
    with safe_open(path, "pt") as file:
        meta = json.loads(file.metadata()["meta"])
    head = make_markov_head(request.param, {k[5:]: v for k, v in data.items() if k.startswith("head.")}, 12)
    confidence = ConfidenceHead(data["confidence_head.proj.weight"], data["confidence_head.proj.bias"])
    return data, head, confidence, meta["temperature"]


def sampling(data, temperature, seen):
    """A pick by inverse CDF at ``temperature`` that notes the logits it was shown."""

    def pick(k, logits):
        seen.append(logits)
        law = (logits / temperature).softmax(-1)
        return (law.cumsum(-1) <= data["uniforms"][:, k : k + 1]).sum(-1), law

    return pick


def test_greedy_blocks_match_the_oracle(oracle):
    data, head, confidence, _ = oracle
    seen = []
    pick = lambda k, logits: (seen.append(logits), (logits.argmax(-1), None))[1]
    block = draw_block(data["base_logits"], data["hidden"], data["anchor"], head, confidence, pick)
    assert torch.equal(block.tokens, data["greedy_tokens"]) and block.probs is None
    assert (torch.stack(seen, 1) - data["greedy_logits"]).abs().max() < 1e-12


def test_sampled_blocks_and_confidences_match_the_oracle(oracle):
    data, head, confidence, temperature = oracle
    seen = []
    pick = sampling(data, temperature, seen)
    block = draw_block(data["base_logits"], data["hidden"], data["anchor"], head, confidence, pick)
    assert torch.equal(block.tokens, data["sampled_tokens"])
    assert (torch.stack(seen, 1) - data["sampled_logits"]).abs().max() < 1e-12
    assert (block.probs - data["sampled_q"]).abs().max() < 1e-12
    assert (block.confidence_logits - data["confidence_logits"]).abs().max() < 1e-12
    assert (block.confidence_logits.sigmoid() - data["confidence"]).abs().max() < 1e-12
    assert (block.confidence_logits - data["confidence_logits_seed_alignment_WRONG"]).abs().max() > 1e-2


def test_the_anchor_biases_the_first_place(oracle):
    data, head, _, _ = oracle
    prev = previous_tokens(data["anchor"], data["sampled_tokens"])
    forced = teacher_forced_logits(data["base_logits"], data["hidden"], prev, head)
    assert (forced[:, 0] - data["base_logits"][:, 0]).abs().max() > 1e-2


def test_teacher_forcing_is_the_drafting_loop_and_has_gradients(oracle):
    data, head, confidence, _ = oracle
    weights = {name: tensor.clone().requires_grad_() for name, tensor in head.weights.items()}
    trained = make_markov_head(head.kind, weights, 12)
    hidden = data["hidden"].clone().requires_grad_()
    prev = previous_tokens(data["anchor"], data["sampled_tokens"])
    logits = teacher_forced_logits(data["base_logits"], hidden, prev, trained)
    assert (logits - data["sampled_logits"]).abs().max() < 1e-12
    conf = confidence.logits(hidden, prev, weights["markov_w1.weight"])
    assert (conf - data["confidence_logits"]).abs().max() < 1e-12
    (logits.tanh().sum() + conf.sigmoid().sum()).backward()
    assert all(w.grad is not None and w.grad.abs().max() > 0 for w in (hidden, *weights.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    generator = torch.Generator().manual_seed(3)
    weights = init_markov_weights(kind, 4, 2, 3, generator)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
    tensors = [draw(1, 3, 4), draw(1, 3, 3), *[draw(*w.shape) for w in weights.values()]]

    def logits(base, hidden, *values):
        head = make_markov_head(kind, dict(zip(weights, values)), 3)
        return teacher_forced_logits(base, hidden, torch.tensor([[1, 3, 0]]), head)

    assert torch.autograd.gradcheck(logits, tensors)


def test_host_form_draws_the_same_blocks(oracle):
    data, head, confidence, temperature = oracle
    base, hidden, anchors = (data[k].float().numpy() for k in ("base_logits", "hidden", "anchor"))
    anchors = anchors.astype(np.int64)
    uniforms = data["uniforms"].numpy()
    for max_table_bytes in (0, 1 << 20):
        host = HostHeads(head, confidence, max_table_bytes)
        assert (host.table is not None) == (head.kind == "vanilla" and max_table_bytes > 0)
        greedy = host.draw_block(base, hidden, anchors)
        assert greedy.probs is None and (greedy.tokens == data["greedy_tokens"].numpy()).all()
        sampled = host.draw_block(base, hidden, anchors, np.full(len(base), temperature), uniforms)
        assert (sampled.tokens == data["sampled_tokens"].numpy()).all()
        assert np.abs(sampled.probs - data["sampled_q"].numpy()).max() < 1e-5
        assert np.abs(sampled.probs.sum(-1) - 1).max() < 1e-12
        assert np.abs(sampled.confidence_logits - data["confidence_logits"].numpy()).max() < 1e-5
        mixed = np.where(np.arange(len(base)) % 2, temperature, 0.0)
        both = host.draw_block(base, hidden, anchors, mixed, uniforms)
        assert (both.tokens[::2] == greedy.tokens[::2]).all() and (both.tokens[1::2] == sampled.tokens[1::2]).all()
        assert (both.probs[::2] == np.eye(base.shape[2])[both.tokens[::2]]).all()


@pytest.mark.parametrize("vocab_size", [40, 3000])
@pytest.mark.parametrize("reads", ["hidden and token", "hidden", "nothing"])
def test_compiled_host_form_draws_the_same_blocks(reads, vocab_size):
    """A vocabulary whose table of biases is kept, and one where it would be too large; skipped first places, one place
    and no block."""
    pytest.importorskip("numba")
    made, width, rank = torch.Generator().manual_seed(vocab_size), 12, 5
    weights = {f"markov_{name}.weight": torch.randn(vocab_size, rank, generator=made) for name in ("w1", "w2")}
    head = make_markov_head("vanilla", weights, width)
    size = {"hidden and token": width + rank, "hidden": width}.get(reads)
    confidence = None if size is None else ConfidenceHead(torch.randn(1, size, generator=made), torch.tensor([0.3]))
    for num_blocks, gamma in ((3, 4), (1, 1), (0, 4)):
        base = torch.randn(num_blocks, gamma + 1, vocab_size, generator=made).numpy()[:, 1:]
        hidden = torch.randn(num_blocks, gamma + 1, width, generator=made).numpy()[:, 1:]
        anchors = np.arange(num_blocks) * 7
        plain = HostHeads(head, confidence).draw_block(base, hidden, anchors)
        compiled = HostHeads(head, confidence, kernels=Kernels("numba"))
        drawn = compiled.draw_block(base, hidden, anchors)
        assert (drawn.tokens == plain.tokens).all() and drawn.tokens.shape == (num_blocks, gamma)
        if confidence is None:
            assert drawn.confidence_logits is None
        else:
            np.testing.assert_allclose(drawn.confidence_logits, plain.confidence_logits, rtol=0, atol=2e-5)
        with pytest.raises(AssertionError, match="float32"):
            compiled.draw_block(base.astype(np.float16), hidden.astype(np.float16), anchors)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-39, 1e-20])
def test_the_lowest_temperatures_are_greedy(temperature):
    base = np.random.default_rng(0).normal(size=(2, 3, 7)).astype(np.float32) * 30
    anchors, hidden = np.array([1, 2]), np.zeros((2, 3, 4), np.float32)
    block = HostHeads(None, None).draw_block(base, hidden, anchors, np.full(2, temperature), np.full((2, 3), 0.5))
    assert (block.tokens == base.argmax(-1)).all()
    assert (block.probs == np.eye(7)[block.tokens]).all()


def test_without_a_markov_head_places_are_independent():
    base = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    hidden, anchors = torch.zeros(2, 3, 4), torch.tensor([1, 2])
    block = draw_block(base, hidden, anchors, None, None, lambda k, logits: (logits.argmax(-1), None))
    assert torch.equal(block.tokens, base.argmax(-1)) and block.confidence_logits is None
    assert torch.equal(teacher_forced_logits(base, hidden, block.tokens, None), base)
    host = HostHeads(None, ConfidenceHead(torch.ones(1, 4))).draw_block(base.numpy(), hidden.numpy(), anchors.numpy())
    assert (host.tokens == block.tokens.numpy()).all() and (host.confidence_logits == 0).all()


def test_confidence_without_embedding_or_bias():
    hidden = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(1, 4, generator=torch.Generator().manual_seed(2))
    z = ConfidenceHead(weight).logits(hidden, torch.zeros(2, 3, dtype=torch.int64), None)
    assert torch.allclose(z, (hidden * weight[0]).sum(-1))
    low = ConfidenceHead(weight.bfloat16()).logits(hidden.bfloat16(), torch.zeros(2, 3, dtype=torch.int64), None)
    assert low.dtype == torch.float32


def test_heads_load_from_a_checkpoint_scope(oracle):
    data, head, confidence, _ = oracle
    renamed = {"markov_w1": "embed", "markov_w2": "head"}
    for names in ({}, renamed):
        source = {}
        for name, tensor in head.weights.items():
            stem, kind = name.split(".")
            source[f"mtp.2.markov_head.{names.get(stem, stem)}.{kind}"] = tensor
        for name, tensor in (("weight", confidence.weight), ("bias", confidence.bias)):
            source[f"mtp.2.confidence_head.proj.{name}"] = tensor
        params = Tensors(source)
        loaded = load_markov_head(
            head.kind,
            Scope(params, "mtp.2.markov_head."),
            data["hidden"].shape[2],
            names.get("markov_w1", "markov_w1"),
            names.get("markov_w2", "markov_w2"),
        )
        assert loaded.kind == head.kind and loaded.weights.keys() == head.weights.keys()
        assert all(torch.equal(loaded.weights[k], v) for k, v in head.weights.items())
        conf = load_confidence_head(Scope(params, "mtp.2.confidence_head."), has_bias=True)
        assert conf.weight.dtype == torch.float32 and torch.allclose(conf.weight.double(), confidence.weight)
        assert params.taken == set(source), "every tensor is read"
        assert load_confidence_head(Scope(params, "mtp.2.confidence_head."), has_bias=False).bias is None


def test_broken_heads_are_refused(oracle):
    _, head, _, _ = oracle
    with pytest.raises(ValueError, match="unknown Markov head 'lstm'; known: vanilla, gated, rnn"):
        make_markov_head("lstm", head.weights, 12)
    for name in head.weights:
        with pytest.raises(ValueError, match=name):
            make_markov_head(head.kind, {k: v for k, v in head.weights.items() if k != name}, 12)
        if name != "markov_w1.weight":
            with pytest.raises(ValueError, match="shape"):
                make_markov_head(head.kind, head.weights | {name: head.weights[name][..., :-1]}, 12)
    with pytest.raises(ValueError, match="extra.weight does not belong"):
        make_markov_head(head.kind, head.weights | {"extra.weight": torch.zeros(1)}, 12)


@pytest.mark.parametrize("kind", KINDS)
def test_fresh_heads_start_without_influence(kind):
    weights = init_markov_weights(kind, 11, 4, 6, torch.Generator().manual_seed(0))
    again = init_markov_weights(kind, 11, 4, 6, torch.Generator().manual_seed(0))
    assert all(torch.equal(weights[k], again[k]) for k in weights)
    base, hidden = torch.randn(2, 3, 11), torch.randn(2, 3, 6)
    prev = torch.tensor([[1, 2, 3], [4, 5, 6]])
    tracked = {k: v.requires_grad_() for k, v in weights.items()}
    logits = teacher_forced_logits(base, hidden, prev, make_markov_head(kind, tracked, 6))
    assert torch.equal(logits, base)
    logits.square().sum().backward()
    assert tracked["markov_w2.weight"].grad.abs().max() > 0
