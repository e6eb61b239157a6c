"""The mixture of experts under every ep x moe_tp cut of 1, 2, 4 and 8 ranks, against one token at a time in float64."""

import pytest
import torch
from dspark.comm.dispatch import DispatchOptions, Exchange, StepRows, make_dispatcher
from dspark.layers.kernels import Kernels
from dspark.layers.moe import Experts, MoE, MoESizes, SharedExpert
from dspark.layers.params import Scope
from dspark.parallel.groups import Group, Groups
from dspark.parallel.topology import Topology

HIDDEN, EXPERTS, TOP_K, WIDTH, VOCAB, LIMIT, SCALE = 14, 8, 3, 16, 20, 1.5, 2.5
CPU = torch.device("cpu")
NUM_ROWS = (0, 1, 7, 40)
ROUTERS = {
    "scored": ("sqrtsoftplus", True, False),
    "hashed": ("sqrtsoftplus", True, True),
    "softmax": ("softmax", True, False),
    "not renormalised": ("sigmoid", False, False),
}


def sizes_of(router):
    scoring, renormalise, hashed = ROUTERS[router]
    return MoESizes(HIDDEN, EXPERTS, TOP_K, WIDTH, LIMIT, scoring, renormalise, SCALE, hashed, VOCAB)


def weights():
    made = torch.Generator().manual_seed(17)

    def random(*shape):
        return torch.randn(*shape, generator=made) * shape[-1] ** -0.5

    tensors = {"gate.weight": 2 * random(EXPERTS, HIDDEN), "gate.bias": random(EXPERTS)}
    order = torch.rand(VOCAB, EXPERTS, generator=made).argsort(dim=1)
    tensors["gate.tid2eid"] = order[:, :TOP_K].to(torch.int32)
    for expert in [*(f"experts.{e}" for e in range(EXPERTS)), "shared_experts"]:
        tensors[f"{expert}.w1.weight"] = 2 * random(WIDTH, HIDDEN)
        tensors[f"{expert}.w2.weight"] = random(HIDDEN, WIDTH)
        tensors[f"{expert}.w3.weight"] = 2 * random(WIDTH, HIDDEN)
    return tensors


def inputs(num_rows):
    made = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, HIDDEN, generator=made), torch.randint(0, VOCAB, (num_rows,), generator=made)


def dense_expert(w, name, x):
    gate, up = x @ w[f"{name}.w1.weight"].T, x @ w[f"{name}.w3.weight"].T
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (gate * gate.sigmoid() * up) @ w[f"{name}.w2.weight"].T


def dense_moe(router, x, ids):
    """[T, D], the chosen experts, and the weights."""
    scoring, renormalise, hashed = ROUTERS[router]
    w = {name: tensor.double() for name, tensor in weights().items()}
    x = x.double()
    laws = {"sqrtsoftplus": lambda s: (1 + s.exp()).log().sqrt(), "sigmoid": torch.sigmoid}
    out, choices = torch.zeros_like(x), []
    for row in range(len(x)):
        logits = w["gate.weight"] @ x[row]
        scores = logits.softmax(0) if scoring == "softmax" else laws[scoring](logits)
        if hashed:
            chosen = w["gate.tid2eid"][ids[row]].long()
        else:
            chosen = (scores + w["gate.bias"]).argsort(descending=True)[:TOP_K]
        factors = scores[chosen] / (scores[chosen].sum() if renormalise else 1) * SCALE
        for expert, factor in zip(chosen.tolist(), factors):
            out[row] += factor * dense_expert(w, f"experts.{expert}", x[row])
        out[row] += dense_expert(w, "shared_experts", x[row])
        choices.append(sorted(chosen.tolist()))
    return out, choices


def drain(stages):
    """The result of a generator of stages, and how often it yielded."""
    count = 0
    while True:
        try:
            next(stages)
            count += 1
        except StopIteration as end:
            return end.value, count


def run_moe(rank, world, named, backend, ep_sizes):
    results = {}
    for ep in ep_sizes:
        groups = Groups.build(Topology(tp=world, ep=ep), rank)
        for router in ROUTERS:
            moe = MoE(Scope(named(weights())), sizes_of(router), groups, Kernels(backend), layer=3)
            sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN}
            dispatcher = make_dispatcher(DispatchOptions(), groups, **sizes, dtype=torch.float32, device=CPU)
            for num_rows in NUM_ROWS:
                seen = {}

                def probe(name, layer, value, seen=seen):
                    assert layer == 3
                    seen[name] = value.clone().numpy()

                x, ids = inputs(num_rows)
                exchange = Exchange(groups, dispatcher, StepRows((num_rows,), has_prefill=True))
                out, count = drain(moe.stages(x, ids, exchange, probe))
                assert count == 4 and set(seen) == {"experts", "expert_weights", "moe_out"}
                assert torch.equal(out, torch.from_numpy(seen["moe_out"]))
                results[ep, router, num_rows] = seen
    return results


