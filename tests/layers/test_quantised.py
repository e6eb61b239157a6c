"""Narrow formats: their error bounds, and Triton's kernels against the plain ones."""

import functools

import pytest
import torch
from dspark.comm.dispatch import Received
from dspark.layers.kernels import Kernels, quantised
from dspark.layers.kernels.moe import Routing
from dspark.layers.kernels.quantised import FORMATS
from dspark.layers.moe import Experts, MoESizes, SharedExpert
from dspark.layers.params import Scope
from dspark.parallel.groups import Group


def random(*shape, seed=0, size=1.0):
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 1), (32, 5), (130, 257), (3, 65, 4)])
@pytest.mark.parametrize("name,relative,steps", [("fp8", 1 / 16, 2.0**-10), ("fp4", 1 / 4, 0.25)])
def test_packed_weights_are_near_and_packing_them_again_changes_nothing(name, relative, steps, shape):
    weight = random(*shape, size=3.0) * torch.randn(shape[-1]).exp()
    weight[..., 0, :] = 0.0
    packed = FORMATS[name](weight)
    back = quantised.unpack_weight(packed)
    assert back.shape == weight.shape
    coarsest = packed.scales.max().item() * steps
    assert ((back - weight).abs() <= (relative * weight.abs()).clamp_min(coarsest) * 1.001).all()
    again = FORMATS[name](back)
    assert torch.equal(quantised.unpack_weight(again), back)
    assert torch.equal(back.bfloat16().float(), back)


def test_fp4_rounds_to_nearest_even():
    weight = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -2.6]]).T
    expected = torch.tensor([[0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -3.0]]).T
    assert torch.equal(quantised.unpack_weight(FORMATS["fp4"](weight)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-20, 1.0, 1e15])
def test_packed_rows(moved, size, dtype):
    fp8 = pytest.importorskip("dspark.layers.kernels.triton.fp8", reason="without triton there is nothing to compare")
    x = random(3, 200, size=size).to(dtype)
    x[1, :128] = 0.0
    plain = quantised.pack_rows(x)
    actual = fp8.bind_pack_rows()(moved(x))
    assert ((quantised.unpack_rows(plain) - x.float()).abs() <= x.float().abs() / 16 + plain.scales.max() / 1024).all()
    torch.testing.assert_close(actual.scales.cpu(), plain.scales, rtol=1e-6, atol=0)
    same = actual.values.cpu().float() == plain.values.float()
    assert same.float().mean() >= (1.0 if actual.values.device.type == "cpu" else 0.98)


@pytest.mark.parametrize("num_rows,num_in,num_out", [(0, 8, 8), (3, 150, 140), (17, 64, 5)])
def test_scaled_linear(triton_twins, moved, num_rows, num_in, num_out):
    x, weight = random(num_rows, num_in), random(num_in, num_out, seed=1, size=num_in**-0.5)
    plain, compiled = (Kernels(k.backend, formats={"block_linear": "fp8"}) for k in triton_twins)
    expected = plain.bind("block_linear", weight=weight)(x)
    actual = compiled.bind("block_linear", weight=moved(weight))(moved(x)).cpu()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    # Both factors are off by at most a sixteenth, in signs that do not conspire.
    assert (expected - x @ weight).square().mean().sqrt() < 0.06 or num_rows == 0


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_rows,hidden,width", [(0, 8, 8), (9, 150, 70), (20, 33, 7)])
def test_scaled_experts(triton_twins, moved, num_rows, hidden, width, name):
    experts = torch.randint(-1, 4, (num_rows, 2), generator=torch.Generator().manual_seed(1))
    arguments = (random(num_rows, hidden), Routing(experts, torch.rand(num_rows, 2)))
    weights = {"gate_up": random(4, hidden, 2 * width, seed=2, size=hidden**-0.5), "limit": 2.0}
    weights["down"] = random(4, width, hidden, seed=3, size=width**-0.5)
    plain, compiled = (Kernels(k.backend, formats={"experts_forward": name}) for k in triton_twins)
    expected = plain.bind("experts_forward", **weights)(*arguments)
    actual = compiled.bind("experts_forward", **moved(weights))(*moved(arguments)).cpu()
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def numbers_in(thing, seen):
    """Bytes of all tensors that can be reached from ``thing``, each storage once."""
    if isinstance(thing, torch.Tensor):
        seen[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif isinstance(thing, dict):
        for value in thing.values():
            numbers_in(value, seen)
    elif isinstance(thing, (tuple, list)):
        for value in thing:
            numbers_in(value, seen)
    elif isinstance(thing, functools.partial):
        numbers_in((thing.args, thing.keywords), seen)
    elif getattr(thing, "__closure__", None):
        numbers_in([cell.cell_contents for cell in thing.__closure__], seen)
    elif type(thing).__module__.startswith("dspark"):
        numbers_in(getattr(thing, "__dict__", {}), seen)
    return sum(seen.values())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_packed_weights_are_all_that_a_layer_keeps(named, backend):
    pytest.importorskip(backend)
    width, hidden, num_experts = 256, 128, 2
    shapes = {"w1.weight": (width, hidden), "w3.weight": (width, hidden), "w2.weight": (hidden, width)}
    tensors = {name: random(*shape) for name, shape in shapes.items()}
    tensors |= {f"{e}.{name}": random(*shape) for e in range(num_experts) for name, shape in shapes.items()}
    sizes = MoESizes(hidden, num_experts, 1, width, 1.0, "sigmoid", True, 1.0, False, 8)
    alone, source, numbers = Group.alone(), Scope(named(tensors)), 3 * width * hidden
    for name, most in (("fp8", 1.01), ("fp4", 0.5 + 4 / 32 + 0.01)):
        experts = Experts(source, sizes, alone, alone, Kernels(backend, formats={"experts_forward": name}))
        assert numbers_in(experts, {}) <= most * num_experts * numbers, name
    shared = SharedExpert(source, sizes, alone, Kernels(backend, formats={"block_linear": "fp8"}))
    assert numbers_in(shared, {}) <= 1.01 * numbers


@pytest.mark.parametrize("name", FORMATS)
def test_packed_experts_change_places(named, name):
    """Writing the tensors of one slot to another, as a migration does, moves the expert."""
    shapes = {"w1.weight": (16, 8), "w3.weight": (16, 8), "w2.weight": (8, 16)}
    tensors = {f"{e}.{part}": random(*shape, seed=e) for e in range(3) for part, shape in shapes.items()}
    sizes = MoESizes(8, 3, 1, 16, 1.0, "sigmoid", True, 1.0, False, 8)
    kernels = Kernels("torch", formats={"experts_forward": name})
    experts = Experts(Scope(named(tensors)), sizes, Group.alone(), Group.alone(), kernels)
    x, chosen = random(4, 8), torch.tensor([[0], [1], [2], [0]])
    call = lambda slots: experts(Received(x, slots, torch.ones(4, 1), None), slice(None))
    before = call(chosen)
    for weight in experts.weights:
        assert weight.dtype in (torch.uint8, torch.float32) and len(weight) == 3
        weight[[0, 2]] = weight[[2, 0]]
    experts.bind()
    assert torch.equal(call(2 - chosen), before) and not torch.equal(call(chosen), before)
