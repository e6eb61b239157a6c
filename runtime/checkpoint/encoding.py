"""How a stored tensor becomes numbers: plain floats and integers, FP8 with block scales, packed FP4 with row scales.

An FP8 weight [R, C] (e4m3) has a grid of scales [ceil(R / br), ceil(C / bc)], one factor per block of br x bc values.
A packed FP4 weight [R, C] lies as [R, C / 2] bytes, the even column in the low four bits (e2m1), with scales
[R, C / b]. A scale is an fp32 number or one exponent byte e, meaning 2^(e - 127). The block sizes follow from
the grids: the config's claim where it fits, else the size that is even or a power of two, if there is just one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from .safetensors_file import StoredTensor
from .spec import TensorSpec

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "U8": torch.uint8, "BOOL": torch.bool}
PACKED_FP4 = ("I8", "U8", "F4")
EXPONENT_SCALES = ("F8_E8M0", "U8")
_WORDS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)


def _pair_table(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """float32 pairs, each as one 64-bit word: looking up two values at a time is what makes decoding fast."""
    return np.ascontiguousarray(np.stack([first, second], axis=1)).view(np.int64).reshape(-1)


def _fp4_pairs() -> np.ndarray:
    """Byte -> values of the even column (its low four bits) and the odd column."""
    values = np.concatenate([_E2M1, -_E2M1])
    return _pair_table(np.tile(values, 16), np.repeat(values, 16))


def _fp8_pairs() -> np.ndarray:
    """Two e4m3 bytes, the first one low -> their values."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    return _pair_table(np.tile(values, 256), np.repeat(values, 256))


_FP4_PAIRS, _FP8_PAIRS = _fp4_pairs(), _fp8_pairs()


class Encoding(NamedTuple):
    """A tensor as the file holds it: ``shape`` in values, its grid of scales, and (rows, columns) of a scaled block."""

    form: str  # "float", "integer", "fp8" or "fp4"
    shape: tuple[int, ...]
    weight: StoredTensor
    scale: StoredTensor | None = None
    block: tuple[int, int] = (1, 1)

    @property
    def nbytes(self) -> int:
        """Bytes in the file, with the scales."""
        return self.weight.nbytes + (self.scale.nbytes if self.scale is not None else 0)

    @property
    def label(self) -> str:
        """The number format for people, such as ``fp8 e4m3, blocks 128x128, ue8m0 scales``."""
        if self.scale is None:
            return self.weight.dtype.lower()
        name = "fp8 e4m3" if self.form == "fp8" else "fp4 e2m1"
        scales = "ue8m0" if self.scale.dtype in EXPONENT_SCALES else "fp32"
        return f"{name}, blocks {self.block[0]}x{self.block[1]}, {scales} scales"


def encoding_of(
    name: str,
    spec: TensorSpec,
    weight: StoredTensor,
    scale: StoredTensor | None,
    claimed_block: tuple[int, int] | None,
) -> Encoding:
    """The encoding of the tensor ``name``; raises ``ValueError`` naming it when it does not fit ``spec``."""
    form = _form(name, spec, weight, scale)
    shape = weight.shape
    if form == "fp4" and weight.dtype != "F4" and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    if shape != spec.shape:
        packed = " (two values a byte)" if form == "fp4" else ""
        raise ValueError(f"{name} has shape {list(shape)}{packed}, but the config asks for {list(spec.shape)}")
    if scale is None:
        return Encoding(form, shape, weight)
    if scale.dtype != "F32" and scale.dtype not in EXPONENT_SCALES:
        raise ValueError(f"{name}: its scale has dtype {scale.dtype}; F32, F8_E8M0 and U8 are supported")
    if len(scale.shape) != 2 or 0 in scale.shape:
        raise ValueError(f"{name}: its scale has shape {list(scale.shape)}, not a grid of rows and columns")
    if form == "fp4":
        return Encoding(form, shape, weight, scale, (1, _fp4_block(name, shape, scale.shape)))
    claimed = claimed_block or (0, 0)
    block = tuple(_block_edge(name, size, count, edge) for size, count, edge in zip(shape, scale.shape, claimed))
    return Encoding(form, shape, weight, scale, (block[0], block[1]))


def _form(name: str, spec: TensorSpec, weight: StoredTensor, scale: StoredTensor | None) -> str:
    dtype = weight.dtype
    if spec.kind == "table":
        form, allowed = "integer", tuple(INTEGERS)
    elif dtype == "F8_E4M3" and spec.kind in ("linear", "expert"):
        form, allowed = "fp8", ("F8_E4M3",)
    elif dtype in PACKED_FP4 and spec.kind == "expert":
        form, allowed = "fp4", PACKED_FP4
    else:
        form, allowed = "float", tuple(FLOATS)
    if dtype not in allowed:
        quantised = {"linear": ", F8_E4M3", "expert": ", F8_E4M3 or packed FP4"}.get(spec.kind, "")
        raise ValueError(f"{name} has dtype {dtype}; it may be {', '.join(allowed)}{quantised}")
    if (scale is not None) != (form in ("fp8", "fp4")):
        state = "has a scale beside it, which would be unused" if scale is not None else "has no scale beside it"
        raise ValueError(f"{name} has dtype {dtype} and {state}")
    return form


