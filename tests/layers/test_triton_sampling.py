"""Triton's kernels that draw and judge drafts, against their plain twins: in the interpreter, or on a GPU.

The plain twins are held to exact laws elsewhere. A draw is the same token unless its uniform is within rounding of a
border between two tokens, which those here are not.
"""

import pytest
import torch


def random(*shape, seed, size=1.0):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def uniforms(*shape, seed):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_blocks,gamma,vocab,rank", [(0, 2, 9, 4), (3, 3, 150, 5), (2, 1, 2100, 16)])
def test_markov_sample(triton_twins, moved, num_blocks, gamma, vocab, rank, dtype):
    """Blocks at several temperatures, greedy ones among them."""
    base = random(num_blocks, gamma, vocab, seed=1, size=2.0)
    weights = {name: random(vocab, rank, seed=i, size=0.5).to(dtype) for i, name in enumerate(("w1", "w2"))}
    anchors, temperatures = torch.arange(num_blocks) * 7 % vocab, torch.tensor([0.7, 0.0, 1.5])[:num_blocks].double()
    arguments = moved([base, anchors, temperatures, uniforms(num_blocks, gamma, seed=3)])
    plain, compiled = (kernels.bind("markov_sample", **moved(weights))(*arguments) for kernels in triton_twins)
    assert torch.equal(plain.tokens, compiled.tokens) and compiled.probs.dtype == torch.float64
    torch.testing.assert_close(compiled.probs, plain.probs, rtol=2e-5, atol=1e-9)
    if num_blocks:
        assert (compiled.probs.sum(2) - 1).abs().max() < 1e-12
        assert compiled.probs[1].amax(1).tolist() == [1.0] * gamma


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_markov_sample_at_the_ends(triton_twins, moved, uniform):
    """The first and the last token with mass; equal and hopeless logits; temperatures next to nothing."""
    base = torch.full((4, 2, 1030), -1e30)
    base[0, :, 3], base[1, :, [5, 1025]], base[2, :, 1029], base[3] = 0.0, 1.0, 7.0, 0.0
    weights = {"w1": torch.zeros(1030, 2), "w2": torch.zeros(1030, 2)}
    temperatures = torch.tensor([1.0, 1e-300, 0.0, 1.0], dtype=torch.float64)
    arguments = moved(
        [base, torch.zeros(4, dtype=torch.int64), temperatures, torch.full((4, 2), uniform, dtype=torch.float64)]
    )
    plain, compiled = (kernels.bind("markov_sample", **moved(weights))(*arguments) for kernels in triton_twins)
    assert torch.equal(plain.tokens, compiled.tokens)
    expected = [3, 5 if uniform < 0.5 else 1025, 1029, {0.0: 0, 0.5: 515}.get(uniform, 1029)]
    assert compiled.tokens[:, 0].tolist() == expected
    torch.testing.assert_close(compiled.probs, plain.probs, rtol=1e-6, atol=0)


def laws(*shape, seed):
    """Some tokens have no mass."""
    logits = random(*shape, seed=seed, size=2.0).double()
    logits = logits.masked_fill(uniforms(*shape, seed=seed + 100) < 0.3, float("-inf"))
    logits[..., 0] = 0.0
    return logits.softmax(-1)


@pytest.mark.parametrize("has_laws", [True, False], ids=["sampled drafts", "greedy drafts"])
@pytest.mark.parametrize("gamma,vocab", [(3, 40), (5, 1500), (0, 7)])
def test_reject_drafts(triton_twins, moved, gamma, vocab, has_laws):
    """Blocks of every length, with drafts that are kept, rejected, impossible, and not verified; ten draws of each."""
    lens = torch.arange(gamma + 1).repeat(10)
    first, num_requests = (lens + 1).cumsum(0) - lens - 1, len(lens)
    p, q = laws(int((lens + 1).sum()), vocab, seed=1), laws(num_requests, gamma, vocab, seed=2)
    if gamma:
        rows = (first[:, None] + torch.arange(gamma)).clamp(max=len(p) - 1)
        q = torch.where(uniforms(num_requests, gamma, 1, seed=3) < 0.5, p[rows], q)  # drafts that are never rejected
        q = torch.where(uniforms(num_requests, gamma, 1, seed=4) < 0.9, q, torch.eye(vocab, dtype=torch.float64)[1])
    drafts = torch.zeros(num_requests, gamma, dtype=torch.int64)
    if gamma:
        drafts = q.flatten(0, 1).multinomial(1, generator=torch.Generator().manual_seed(4)).view(num_requests, gamma)
    arguments = [p, first, lens, drafts, uniforms(num_requests, gamma, seed=5), uniforms(num_requests, seed=6)]
    arguments = moved([*arguments, q if has_laws and gamma else None])
    plain, compiled = (kernels.bind("reject_drafts")(*arguments) for kernels in triton_twins)
    assert torch.equal(plain.accepted, compiled.accepted) and torch.equal(plain.tokens, compiled.tokens)
    if gamma:
        assert not has_laws or len(plain.accepted.unique()) > 2


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_reject_drafts_at_the_ends(triton_twins, moved, uniform):
    """A residual that rounding has left without mass gives way to p; a coin of 0 keeps what has mass in p; draws at
    both ends of a law find tokens with mass."""
    p = torch.zeros(4, 1100, dtype=torch.float64)
    p[0, [4, 1050]], p[1, 7], p[2, [2, 1099]], p[3, 1] = 0.5, 1.0, 0.5, 1.0
    q = torch.zeros(2, 1, 1100, dtype=torch.float64)
    q[0, 0], q[1, 0, [4, 1099]] = p[0] * 2, 0.5
    first, lens, drafts = torch.tensor([0, 2]), torch.tensor([1, 1]), torch.tensor([[4], [4]])
    coins, last = torch.tensor([[0.99], [0.0]]).double(), torch.full((2,), uniform, dtype=torch.float64)
    arguments = moved([p, first, lens, drafts, coins, last, q])
    plain, compiled = (kernels.bind("reject_drafts")(*arguments) for kernels in triton_twins)
    assert plain.accepted.tolist() == compiled.accepted.tolist() == [0, 0]
    assert plain.tokens.tolist() == compiled.tokens.tolist() == [4 if uniform == 0 else 1050, 2]


def test_nothing_to_judge(triton_twins, moved):
    empty = [torch.empty(0, 5).double(), *[torch.empty(0, dtype=torch.int64)] * 2, torch.empty(0, 2, dtype=torch.int64)]
    arguments = moved([*empty, torch.empty(0, 2).double(), torch.empty(0).double(), None])
    for kernels in triton_twins:
        assert [len(field) for field in kernels.bind("reject_drafts")(*arguments)] == [0, 0]
