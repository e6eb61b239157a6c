"""Routing and expert products, plain and compiled, against float64 formulas of one token at a time."""

import pytest
import torch
from dspark.layers.kernels.moe import Routing

SCORINGS = {
    "sqrtsoftplus": lambda x: (1 + x.double().exp()).log().sqrt() if x.max() < 30 else x.double().clamp(min=0).sqrt(),
    "sigmoid": lambda x: x.double().sigmoid(),
    "softmax": lambda x: x.double().softmax(-1),
}


def random(*shape, seed=0, size=1.0):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(actual, expected, bound=1e-5):
    torch.testing.assert_close(actual.double(), expected, rtol=bound, atol=bound)


def check_weights(routing, scores, renormalise, scale):
    expected = scores.gather(1, routing.experts)
    if renormalise:
        expected = expected / (expected.sum(1, keepdim=True) + 1e-20)
    assert routing.weights.dtype == torch.float32
    near(routing.weights, expected * scale)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("num_rows,num_experts,top_k", [(0, 4, 2), (1, 1, 1), (5, 3, 3), (40, 16, 6)])
def test_route_scored(twins, num_rows, num_experts, top_k, scoring, renormalise):
    logits, bias = random(num_rows, num_experts, size=2.0), random(num_experts, seed=1, size=0.3)
    scores = SCORINGS[scoring](logits) if num_rows else logits.double()
    for kernels in twins:
        route = kernels.bind(
            "route_scored", bias=bias, top_k=top_k, scoring=scoring, renormalise=renormalise, scale=1.5
        )
        routing = route(logits)
        assert routing.experts.shape == (num_rows, top_k) and routing.experts.dtype == torch.int64
        for row, biased in enumerate((scores + bias.double()).tolist()):
            ranked = sorted(range(num_experts), key=lambda e: (-biased[e], e))
            assert routing.experts[row].tolist() == ranked[:top_k]
        check_weights(routing, scores, renormalise, 1.5)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_of_equal_scores_the_lower_id_wins(twins, scoring, top_k):
    logits = torch.zeros(4, 6)
    logits[1, 3:] = 1.0
    logits[2, ::2] = -1.0
    logits[3, 5] = 2.0
    expected = torch.tensor([[0, 1, 2, 3, 4, 5], [3, 4, 5, 0, 1, 2], [1, 3, 5, 0, 2, 4], [5, 0, 1, 2, 3, 4]])
    for kernels in twins:
        route = kernels.bind(
            "route_scored", bias=torch.zeros(6), top_k=top_k, scoring=scoring, renormalise=True, scale=1.0
        )
        assert route(logits).experts.tolist() == expected[:, :top_k].tolist()


def test_tiny_scores_of_a_softmax_keep_their_order(twins):
    """Down to 1e-43, far below what a sum beside a 1 would notice."""
    logits = torch.tensor([[0.0, -90.0, -95.0, -100.0, -88.0, -200.0]])
    for kernels in twins:
        route = kernels.bind(
            "route_scored", bias=torch.zeros(6), top_k=4, scoring="softmax", renormalise=False, scale=1.0
        )
        assert route(logits).experts.tolist() == [[0, 4, 1, 2]]


@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_bias_chooses_but_does_not_weigh(twins, scoring):
    logits, bias = random(7, 5), torch.tensor([0.0, -1e6, 1e6, 0.0, -1e6])
    for kernels in twins:
        routing = kernels.bind("route_scored", bias=bias, top_k=1, scoring=scoring, renormalise=False, scale=1.0)(
            logits
        )
        assert (routing.experts == 2).all()
        near(routing.weights, SCORINGS[scoring](logits)[:, 2:3])


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("size", [-1e4, 1e4])
def test_extreme_logits(twins, scoring, size):
    """No overflow where every score is at its limit; all-zero scores give zero weights, not a division by zero."""
    logits = torch.full((2, 4), size)
    for kernels in twins:
        routing = kernels.bind("route_hashed", scoring=scoring, renormalise=True, scale=2.0)(
            logits, torch.tensor([[0, 1], [3, 2]])
        )
        vanishes = size < 0 and scoring != "softmax"
        near(routing.weights, torch.full((2, 2), 0.0 if vanishes else 1.0, dtype=torch.float64))


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_route_hashed(twins, num_rows, scoring, renormalise):
    logits = random(num_rows, 8)
    experts = torch.randint(0, 8, (num_rows, 3), generator=torch.Generator().manual_seed(2))
    scores = SCORINGS[scoring](logits) if num_rows else logits.double()
    for kernels in twins:
        routing = kernels.bind("route_hashed", scoring=scoring, renormalise=renormalise, scale=0.7)(logits, experts)
        assert torch.equal(routing.experts, experts)
        check_weights(routing, scores, renormalise, 0.7)


