"""Every dispatcher: rows to identity experts and back are the weighted sum, whatever the routing; misuse is refused.

References are exact: an identity expert gives its row back, so a row comes home as itself times the sum of its weights.
"""

import numpy as np
import pytest
import torch
from dspark.comm.dispatch import DispatchOptions, Exchange, StepRows, make_dispatcher
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology

EXPERTS, TOP_K, WIDE, CPU = 16, 4, 128, torch.device("cpu")
NAMES = ("standard", "normal", "low_latency", "auto")
SIZES = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": WIDE}


def routing(kind, num_rows, seed):
    """Experts and weights of ``num_rows`` rows; no expert twice in a row."""
    dice = np.random.default_rng([seed, num_rows])
    if kind == "skewed":
        laws = dice.dirichlet(np.full(EXPERTS, 0.2)) + 1e-9
        rows = [dice.choice(EXPERTS, TOP_K, replace=False, p=laws / laws.sum()) for _ in range(num_rows)]
    else:
        rows = [dice.permutation(EXPERTS)[:TOP_K] for _ in range(num_rows)]
    experts = np.array(rows, np.int64).reshape(num_rows, TOP_K)
    if kind == "to one":
        experts[:, 0], experts[:, 1:] = EXPERTS - 1, -1
    elif kind == "padded":
        experts[dice.random(experts.shape) < 0.4] = -1
    elif kind == "nowhere":
        experts[:] = -1
    return torch.from_numpy(experts), torch.from_numpy(dice.random(experts.shape, np.float32) + 0.1)


def identity(received, rows, group):
    """What experts that give back their rows, shared by ``group``, return for ``rows`` of those received."""
    weights = torch.where(received.experts[rows] >= 0, received.weights[rows], 0).sum(1, keepdim=True)
    return received.x[rows] * weights / group.size


def exchange_rows(dispatcher, groups, x, experts, weights):
    dispatcher.begin_dispatch(x, experts, weights)
    received = dispatcher.finish_dispatch()
    for rows in received.pieces:
        dispatcher.begin_combine(identity(received, rows, groups.moe_tp))
    return dispatcher.finish_combine(), received


CASES = [
    # counts of each row owner, routing
    ("random", 5),
    ("random", 150),
    ("skewed", 40),
    ("to one", 30),
    ("padded", 33),
    ("nowhere", 7),
    ("random", 0),
]


def run_dispatchers(rank, world, layout, nodes, names):
    groups = Groups.build(Topology.make(world, **layout, nodes=nodes), rank)
    owner, num_owners = groups.attn_rows.rank, groups.attn_rows.size
    failures = []
    for name in names:
        options = DispatchOptions(name, max_tokens_per_rank=640)
        dispatcher = make_dispatcher(options, groups, **SIZES, dtype=torch.float32, device=CPU)
        for each in (dispatcher, dispatcher.twin()):
            for in_pieces in (False, True):
                for kind, most in CASES:
                    # The first owner has none, the last one most.
                    shape = range(1, 2) if num_owners == 1 else range(num_owners)
                    counts = tuple(most * i // max(num_owners - 1, 1) for i in shape)
                    has_prefill = most > 30
                    exchange = Exchange(groups, each, StepRows(counts, has_prefill, in_pieces))
                    x = torch.randn(counts[owner], WIDE, generator=torch.Generator().manual_seed(owner))
                    experts, weights = routing(kind, counts[owner], owner)
                    sums = torch.where(experts >= 0, weights, 0).sum(1, keepdim=True)
                    got, received = exchange_rows(each, groups, *(exchange.own(v) for v in (x, experts, weights)))
                    same = torch.allclose(got, exchange.own(x * sums), rtol=1e-5, atol=1e-5)
                    num_local = EXPERTS // groups.moe_ep.size
                    if not (same and ((received.experts >= -1) & (received.experts < num_local)).all()):
                        failures.append((name, kind, most, in_pieces))
    return failures


LAYOUTS = [
    (2, {"dp": 2}, None),
    (4, {"dp": 4}, (0, 0, 1, 1)),
    (4, {"dp": 2, "ep": 4}, (0, 1, 0, 1)),
    (4, {"dp": 4, "ep": 2}, (0, 0, 1, 1)),
    (4, {"cp": 2, "moe_dp": 2, "ep": 2}, None),
    (4, {"ep": 4}, (0, 1, 1, 1)),
    (8, {"dp": 4, "ep": 4}, (0, 0, 0, 0, 1, 1, 1, 1)),
]


@pytest.mark.parametrize("world,layout,nodes", LAYOUTS, ids=str)
def test_identity_experts_give_the_weighted_sum(run_ranks, world, layout, nodes):
    assert run_ranks(run_dispatchers, world, layout, nodes, NAMES) == [[]] * world
