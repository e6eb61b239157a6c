"""Slices of a checkpoint's tensors, dequantised, for the layers that ask for them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import torch

from ..model_config import Config
from .encoding import (
    Encoding,
    all_finite,
    apply_scales,
    copy_slice,
    decode_fp4,
    decode_fp8,
    decode_plain,
    decode_scales,
)
from .inspection import inspect_checkpoint, require_sound
from .safetensors_file import DTYPE_BITS, CheckpointError, MappedFile, StoredTensor


class CheckpointReader:
    """A :class:`~dspark.layers.params.ParamSource` over a checkpoint folder.

    Construction reads every header and raises :class:`CheckpointError` unless each tensor of the model is there
    exactly once, in the right shape and a readable format, and nothing else is. Afterwards only the slices that are
    asked for are read, through memory maps. Nothing in the folder is ever executed or unpickled.

    Args:
        folder: the checkpoint's folder.
        config: what the model is; see :func:`~dspark.runtime.model_config.load_model_config`.
        dtype: the floating type of tensors that are taken without a dtype of their own.
        progress: called with the number of file bytes after each read, such as the ``update`` of a progress bar.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        config: Config,
        dtype: torch.dtype = torch.float32,
        *,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self._inspection = require_sound(inspect_checkpoint(folder, config))
        self._files = [MappedFile(path) for path in self._inspection.files]
        self._progress = progress
        self._taken: set[str] = set()

    @property
    def has_draft(self) -> bool:
        """Whether the checkpoint holds ``mtp.*`` tensors."""
        return self._inspection.has_draft

    def __contains__(self, name: str) -> bool:
        return name in self._inspection.encodings

    def names(self, role: str | None = None) -> list[str]:
        """The canonical names of all tensors, or of those of the ``role`` target or draft."""
        return [name for name, spec in self._inspection.specs.items() if role in (None, spec.role)]

    def untaken(self, role: str = "target") -> list[str]:
        """Tensors of ``role`` of which nothing was taken here; over all ranks together none should be left.

        Copies of other tensors (``mtp.S.embed.weight``) are left out.
        """
        specs = self._inspection.specs
        return [name for name in self.names(role) if name not in self._taken and specs[name].copy_of is None]

    def nbytes(self, role: str | None = None) -> int:
        """Bytes of the tensors of ``role`` in the files, scales included."""
        return sum(self._inspection.encodings[name].nbytes for name in self.names(role))

    def take(
        self, name: str, *, dim: int = 0, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The tensor ``name``, only ``[start, stop)`` of axis ``dim``, contiguous and owned by the caller.

        Floats, dequantised where need be, come as ``dtype`` or the reader's own; integers come as int64 whatever
        ``dtype`` says. Raises :class:`CheckpointError` when the name is unknown, the range leaves the tensor, a scale
        is not positive, a value is not finite, or an expert id of a table does not exist.
        """
        encoding = self._inspection.encodings.get(name)
        if encoding is None:
            raise CheckpointError(f"{name} is not a tensor of this checkpoint")
        ranges = _ranges(name, encoding.shape, dim, start, stop)
        self._taken.add(name)
        if encoding.form == "integer":
            return self._take_table(name, encoding, ranges)
        if encoding.form == "float":
            words = self._read(encoding.weight, ranges)
            values = decode_plain(encoding.weight.dtype, words)
        else:
            values = self._take_scaled(name, encoding, ranges)
        if not all_finite(values):
            raise CheckpointError(f"{name} holds values that are NaN or infinite")
        return values.to(self.dtype if dtype is None else dtype)

    def check_copies(self) -> None:
        """Raise :class:`CheckpointError` if a tensor that should repeat another (a draft's embedding) differs."""
        for name, spec in self._inspection.specs.items():
            if spec.copy_of is None:
                continue
            rows = spec.shape[0]
            for start in range(0, rows, 4096):
                stop = min(start + 4096, rows)
                mine = self.take(name, start=start, stop=stop, dtype=torch.float32)
                if not torch.equal(mine, self.take(spec.copy_of, start=start, stop=stop, dtype=torch.float32)):
                    raise CheckpointError(f"{name} should repeat {spec.copy_of}, but rows {start} to {stop} differ")

    def _read(self, tensor: StoredTensor, ranges: list[tuple[int, int]]) -> np.ndarray:
        """A copy of ``ranges`` of the stored elements, as integer words; packed FP4 counts in bytes here."""
        itemsize = max(DTYPE_BITS[tensor.dtype] // 8, 1)
        shape = tensor.shape if tensor.dtype != "F4" else (*tensor.shape[:-1], tensor.shape[-1] // 2)
        # Whole rows are one range of bytes; map no more than they need.
        row_bytes = tensor.nbytes // shape[0]
        first, last = ranges[0]
        data = self._files[tensor.file].bytes(tensor.begin + first * row_bytes, (last - first) * row_bytes)
        words = copy_slice(data, (last - first, *shape[1:]), itemsize, [(0, last - first), *ranges[1:]])
        if self._progress is not None:
            self._progress(words.nbytes)
        return words

    def _take_table(self, name: str, encoding: Encoding, ranges: list[tuple[int, int]]) -> torch.Tensor:
        table = decode_plain(encoding.weight.dtype, self._read(encoding.weight, ranges)).to(torch.int64)
        num_experts = self.config.num_experts
        if table.numel() and not 0 <= int(table.min()) <= int(table.max()) < num_experts:
            raise CheckpointError(
                f"{name} names experts from {int(table.min())} to {int(table.max())}, but there are {num_experts}"
            )
        return table

    def _take_scaled(self, name: str, encoding: Encoding, ranges: list[tuple[int, int]]) -> torch.Tensor:
        (row, row_end), (column, column_end) = ranges
        block_rows, block_columns = encoding.block
        if encoding.form == "fp4":
            # Columns pair up in bytes, so an odd first column begins in the middle of one.
            words = self._read(encoding.weight, [(row, row_end), (column // 2, -(-column_end // 2))])
            values = decode_fp4(words, column % 2, column_end - column)
        else:
            values = decode_fp8(self._read(encoding.weight, ranges))
        if values.numel() == 0:
            return values
        covering = [
            (row // block_rows, -(-row_end // block_rows)),
            (column // block_columns, -(-column_end // block_columns)),
        ]
        try:
            scales = decode_scales(name, encoding.scale.dtype, self._read(encoding.scale, covering))
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        return apply_scales(values, scales, encoding.block, row, column)


def _ranges(name: str, shape: tuple[int, ...], dim: int, start: int, stop: int | None) -> list[tuple[int, int]]:
    if not 0 <= dim < len(shape):
        raise CheckpointError(f"{name} has {len(shape)} axes, so there is no axis {dim}")
    stop = shape[dim] if stop is None else stop
    if not 0 <= start <= stop <= shape[dim]:
        raise CheckpointError(f"{name}: [{start}, {stop}) leaves axis {dim}, which has {shape[dim]} entries")
    ranges = [(0, size) for size in shape]
    ranges[dim] = (start, stop)
    return ranges
