"""Keys in 8-bit floats: how far they are off, and that every kernel reads and writes the same bytes.

Triton's kernels run in the interpreter, or on a GPU. Rows and entries that must not be read hold bytes of NaN.
"""

import pytest
import torch
from dspark.layers.kernels import Kernels
from dspark.layers.kernels.packed_keys import pack_keys, packed_width, unpack_keys

SIZES = [(512, 64), (18, 4), (132, 6), (66, 64), (10, 2)]
SPANS = {
    "no rows": (),
    "chunk longer than its ring": ((5, 7),),
    "prompt, decode, nothing, verify": ((0, 2), (17, 1), (9, 0), (30, 3)),
}


def random(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_of_all_sizes(width, dtype=torch.float32):
    """Noise of many magnitudes; a row of zeros, one with an outlier, and a tiny one."""
    rows = random(12, width, seed=1) * torch.logspace(-20, 20, 12).unsqueeze(1)
    rows[0], rows[1, 3], rows[2, 5:] = 0.0, 1e15, 0.0
    return rows.to(dtype)


@pytest.mark.parametrize("width,rotary", SIZES)
def test_numbers_are_within_their_bounds(width, rotary):
    keys, plain = rows_of_all_sizes(width), width - rotary
    packed = pack_keys(keys, rotary)
    assert packed.shape == (12, packed_width(width, rotary)) and packed.dtype == torch.uint8
    again = unpack_keys(packed, width, rotary)
    error = (again - keys).abs()
    assert (error[:, plain:] <= keys[:, plain:].abs() / 256).all()
    for begin in range(0, plain, 64):
        part = slice(begin, min(begin + 64, plain))
        largest = keys[:, part].abs().amax(1, keepdim=True)
        assert (error[:, part] <= torch.maximum(keys[:, part].abs() / 16, largest * 2 / 448 / 1024)).all()
    assert torch.equal(unpack_keys(pack_keys(again, rotary), width, rotary), again)


def test_bytes_of_a_row():
    """By hand: the tail, codes of e4m3 (sign, 4 bits of exponent with bias 7, 3 of mantissa), exponents, zeros."""
    keys = torch.tensor([[448.0, -1.0, 0.0, 1.75 * 2**-6, 1.0, -2.0]])
    expected = [0x80, 0x3F, 0x00, 0xC0, 0x7E, 0xB8, 0x00, 0x0E, 127, *[0] * 7]
    assert pack_keys(keys, 2)[0].tolist() == expected
    assert pack_keys(keys * 2, 2)[0, 4:9].tolist() == [0x7E, 0xB8, 0x00, 0x0E, 128]
    assert packed_width(512, 64) == 584


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width,rotary", SIZES)
def test_pack_keys(triton_twins, moved, width, rotary, dtype):
    """Signs of zeros may differ."""
    keys = rows_of_all_sizes(width + 1, dtype)[:, 1:]
    plain, compiled = (kernels.bind("pack_keys", rotary=rotary)(moved(keys)).cpu() for kernels in triton_twins)
    assert plain.shape == compiled.shape
    assert torch.equal(unpack_keys(plain, width, rotary), unpack_keys(compiled, width, rotary))
    assert compiled[:, 2 * rotary + width - rotary :].tolist() == plain[:, 2 * rotary + width - rotary :].tolist()


def packed_scene(scene, rotary):
    """The scene with packed keys and entries, and the same with what these say in float32."""
    width = scene.keys.shape[1]
    buffers = [scene.keys, scene.cache.window, scene.cache.entries]
    packed = [pack_keys(x.flatten(0, -2), rotary).unflatten(0, x.shape[:-1]) for x in buffers]
    for x, rows in zip(buffers, packed):
        rows[x.isnan().any(-1)] = 0x7F  # NaN in e4m3
    wide = [unpack_keys(rows, width, rotary) for rows in packed]
    made = []
    for keys, window, entries in (packed, wide):
        made.append(scene._replace(keys=keys, cache=scene.cache._replace(window=window, entries=entries, host=None)))
    return made


@pytest.mark.parametrize("kind", ["sliding", "all entries", "selected entries", "blocks"])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_attend(triton_twins, scenes, tables, moved, spans, kind):
    """Every kernel gives what the plain one gives of the unpacked keys."""
    scene = scenes(seed=3, spans=spans, d=70, ring=6, per_page=2)
    packed, wide = packed_scene(scene, 4)
    plan, num_rows = scene.plan._replace(bidirectional=kind == "blocks"), scene.keys.shape[0]
    q, selected = random(num_rows, 3, 70, seed=1), None
    if kind == "selected entries":
        draws = torch.rand(num_rows, 12, generator=torch.Generator().manual_seed(2)).argsort(1)
        selected = torch.where(draws < (plan.queries.positions[:, None] + 1) // 4, draws, -1)[:, :5]
    weights = {"sinks": random(3, seed=4), "window": 6, "ratio": 0 if kind == "sliding" else 4}
    weights |= {"rope": tables(4, 64), "scale": 0.4}
    plain, compiled = triton_twins
    expected = plain.bind("attend", **weights)(q, wide.keys, wide.cache, selected, plan)
    assert torch.equal(plain.bind("attend", **weights)(q, packed.keys, packed.cache, selected, plan), expected)
    found = compiled.bind("attend", **moved(weights))(*moved((q, packed.keys, packed.cache, selected, plan)))
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-5, atol=2e-5)


def test_attention_is_within_its_bound(scenes, tables):
    """A logit moves by at most D = scale max_k sum_c |q_c| |error_kc|, so a probability by a factor of e^(2 D) at most:
    the output by (e^(2 D) - 1) max |key| + max |error|, and as much again for the rotation that mixes two channels."""
    scene = scenes(seed=5, spans=((40, 4), (3, 9)), d=96, ring=16, per_page=2)
    _, wide = packed_scene(scene, 16)
    q, weights = random(13, 4, 96, seed=1), {"sinks": random(4, seed=2), "window": 12, "ratio": 4, "scale": 96**-0.5}
    attend = Kernels("torch").bind("attend", rope=tables(16, 64), **weights)
    exact = attend(q, scene.keys, scene.cache._replace(host=None), None, scene.plan)
    error = (attend(q, wide.keys, wide.cache, None, scene.plan) - exact).abs().amax()
    known = torch.cat([torch.cat((history.keys, history.entries)) for history in scene.histories])
    off = (unpack_keys(pack_keys(known, 16), 96, 16) - known).abs()
    delta = 96**-0.5 * (q.abs().flatten(0, 1) @ off.T).amax()
    bound = 2**0.5 * (torch.expm1(2 * delta) * known.abs().amax() + off.amax())
    assert 0 < error < bound, (error, bound)
    assert error < 0.1 * exact.abs().amax()  # and far below it


@pytest.mark.parametrize("overlap", [False, True], ids=["hca", "csa"])
@pytest.mark.parametrize("backend", ["numba", "triton"])
def test_pool_and_store(scenes, tables, moved, backend, overlap):
    """Entries and ring rows hold the same numbers, whatever wrote them."""
    pytest.importorskip(backend)
    d, rotary, raw_width = 70, 4, (1 + overlap) * 2 * 70
    sizes = {"d": d, "raw_width": raw_width, "raw_ring": 8}
    scene = scenes(seed=1, entries_known=False, spans=((0, 2), (17, 5), (9, 0), (30, 3)), **sizes)
    packed, _ = packed_scene(scene, rotary)
    weights = {
        "ape": random(4, (1 + overlap) * d, seed=1),
        "norm_weight": random(d, seed=2),
        "rope": tables(rotary, 64),
    }
    weights |= {"eps": 1e-5, "ratio": 4, "overlap": overlap, "indexer": False}
    made = []
    for name in ("torch", backend):
        kernels = Kernels(name)
        move = moved if name == "triton" else lambda thing: thing
        cache = move(type(scene.cache)(*(buffer.clone() for buffer in packed.cache[:4]), None))
        kernels.bind("pool_windows", **move(weights))(*move((scene.raw, cache, scene.plan)))
        kernels.bind("store_rows")(*move((packed.keys, scene.raw, cache, scene.plan)))
        made.append(cache)
    for name in ("window", "entries"):
        before, after = (unpack_keys(getattr(cache, name).cpu(), d, rotary) for cache in made)
        assert torch.equal(before.isnan(), after.isnan())
        # Sums in another order may cross to the next code; a step is an eighth of a number.
        torch.testing.assert_close(after, before, rtol=0.126 if name == "entries" else 0, atol=1e-4, equal_nan=True)
        close = (before - after).abs() <= 1e-5 * before.abs()
        assert name == "window" or (close | before.isnan()).float().mean() > 0.95
