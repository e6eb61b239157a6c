"""Latent attention: both forms give one result, and what a sparse layer chooses; keys rounded to FP8."""

import pytest
import torch
from dspark.layers.attention.dsa import DSASizes, LightningIndexer, fp8_round, hadamard
from dspark.layers.attention.gqa import GQASizes
from dspark.layers.attention.mla import MLASizes, MLAttention
from dspark.layers.attention.plan import Run
from dspark.layers.kernels import Kernels
from dspark.layers.params import Scope
from dspark.layers.rope import build_rope_table
from dspark.parallel.groups import Group

SIZES = MLASizes(32, 4, 24, 16, 12, 8, 10, 1e-6, 20**-0.5)
SHAPES = {
    "wq_a.weight": (24, 32),
    "q_a_layernorm.weight": (24,),
    "wq_b.weight": (4 * 20, 24),
    "kv_a_proj_with_mqa.weight": (24, 32),
    "kv_a_layernorm.weight": (16,),
    "kv_b_proj.weight": (4 * 22, 16),
    "o_proj.weight": (32, 40),
    "wk.weight": (16, 32),
    "k_norm.weight": (16,),
    "k_norm.bias": (16,),
    "weights_proj.weight": (8, 32),
}


class Made:
    def __init__(self, **more):
        self.shapes = SHAPES | more

    def take(self, name, *, dim=0, start=0, stop=None, dtype=None):
        generator = torch.Generator().manual_seed(len(name))
        shape = self.shapes[name]
        return torch.randn(shape, generator=generator).narrow(dim, start, (stop or shape[dim]) - start).contiguous()


@pytest.mark.parametrize("num_rows, num_keys", [(1, 9), (5, 9), (9, 9)])
def test_both_forms(num_rows, num_keys):
    rope, generator = build_rope_table(8, 1e4, 16), torch.Generator().manual_seed(1)
    x, rows = torch.randn(num_rows, 32, generator=generator), torch.randn(num_keys, 24, generator=generator)
    seen = torch.rand(num_rows, num_keys, generator=generator) < 0.7
    seen[:, 0] = True
    outputs = []
    for form in ("naive", "absorbed"):
        layer = MLAttention(Scope(Made()), SIZES, rope, Group.alone(), Kernels("torch"), 0, form)
        made = layer.project(x, torch.arange(num_keys - num_rows, num_keys))
        run = Run(0, 0, num_keys, slice(0, num_rows), slice(0, num_keys), False)
        outputs.append(layer.attend(made, run, rows, seen, False))
    assert (outputs[0] - outputs[1]).abs().max() < 1e-4 * outputs[0].abs().max()


def test_the_cheaper_form():
    released = MLASizes(7168, 128, 1536, 512, 128, 64, 128, 1e-6, 1.0)
    assert released.form(1, 4096) == "absorbed" and released.form(4096, 4096) == "naive"


def test_index_keys_in_fp8():
    """The rotation keeps scores; FP8 with a scale per row is off by at most one part in 16 of each value."""
    turn = hadamard(16)
    assert torch.allclose(turn @ turn.T, torch.eye(16), atol=1e-6)
    with pytest.raises(ValueError, match="index_head_dim is 12"):
        hadamard(12)
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(2)) * torch.logspace(-2, 2, 50).unsqueeze(1)
    assert ((fp8_round(x) - x).abs() <= x.abs() / 16 + x.abs().amax(1, keepdim=True) / 2**14).all()
    made = Made(**{"wq_b.weight": (8 * 16, 24)})
    rope, rows, latent = build_rope_table(8, 1e4, 64), torch.randn(40, 32), torch.randn(40, 24)
    scores = []
    for fp8 in (False, True):
        sizes = DSASizes(SIZES, 8, 16, 5, fp8)
        q, weights, keys = LightningIndexer(Scope(made), sizes, rope, Kernels("torch")).project(
            rows, latent, torch.arange(40)
        )
        scores.append(torch.einsum("thd,ld->thl", q, keys).relu().mul(weights.unsqueeze(2)).sum(1))
    assert (scores[0] - scores[1]).abs().mean() < 0.1 * scores[0].abs().mean()


def test_of_equal_scores_the_earlier_token_is_chosen():
    made = Made(**{"wq_b.weight": (8 * 16, 24)})
    indexer = LightningIndexer(Scope(made), DSASizes(SIZES, 8, 16, 3), build_rope_table(8, 1e4, 8), Kernels("torch"))
    q, weights, keys = torch.ones(2, 8, 16), torch.ones(2, 8), torch.zeros(6, 16)
    keys[4] = 1.0
    seen = torch.tensor([[True] * 6, [True, True, False, False, False, False]])
    chosen = indexer.choose(q, weights, keys, seen)
    assert chosen.tolist() == [[True, True, False, False, True, False], [True, True, False, False, False, False]]


def test_what_is_kept_per_token():
    for ranks, width in ((1, 32), (2, 16), (4, 16), (8, 16)):
        assert GQASizes(64, 8, 2, 8, 1e-6).cache(ranks).entry_width == width
        assert GQASizes(64, 8, 1, 8, 1e-6).cache(ranks).entry_width == 16
        assert SIZES.cache(ranks).entry_width == 16 + 8
        assert DSASizes(SIZES, 8, 16, 5).cache(ranks).index_width == 16
    sliding = GQASizes(64, 8, 2, 8, 1e-6, window=7).cache(1)
    assert (sliding.entry_width, sliding.window, sliding.ring_width) == (0, 7, 32)
