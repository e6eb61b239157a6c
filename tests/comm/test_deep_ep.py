"""The deep_ep dispatchers give what the torch ones give, through a library that holds them to its rules."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch
from dspark.comm.dispatch import DispatchSizes, StepRows, dispatcher_class
from dspark.comm.dispatch.deep_ep_library import LibraryError, check_buffer, check_elastic, load_library
from dspark.parallel.groups import Groups
from dspark.parallel.topology import Topology

EXPERTS, TOP_K = 8, 3
ROUTINGS = ("random", "skewed", "one_expert", "some_empty", "nobody", "holes")


def sizes(hidden, most=16, alignment=4, fp8=False):
    cpu = torch.device("cpu")
    return DispatchSizes(EXPERTS, TOP_K, hidden, most, torch.bfloat16, cpu, alignment, fp8)


def tokens(routing, rank, world, hidden):
    """Rows, experts and weights of one rank, and the rows of every rank."""
    counts = [5 + 2 * r for r in range(world)]
    if routing == "some_empty":
        counts = [0 if r % 2 == 0 else 7 for r in range(world)]
    elif routing == "nobody":
        counts = [0] * world
    draw = torch.Generator().manual_seed(100 * ROUTINGS.index(routing) + rank)
    count = counts[rank]
    scores = torch.rand(count, EXPERTS, generator=draw)
    if routing == "skewed":
        scores[:, :2] += 1.0
    elif routing == "one_expert":
        scores[:, 5] += 2.0
    experts = scores.topk(TOP_K).indices
    if routing == "one_expert":
        experts[:, 1:] = -1
    elif routing == "holes":
        experts[torch.rand(count, TOP_K, generator=draw) < 0.4] = -1
    x = torch.randn(count, hidden, generator=draw).bfloat16()
    return x, experts, torch.rand(count, TOP_K, generator=draw), counts


def run_experts(received, first):
    """What made-up experts of this rank (expert e doubles, plus e) give, weighted and added up: [N, D] bfloat16."""
    y = torch.zeros(received.x.shape, dtype=torch.float32)
    for slot in range(received.experts.shape[1]):
        expert = received.experts[:, slot]
        value = received.x.float() * 2.0 + (expert + first)[:, None]
        y += torch.where(expert >= 0, received.weights[:, slot], 0.0)[:, None] * torch.where(
            expert[:, None] >= 0, value, 0.0
        )
    return y.bfloat16()


def dense(x, experts, weights):
    """The same without any dispatch."""
    out = torch.zeros(x.shape)
    for slot in range(experts.shape[1]):
        value = x.float() * 2.0 + experts[:, slot, None]
        out += torch.where(experts[:, slot] >= 0, weights[:, slot], 0.0)[:, None] * value
    return out


def exchange(dispatcher, rows, batch, first):
    dispatcher.open(rows)
    dispatcher.begin_dispatch(*batch)
    received = dispatcher.finish_dispatch()
    dispatcher.begin_combine(run_experts(received, first))
    return dispatcher.finish_combine(), received


def build(world, rank, nodes=2):
    topology = Topology(tp=world, dp=world, ep=world, nodes=tuple(r * nodes // world for r in range(world)))
    return Groups.build(topology, rank)


def _compare(rank, world, name, backend, hidden, fp8):
    groups = build(world, rank, nodes=world // 2)
    first = rank * EXPERTS // world
    ours = dispatcher_class(name, backend)(groups, sizes(hidden, most=32, fp8=fp8))
    like = "normal" if backend == "deep_ep_elastic" else name  # it has one kind of call
    torchs = dispatcher_class(like, "torch")(groups, sizes(hidden, most=32, fp8=fp8))
    worst = 0.0
    for place, routing in enumerate(ROUTINGS):
        x, experts, weights, counts = tokens(routing, rank, world, hidden)
        rows = StepRows(tuple(counts), place % 2 == 0)
        got, received = exchange(ours, rows, (x, experts, weights), first)
        want, reference = exchange(torchs, rows, (x, experts, weights), first)
        assert got.dtype == torch.bfloat16 and received.counts == reference.counts, routing
        assert all(count % 4 == 0 for count in received.counts)
        assert sorted(received.experts.flatten().tolist()) == sorted(reference.experts.flatten().tolist())
        true = dense(x, experts, weights)
        allowed = 0.06 + 0.03 * true.abs()
        if fp8:  # half a unit of 3 bits of mantissa, in every expert's input
            allowed += 2.0 * weights.sum(1, keepdim=True) * x.float().abs() / 16
        assert bool(((got.float() - true).abs() <= allowed).all()), routing
        worst = max(worst, (got.float() - want.float()).abs().max().item() if got.numel() else 0.0)
        if like == "normal":
            assert torch.equal(got, want), routing
    return worst


@pytest.mark.parametrize(
    "world, name, backend, hidden, fp8",
    [
        (2, "normal", "deep_ep", 128, False),
        (4, "normal", "deep_ep", 128, False),
        (8, "normal", "deep_ep", 128, False),
        (2, "low_latency", "deep_ep", 2048, False),
        (8, "low_latency", "deep_ep", 2048, False),
        (4, "low_latency", "deep_ep", 2048, True),
        (4, "auto", "deep_ep", 2048, False),
        (2, "normal", "deep_ep_elastic", 128, False),
        (8, "low_latency", "deep_ep_elastic", 128, False),
        (4, "auto", "deep_ep_elastic", 128, False),
    ],
)
def test_the_results_are_those_of_the_torch_dispatchers(run_ranks, deep_ep, world, name, backend, hidden, fp8):
    """Bitwise in normal mode; else up to the rounding of a sum in another order."""
    worst = run_ranks(_compare, world, name, backend, hidden, fp8)
    assert max(worst) <= 0.0625, worst


def _twins(rank, world):
    groups = build(world, rank)
    first = rank * EXPERTS // world
    one = dispatcher_class("auto", "deep_ep")(groups, sizes(2048))
    two = one.twin()
    for has_prefill in (False, True, False):
        batches = [tokens(routing, rank, world, 2048) for routing in ("random", "holes")]
        for dispatcher, (*_, counts) in zip((one, two), batches):
            dispatcher.open(StepRows(tuple(counts), has_prefill))
        for dispatcher, batch in zip((one, two), batches):
            dispatcher.begin_dispatch(*batch[:3])
        for dispatcher in (one, two):
            received = dispatcher.finish_dispatch()
            dispatcher.begin_combine(run_experts(received, first))
        for dispatcher, batch in zip((one, two), batches):
            torch.testing.assert_close(dispatcher.finish_combine().float(), dense(*batch[:3]), rtol=0.03, atol=0.06)
    third = one.twin()
    for dispatcher in (one, two, third):
        dispatcher.open(StepRows((1,) * world, False))
    batch = [part[:1] for part in tokens("random", rank, world, 2048)[:3]]
    one.begin_dispatch(*batch)
    two.begin_dispatch(*batch)
    with pytest.raises(RuntimeError, match="two dispatches are under way"):
        third.begin_dispatch(*batch)
    return True


def test_two_exchanges_at_once_and_switches_of_the_mode(run_ranks, deep_ep):
    assert all(run_ranks(_twins, 4))


def _too_many(rank, world, backend):
    dispatcher = dispatcher_class("low_latency", backend)(build(world, rank), sizes(2048, most=16))
    with pytest.raises(ValueError, match="17 rows at once, but buffers are for 16"):
        dispatcher.open(StepRows((3, 17), False))
    dispatcher = dispatcher_class("low_latency", backend)(build(world, rank), sizes(2048, most=16))
    dispatcher.open(StepRows((3, 16), False))
    with pytest.raises(RuntimeError, match="finish_dispatch after open"):
        dispatcher.finish_dispatch()
    return True


@pytest.mark.parametrize("backend", ["deep_ep", "deep_ep_elastic"])
def test_too_many_rows_are_refused_before_any_is_sent(run_ranks, deep_ep, backend):
    assert all(run_ranks(_too_many, 2, backend))


def _queues(rank, world):
    with pytest.raises(ValueError, match=r"hold 1024 messages .*--max-tokens-per-rank 512 needs 1026"):
        dispatcher_class("low_latency", "deep_ep")(build(world, rank), sizes(2048, most=512))
    return True


def test_queues_that_are_too_short_are_named_with_both_numbers(run_ranks, deep_ep):
    assert all(run_ranks(_queues, 2))


# --- importing it


def package(tmp_path, monkeypatch, source):
    folder = tmp_path / "deep_ep"
    folder.mkdir()
    (folder / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0].startswith("deep_ep")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    "source, reason, text",
    [
        ("import deep_ep._C", "not built", "its compiled part deep_ep._C is missing"),
        ("import deep_ep_cpp", "not built", "its compiled part deep_ep_cpp is missing"),
        ("import no_such_module_here", "import failed", "needs the module no_such_module_here"),
        (
            "raise ImportError('/x/_C.so: undefined symbol: nvshmem_team_split')",
            "missing symbol",
            "nvshmem_team_split of NVSHMEM",
        ),
        ("raise ImportError('_C.so: undefined symbol: ncclGinPut')", "missing symbol", "ncclGinPut of NCCL"),
        ("raise ImportError('_C.so: undefined symbol: _ZN3c106')", "missing symbol", "of torch, or whatever"),
        (
            "raise ImportError('libnvshmem_host.so.3: cannot open shared object file: No such file')",
            "missing library",
            "libnvshmem_host.so.3 of NVSHMEM cannot be found",
        ),
        ("raise RuntimeError('NCCL 2.29 is loaded, 2.30 was linked')", "import failed", "about NCCL: RuntimeError"),
        ("raise AssertionError('no CUDA device')", "import failed", "about CUDA: AssertionError: no CUDA device"),
        ("1/0", "import failed", "ZeroDivisionError"),
        ("__version__ = '1.0.0'", "another package", "1.0.0 in .* has neither Buffer nor ElasticBuffer.* PyPI is not"),
        ("class ElasticBuffer: pass", "missing class", "no Buffer, but ElasticBuffer: use .* deep_ep_elastic"),
        ("class Buffer:\n def __init__(self, group): pass", "wrong version", r"Buffer.__init__\(num_nvl_bytes\), .*"),
    ],
)
def test_each_way_that_importing_fails_is_named(tmp_path, monkeypatch, source, reason, text):
    package(tmp_path, monkeypatch, source)
    with pytest.raises(LibraryError) as error:
        load_library("Buffer")
    assert error.value.reason == reason and re.search(text, str(error.value)), str(error.value)
    assert "--dispatch-backend torch" in str(error.value)


def test_without_the_package_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(LibraryError, match="not installed|import failed") as error:
        load_library("Buffer")
    assert error.value.reason == "not installed"


def _missing_on_one(rank, world):
    if rank == 1:
        sys.modules["deep_ep"] = None
    with pytest.raises(LibraryError) as error:
        dispatcher_class("normal", "deep_ep")(build(world, rank, nodes=1), sizes(128))
    return str(error.value)


def test_a_rank_that_cannot_import_it_ends_all_with_its_name(run_ranks, deep_ep):
    errors = run_ranks(_missing_on_one, 2)
    assert "on rank 1" in errors[0] and "not installed" in errors[1]


# --- limits


def groups(size, nodes=None):
    ranks = tuple(range(size))
    where = nodes or [rank // 8 for rank in ranks]
    return SimpleNamespace(
        moe_ep=SimpleNamespace(size=size, ranks=ranks), topology=SimpleNamespace(node=lambda rank: where[rank])
    )


@pytest.mark.parametrize(
    "size, changes, text",
    [
        (1, {}, "--ep is 1"),
        (8, {"dtype": torch.float32}, "--dtype is float32"),
        (12, {}, "--ep 12 is no multiple"),
        (6, {}, "no setting for --ep 6; it knows 2, 4, 8"),
        (168, {}, "no setting for --ep 168"),
        (8, {"hidden_size": 2304}, "2048, 2560.*but hidden_size is 2304"),
        (8, {"top_k": 12}, "11 experts, but top-k is 12"),
        (8, {"max_tokens_per_rank": 1025}, "1024 rows a rank, but --max-tokens-per-rank is 1025"),
        (8, {"hidden_size": 2180}, "hidden_size 2180"),
    ],
)
def test_sizes_beyond_the_limits_of_buffer_are_named(size, changes, text):
    base = {"num_experts": 336, "top_k": 8, "hidden_size": 7168, "max_tokens_per_rank": 128, "dtype": torch.bfloat16}
    with pytest.raises(ValueError, match=text):
        check_buffer(groups(size), DispatchSizes(**base | changes, device=torch.device("cpu")), True, True)


def test_ranks_on_other_nodes_than_the_library_thinks_are_named():
    good = DispatchSizes(256, 8, 7168, 128, torch.bfloat16, torch.device("cpu"))
    check_buffer(groups(16), good, True, True)
    with pytest.raises(ValueError, match="takes the 4 expert ranks .* for one node, but they are on 2 nodes"):
        check_buffer(groups(4, [0, 0, 1, 1]), good, True, False)
    check_buffer(groups(4, [0, 0, 1, 1]), good, False, True)


@pytest.mark.parametrize(
    "size, changes, text",
    [
        (1032, {"num_experts": 2064}, "--ep up to 1024, not 1032"),
        (8, {"num_experts": 2056}, "experts up to 2048, not 2056"),
        (4, {"num_experts": 1028}, "experts a rank up to 256, not 257"),
        (8, {"top_k": 33}, "top-k up to 32, not 33"),
    ],
)
def test_sizes_beyond_the_limits_of_elasticbuffer_are_named(size, changes, text):
    base = {"num_experts": 256, "top_k": 8, "hidden_size": 4096, "max_tokens_per_rank": 128, "dtype": torch.bfloat16}
    with pytest.raises(ValueError, match=text):
        check_elastic(groups(size), DispatchSizes(**base | changes, device=torch.device("cpu")))