def dense_swiglu(gate_up, limit):
    gate, up = gate_up.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * gate.sigmoid() * up


@pytest.mark.parametrize("limit", [0.5, 10.0, float("inf")])
@pytest.mark.parametrize("size", [0.0, 1.0, 500.0])
@pytest.mark.parametrize("num_rows,width", [(0, 3), (1, 1), (6, 5), (3, 64)])
def test_swiglu(twins, num_rows, width, size, limit):
    """The gate is clamped from above only and before silu, the other half on both sides."""
    gate_up = random(num_rows, 2 * width, size=size)
    for kernels in twins:
        near(kernels.bind("swiglu", limit=limit)(gate_up), dense_swiglu(gate_up, limit))


def dense_experts(x, routing, gate_up, down, limit):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for i in range(x.shape[0]):
        for expert, weight in zip(routing.experts[i].tolist(), routing.weights[i].tolist()):
            if expert >= 0:
                inner = dense_swiglu(x[i].double() @ gate_up[expert].double(), limit)
                out[i] += weight * (inner @ down[expert].double())
    return out


def check_experts(twins, x, routing, num_experts, width, limit=2.0):
    gate_up = random(num_experts, x.shape[1], 2 * width, seed=3, size=x.shape[1] ** -0.5)
    down = random(num_experts, width, x.shape[1], seed=4, size=width**-0.5)
    expected = dense_experts(x, routing, gate_up, down, limit)
    for kernels in twins:
        near(kernels.bind("experts_forward", gate_up=gate_up, down=down, limit=limit)(x, routing), expected)


# More than 96 picks of 3 experts are library products in the compiled kernels too.
@pytest.mark.parametrize("num_rows", [0, 1, 3, 14, 32, 33])
@pytest.mark.parametrize("hidden,width", [(1, 1), (7, 5), (16, 9), (24, 17)])
@pytest.mark.parametrize("elsewhere", [0.0, 0.5, 1.0], ids=["all here", "half elsewhere", "all elsewhere"])
def test_experts_forward(twins, num_rows, hidden, width, elsewhere):
    made = torch.Generator().manual_seed(num_rows)
    experts = torch.rand(num_rows, 3, generator=made).argsort(dim=1) if num_rows else torch.empty(0, 3).long()
    experts = torch.where(torch.rand(num_rows, 3, generator=made) < elsewhere, -1, experts)
    routing = Routing(experts, torch.rand(num_rows, 3, generator=made))
    check_experts(twins, random(num_rows, hidden), routing, 3, width)


@pytest.mark.parametrize("num_rows", [2, 60, 200])
def test_one_expert_gets_every_token(twins, num_rows):
    routing = Routing(torch.full((num_rows, 1), 4), torch.ones(num_rows, 1))
    check_experts(twins, random(num_rows, 6), routing, 5, 7)


@pytest.mark.parametrize("num_rows", [2, 20, 60])
def test_an_expert_chosen_twice_counts_twice(twins, num_rows):
    experts = torch.tensor([[1, 1, -1]]).expand(num_rows, 3).contiguous()
    check_experts(twins, random(num_rows, 6), Routing(experts, random(num_rows, 3, seed=1).abs()), 2, 7)