@pytest.mark.parametrize("world,backend", [(1, "torch"), (1, "numba"), (2, "numba"), (4, "torch"), (8, "numba")])
def test_every_cut_equals_dense(run_ranks, named, world, backend):
    ep_sizes = [ep for ep in (1, 2, 4, 8) if ep <= world]
    if backend == "numba":
        pytest.importorskip("numba")
        run_moe(0, 1, named, backend, [1])  # compiles before forking
    dense = {(router, num_rows): dense_moe(router, *inputs(num_rows)) for router in ROUTERS for num_rows in NUM_ROWS}
    for result in run_ranks(run_moe, world, named, backend, ep_sizes):
        assert len(result) == len(ep_sizes) * len(ROUTERS) * len(NUM_ROWS)
        for (ep, router, num_rows), seen in result.items():
            expected, choices = dense[router, num_rows]
            assert [sorted(row) for row in seen["experts"].tolist()] == choices
            torch.testing.assert_close(
                torch.from_numpy(seen["moe_out"]).double(),
                expected,
                rtol=1e-5,
                atol=1e-5,
                msg=lambda text, at=(ep, router, num_rows): f"{at}: {text}",
            )


def run_travelling(rank, world, named, layout, backend):
    """Sums of the rows here and which these are, by dispatcher, router and whether results come in pieces."""
    groups = Groups.build(Topology(tp=world, **layout), rank)
    counts = tuple(7 * (owner + 1) for owner in range(groups.attn_rows.size))
    x, ids = inputs(sum(counts))
    first = sum(counts[: groups.attn_rows.rank])
    own, results = slice(first, first + counts[groups.attn_rows.rank]), {}
    for name in ("normal", "low_latency", "auto"):
        for router in ("scored", "hashed"):
            moe = MoE(Scope(named(weights())), sizes_of(router), groups, Kernels(backend), 3, all_to_all=True)
            sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN}
            options = DispatchOptions(name, max_tokens_per_rank=64)
            dispatcher = make_dispatcher(options, groups, **sizes, dtype=torch.float32, device=CPU)
            for in_pieces in (False, True):
                exchange = Exchange(groups, dispatcher, StepRows(counts, False, in_pieces))
                rows = [exchange.own(v[own]) for v in (x, ids, torch.arange(len(x)))]
                out, _ = drain(moe.stages(*rows[:2], exchange, lambda *seen: None))
                results[name, router, in_pieces] = (out.numpy(), rows[2].numpy())
    return results


@pytest.mark.parametrize("layout", [{"dp": 2, "ep": 4}, {"dp": 4, "ep": 2}, {"cp": 2, "moe_dp": 2, "ep": 2}], ids=str)
def test_travelling_rows_equal_dense(run_ranks, named, layout):
    """The shared expert once, each row on one rank, hybrids with moe_tp, hash routers with ids of their own rows."""
    results = run_ranks(run_travelling, 4, named, layout, "torch")
    total = 21 if layout.get("dp", 1) * layout.get("cp", 1) == 2 else 70
    dense = {router: dense_moe(router, *inputs(total))[0] for router in ("scored", "hashed")}
    for key in results[0]:
        rows = torch.cat([torch.from_numpy(result[key][1]) for result in results])
        out = torch.cat([torch.from_numpy(result[key][0]) for result in results])
        assert sorted(rows.tolist()) == list(range(total)), key
        torch.testing.assert_close(out.double(), dense[key[1]][rows], rtol=1e-5, atol=1e-5)


def pretend(name, size, rank):
    return Group(name, tuple(range(size)), rank, None if size == 1 else object())


@pytest.mark.parametrize("ep,moe_tp", [(1, 1), (1, 4), (4, 2), (8, 1), (2, 4)])
def test_shards_together_are_the_checkpoint(named, ep, moe_tp):
    """gate_up is [expert, in, w1 rows | w3 rows], down [expert, in, out]; each local share is cut out of both."""
    full, share = weights(), WIDTH // moe_tp
    seen = []
    for e in range(ep):
        for t in range(moe_tp):
            experts = Experts(
                Scope(named(full)).scope("experts"),
                sizes_of("scored"),
                pretend("moe_ep", ep, e),
                pretend("moe_tp", moe_tp, t),
                Kernels("torch"),
            )
            gate_up, down = experts.weights
            assert gate_up.shape == (EXPERTS // ep, HIDDEN, 2 * share)
            cut = slice(t * share, (t + 1) * share)
            for local in range(len(gate_up)):
                name = f"experts.{e * len(gate_up) + local}"
                assert torch.equal(gate_up[local, :, :share].T, full[f"{name}.w1.weight"][cut])
                assert torch.equal(gate_up[local, :, share:].T, full[f"{name}.w3.weight"][cut])
                assert torch.equal(down[local].T, full[f"{name}.w2.weight"][:, cut])
                seen.append((e * len(gate_up) + local, t))
    assert sorted(seen) == [(e, t) for e in range(EXPERTS) for t in range(moe_tp)]


@pytest.mark.parametrize(
    "build,numbers",
    [
        (lambda s: Experts(s, sizes_of("scored"), pretend("moe_ep", 3, 0), pretend("moe_tp", 1, 0), None), (8, 3)),
        (lambda s: Experts(s, sizes_of("scored"), pretend("moe_ep", 1, 0), pretend("moe_tp", 5, 0), None), (16, 5)),
        (lambda s: SharedExpert(s, sizes_of("scored"), pretend("tp", 7, 0), Kernels("torch")), (16, 7)),
    ],
)
def test_sizes_that_do_not_divide_are_named(named, build, numbers):
    with pytest.raises(ValueError) as error:
        build(Scope(named(weights())).scope("experts"))
    for number in numbers:
        assert str(number) in str(error.value)