def _block_edge(name: str, size: int, count: int, claimed: int) -> int:
    """The edge of the blocks along one axis: the claimed one, else the only one that is even or a power of two."""
    if claimed and -(-size // claimed) == count:
        return claimed
    if count == 1:
        return size
    power = 1 << max(-(-size // count) - 1, 0).bit_length()  # the smallest that gives at most ``count`` blocks
    edges = {size // count} if size % count == 0 else set()
    if -(-size // power) == count:
        edges.add(power)
    if len(edges) == 1:
        return edges.pop()
    claim = f", which is not blocks of {claimed}" if claimed else ""
    raise ValueError(
        f"{name}: {count} scales for {size} values along one axis{claim}; "
        + (f"blocks of {min(edges)} and of {max(edges)} both fit" if edges else "no block size fits")
    )


def _fp4_block(name: str, shape: tuple[int, ...], grid: tuple[int, ...]) -> int:
    rows, columns = shape
    if grid[0] != rows or columns % grid[1] or (columns // grid[1]) % 2:
        raise ValueError(
            f"{name}: packed FP4 of shape {[rows, columns]} needs scales [{rows}, {columns} / an even block], found "
            f"{list(grid)}"
        )
    return columns // grid[1]


def copy_slice(data: np.ndarray, shape: tuple[int, ...], itemsize: int, ranges: list[tuple[int, int]]) -> np.ndarray:
    """An own, contiguous copy of ``ranges`` (one per axis) of the raw ``data``, as integers of ``itemsize`` bytes."""
    words = data.view(_WORDS[itemsize]).reshape(shape)
    return np.array(words[tuple(slice(*bounds) for bounds in ranges)], order="C")


def all_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite. Both carry through to the extremes, which are found far faster."""
    return values.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(values))).all())


def decode_plain(dtype: str, words: np.ndarray) -> torch.Tensor:
    """Raw words of an unquantised tensor as a tensor of the stored type."""
    return torch.from_numpy(words).view({**FLOATS, **INTEGERS}[dtype])


def decode_scales(name: str, dtype: str, words: np.ndarray) -> np.ndarray:
    """Raw scales as float32 factors. Raises ``ValueError`` if one is NaN, infinite, zero or negative."""
    if dtype in EXPONENT_SCALES:
        bad = words == 255
        # By multiplication, since the smallest exponent is a subnormal number and cannot be shifted into place.
        values = np.ldexp(
            np.float32(0.5), words.astype(np.int32) - 126, where=~bad, out=np.ones(words.shape, np.float32)
        )
    else:
        values = words.view(np.float32)
        bad = ~(np.isfinite(values) & (values > 0))
    if bad.any():
        at = np.argwhere(bad)[0].tolist()
        found = "NaN" if dtype in EXPONENT_SCALES else float(values[tuple(at)])
        raise ValueError(f"{name}: the scale at {at} of the part that was read is {found}; scales must be positive")
    return values


def decode_fp8(words: np.ndarray) -> torch.Tensor:
    """FP8 e4m3 bytes as float32 of the same shape."""
    flat = words.reshape(-1)
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    values = _FP8_PAIRS[flat.view(np.uint16)].view(np.float32)
    return torch.from_numpy(values[: words.size].reshape(words.shape))


def decode_fp4(words: np.ndarray, first_column: int, num_columns: int) -> torch.Tensor:
    """Packed bytes [R, B] as float32 [R, num_columns], from value ``first_column`` (0 or 1) of the first byte on."""
    values = torch.from_numpy(_FP4_PAIRS[words].view(np.float32))
    return values[:, first_column : first_column + num_columns].contiguous()


def apply_scales(
    values: torch.Tensor, scales: np.ndarray, block: tuple[int, int], row: int, column: int
) -> torch.Tensor:
    """Multiply ``values`` float32 [R, C], in place, by the factors of their blocks.

    ``scales`` covers the blocks that the values touch; ``row`` and ``column`` are the positions of the first value in
    the whole weight, so that slices may begin and end inside a block.
    """
    num_rows, num_columns = values.shape
    grid = torch.from_numpy(np.ascontiguousarray(scales))
    row_blocks = torch.arange(row, row + num_rows) // block[0] - row // block[0]
    by_row = grid.index_select(0, row_blocks)
    if column % block[1] == 0 and num_columns % block[1] == 0:
        values.view(num_rows, -1, block[1]).mul_(by_row.unsqueeze(-1))
        return values
    column_blocks = torch.arange(column, column + num_columns) // block[1] - column // block[1]
    return values.mul_(by_row.index_select(1, column_blocks))
