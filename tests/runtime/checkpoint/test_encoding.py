"""FP8 and packed FP4 against dequantisation written another way."""

import itertools

import numpy as np
import pytest
import torch
from dspark.runtime.checkpoint import CheckpointError, CheckpointReader
from dspark.runtime.model_config import load_model_config
from safetensors.torch import load_file

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(byte):
    """One FP8 value from its bits: sign, 4 exponent bits with bias 7, 3 fraction bits; no infinities."""
    sign, exponent, fraction = -1.0 if byte & 128 else 1.0, (byte >> 3) & 15, byte & 7
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([e4m3(byte) for byte in range(256)])


def fp8(generator, shape, block, scales):
    """(weight entry, scale entry, float64 values) of a random FP8 tensor; no byte is NaN."""
    weight = generator.integers(0, 254, shape, dtype=np.uint8)
    weight[weight == 0x7F] = 0
    grid = tuple(-(-size // edge) for size, edge in zip(shape, block))
    if scales == "F32":
        stored = generator.uniform(0.001, 2.0, grid).astype(np.float32)
        factors, entry = stored.astype(np.float64), stored
    else:
        stored = generator.integers(110, 135, grid, dtype=np.uint8)
        factors = 2.0 ** (stored.astype(np.float64) - 127)
        entry = (scales, grid, stored.tobytes())
    values = np.empty(shape)
    for row, column in itertools.product(*map(range, shape)):
        values[row, column] = E4M3[weight[row, column]] * factors[row // block[0], column // block[1]]
    return ("F8_E4M3", shape, weight.tobytes()), entry, values


def fp4(generator, shape, block, dtype):
    """The same for packed FP4; the even column is the low nibble."""
    nibbles = generator.integers(0, 16, shape, dtype=np.uint8)
    packed = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    exponents = generator.integers(110, 135, (shape[0], shape[1] // block), dtype=np.uint8)
    values = np.empty(shape)
    for row, column in itertools.product(*map(range, shape)):
        nibble = int(nibbles[row, column])
        sign = -1.0 if nibble & 8 else 1.0
        values[row, column] = sign * E2M1[nibble & 7] * 2.0 ** (int(exponents[row, column // block]) - 127)
    stored_shape = shape if dtype == "F4" else packed.shape
    return (dtype, stored_shape, packed.tobytes()), ("F8_E8M0", exponents.shape, exponents.tobytes()), values


def with_quantised(tiny, make, names):
    """The tiny model's tensors with those of ``names`` quantised by ``make(shape)``, and the expected values."""
    tensors, expected = dict(tiny.weights), {}
    for name in names:
        weight, scale, values = make(tiny.weights[name].shape)
        tensors[name], expected[name] = weight, values
        tensors[name.removesuffix("weight") + "scale"] = scale
    return tensors, expected


def assert_all_slices(reader, expected):
    """Ranges of both axes in steps that are no divisor of a block, and empty ones."""
    for name, values in expected.items():
        want = torch.as_tensor(values, dtype=torch.float32)
        assert torch.equal(reader.take(name), want), name
        for dim in (0, 1):
            size = values.shape[dim]
            for start, stop in [*itertools.combinations([*range(0, size + 1, 7), size], 2), (5, 5), (size, size)]:
                part = reader.take(name, dim=dim, start=start, stop=stop)
                assert torch.equal(part, want.narrow(dim, start, stop - start)), (name, dim, start, stop)


LINEAR = ["layers.1.attn.wq_b.weight", "layers.1.attn.wo_b.weight", "layers.1.attn.indexer.wq_b.weight"]
EXPERTS = [f"layers.2.ffn.experts.1.{matrix}.weight" for matrix in ("w1", "w2", "w3")]
BLOCKS_OF_16 = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}}


@pytest.mark.parametrize("scales", ["F8_E8M0", "U8", "F32"])
@pytest.mark.parametrize("block", [(16, 16), (5, 12), (128, 128)])
def test_fp8_blocks(make_tiny, tmp_path, scales, block):
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block), "scale_fmt": "ue8m0"}
    tiny = make_tiny(quantization_config=quantization)
    generator = np.random.default_rng(11)
    tensors, expected = with_quantised(tiny, lambda s: fp8(generator, s, block, scales), LINEAR + EXPERTS)
    assert_all_slices(CheckpointReader(tiny.write(tmp_path, tensors), tiny.config), expected)


def test_fp8_block_shape_comes_from_the_grid(make_tiny, tmp_path):
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    tiny = make_tiny(quantization_config=quantization)
    generator = np.random.default_rng(12)
    tensors, expected = with_quantised(tiny, lambda s: fp8(generator, s, (8, 8), "F8_E8M0"), LINEAR)
    assert_all_slices(CheckpointReader(tiny.write(tmp_path, tensors), tiny.config), expected)


def test_other_names_of_scales(make_tiny, tmp_path):
    tiny = make_tiny(**BLOCKS_OF_16)
    generator = np.random.default_rng(13)
    tensors, expected = with_quantised(tiny, lambda s: fp8(generator, s, (16, 16), "F32"), LINEAR)
    renamed = {name.replace(".scale", ".weight_scale_inv"): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    assert_all_slices(CheckpointReader(tiny.write(tmp_path, renamed), tiny.config), expected)


def test_stacked_fp8_experts(tiny, tmp_path):
    generator = np.random.default_rng(14)
    tensors, expected = dict(tiny.weights), {}
    prefix = "layers.1.ffn.experts"
    parts = {}
    for expert in range(4):
        for matrix in ("w1", "w2", "w3"):
            name = f"{prefix}.{expert}.{matrix}.weight"
            weight, scale, expected[name] = fp8(generator, tensors.pop(name).shape, (16, 16), "F8_E8M0")
            parts[expert, matrix] = (weight[2], scale[2])
    for target, matrices, shape in (("gate_up_proj", ("w1", "w3"), (4, 64, 32)), ("down_proj", ("w2",), (4, 32, 32))):
        order = [parts[expert, matrix] for expert in range(4) for matrix in matrices]
        grid = (4, shape[1] // 16, 2)
        name = f"model.layers.1.mlp.experts.{target}"
        tensors[name] = ("F8_E4M3", shape, b"".join(part[0] for part in order))
        tensors[f"{name}_scale_inv"] = ("F8_E8M0", grid, b"".join(part[1] for part in order))
    assert_all_slices(CheckpointReader(tiny.write(tmp_path, tensors), tiny.config), expected)


@pytest.mark.parametrize("dtype", ["I8", "U8", "F4"])
@pytest.mark.parametrize("block", [32, 16])
def test_packed_fp4_experts(tiny, tmp_path, dtype, block):
    generator = np.random.default_rng(15)
    tensors, expected = with_quantised(tiny, lambda s: fp4(generator, s, block, dtype), EXPERTS)
    assert_all_slices(CheckpointReader(tiny.write(tmp_path, tensors), tiny.config), expected)


def test_the_smallest_exponent_is_a_subnormal_scale(tiny, tmp_path):
    tensors, _ = with_quantised(tiny, lambda s: fp8(np.random.default_rng(1), s, (128, 128), "U8"), LINEAR[:1])
    ones = np.full(tiny.weights[LINEAR[0]].shape, 0x38, np.uint8)
    tensors[LINEAR[0]] = ("F8_E4M3", ones.shape, ones.tobytes())
    tensors[LINEAR[0].replace("weight", "scale")] = ("F8_E8M0", (1, 1), b"\0")
    value = CheckpointReader(tiny.write(tmp_path, tensors), tiny.config).take(LINEAR[0])
    assert (value == 2.0**-127).all()


def test_results_in_bfloat16_are_exact(make_tiny, tmp_path):
    """An FP8 value has 4 significant bits and these scales are powers of two."""
    tiny = make_tiny(**BLOCKS_OF_16)
    generator = np.random.default_rng(16)
    tensors, expected = with_quantised(tiny, lambda s: fp8(generator, s, (16, 16), "F8_E8M0"), LINEAR)
    reader = CheckpointReader(tiny.write(tmp_path, tensors), tiny.config, torch.bfloat16)
    for name, values in expected.items():
        assert torch.equal(reader.take(name).double(), torch.as_tensor(values))


def test_the_fp8_oracle(shared):
    folder = shared / "oracle" / "v4" / "fp8_release"
    whole = {}
    for path in sorted(folder.glob("model*.safetensors")):
        whole |= load_file(path)
    reader = CheckpointReader(folder, load_model_config(folder))
    scales = {name for name in whole if name.endswith(".scale")}
    assert len(scales) == 65 and set(reader.names()) == set(whole) - scales
    for name in reader.names():
        want = whole[name].to(torch.int64) if name.endswith("tid2eid") else whole[name].float()
        scale = whole.get(name.removesuffix("weight") + "scale") if name.endswith(".weight") else None
        if scale is not None:
            grid = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
            want = want * grid[: want.shape[0], : want.shape[1]]
        assert torch.equal(reader.take(name), want), name
        for dim, size in enumerate(want.shape):
            start, stop = size // 5, size - size // 3
            assert torch.equal(
                reader.take(name, dim=dim, start=start, stop=stop), want.narrow(dim, start, stop - start)
            )


@pytest.mark.parametrize(
    "scale, message",
    [
        (("F8_E8M0", (8, 1), b"\x80" * 7 + b"\xff"), r"scale at \[7, 0\] .* is NaN"),
        (("U8", (8, 1), b"\xff" + b"\x80" * 7), r"scale at \[0, 0\] .* is NaN"),
        (np.array([[1], [0]], np.float32), r"scale at \[1, 0\] .* is 0.0"),
        (np.array([[np.nan], [1]], np.float32), r"is nan"),
        (np.array([[1], [np.inf]], np.float32), r"is inf"),
        (np.array([[-1], [1]], np.float32), r"is -1.0"),
        (np.ones((4, 2), np.float16), "its scale has dtype F16"),
        (np.ones((5, 1), np.float32), "5 scales for 64 values along one axis; no block size fits"),
        (np.ones((4, 2), np.float32), "2 scales for 24 values along one axis; blocks of 12 and of 16 both fit"),
        (np.ones((8,), np.float32), r"its scale has shape \[8\]"),
        (np.ones((4, 0), np.float32), r"its scale has shape \[4, 0\]"),
    ],
    ids=range(11),
)
def test_bad_scales_are_refused(tiny, tmp_path, scale, message):
    name = LINEAR[0]
    assert tiny.weights[name].shape == (64, 24)
    weight = ("F8_E4M3", (64, 24), b"\x38" * (64 * 24))
    folder = tiny.write(tmp_path, {**tiny.weights, name: weight, name.replace("weight", "scale"): scale})
    with pytest.raises(CheckpointError, match=message) as caught:
        CheckpointReader(folder, tiny.config).take(name)
    assert name in str(caught.value)


def test_a_bad_scale_outside_the_slice_is_not_read(tiny, tmp_path):
    name = LINEAR[0]
    scale = ("F8_E8M0", (4, 1), b"\x80\x80\x80\xff")
    tensors = {**tiny.weights, name: ("F8_E4M3", (64, 24), b"\x38" * 1536), name.replace("weight", "scale"): scale}
    reader = CheckpointReader(tiny.write(tmp_path, tensors), tiny.config)
    assert (reader.take(name, start=0, stop=48) == 2).all()
    with pytest.raises(CheckpointError, match="is NaN"):
        reader.take(name, start=0, stop=49)


@pytest.mark.parametrize("dtype", ["I8", "U8", "F8_E4M3", "F8_E5M2", "F64", "I64", "BOOL"])
@pytest.mark.parametrize("name", ["norm.weight", "layers.1.attn.wq_b.weight", "layers.0.ffn.experts.0.w1.weight"])
def test_formats_that_a_tensor_may_not_have(tiny, tmp_path, dtype, name):
    shape = tiny.weights[name].shape
    itemsize = 8 if dtype in ("F64", "I64") else 1
    raw = bytes(itemsize * int(np.prod(shape)))
    with pytest.raises(CheckpointError, match=name):
        CheckpointReader(tiny.write(tmp_path, {**tiny.weights, name: (dtype, shape, raw)}), tiny.config)
