"""Tensors of a model's folder that are read when they are sliced, and of which no more is read than that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import EllipsisType
from typing import Any, Final

import torch
from torch import Tensor

from muster.storage.checksum import combine, crc32_value
from muster.storage.model_folder import ModelFolder, StoredTensor
from muster.words.checkpoint import ITEM_BYTES

TORCH_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Read and cast at a time: what a reader holds beside the tensor that it fills.
BLOCK_BYTES: Final = 8 * 2**20
# Read at a time straight into the tensor: a request costs some milliseconds of CPU, and a failed one is made again.
DIRECT_BYTES: Final = 16 * 2**20

Index = EllipsisType | slice | tuple[slice, ...]


@dataclass(frozen=True)
class ReadRange:
    """Bytes [start, end) of a file were read, and have this CRC-32."""

    file: str
    start: int
    end: int
    crc32: int


class LazyTensor:
    """A tensor in a file, as transformers' converter asks for it, that is by its shape and by slices of it.

    `dtype` is what slices are cast to while they are read; None keeps the file's, and a tensor of integers is never
    cast. `noted` is called with each range that was read.
    """

    def __init__(
        self, folder: ModelFolder, slot: StoredTensor, dtype: torch.dtype | None, noted: Callable[[ReadRange], None]
    ) -> None:
        self._folder, self._slot, self._noted = folder, slot, noted
        self._stored = TORCH_DTYPES[slot.dtype]
        self._dtype = dtype if dtype is not None and self._stored.is_floating_point else self._stored

    def get_shape(self) -> list[int]:
        return list(self._slot.shape)

    def get_dtype(self) -> str:
        return self._slot.dtype

    def __getitem__(self, index: Index) -> Tensor:
        first, rest = _rows_and_rest(index)
        shape = self._slot.shape
        if not shape:
            return self._read(0, 1, ()).reshape(())
        start, stop, _ = first.indices(shape[0])
        rows = self._read(start, max(start, stop), shape[1:])
        return rows[(slice(None), *rest)].contiguous() if rest else rows

    def _read(self, first: int, last: int, inner: tuple[int, ...]) -> Tensor:
        """Read rows [first, last) in blocks; where they are cast, there is never more than one beside the result."""
        out = torch.empty((last - first, *inner), dtype=self._dtype)
        row_bytes = math.prod(inner) * ITEM_BYTES[self._slot.dtype]
        block_bytes = DIRECT_BYTES if self._dtype == self._stored else BLOCK_BYTES
        height = max(1, block_bytes // max(row_bytes, 1))
        for row in range(first, last, height):
            end = min(row + height, last)
            target = out[row - first : end - first]
            raw = target if self._dtype == self._stored else torch.empty_like(target, dtype=self._stored)
            data = memoryview(raw.view(torch.uint8).reshape(-1).numpy().data) if raw.numel() else memoryview(b"")
            at = self._slot.start + row * row_bytes
            if len(data):
                self._folder.files.read_into(self._slot.file, at, data)
                self._noted(ReadRange(self._slot.file, at, at + len(data), crc32_value(data)))
            if raw is not target:
                target.copy_(raw)
        return out


class GrownTable:
    """A table of a row per token (or a bias of a number per token) with rows for new tokens, for the converter.

    `rows` is what it grows to. Each of `new` begins as `mean`, whose shape is that of a row.
    """

    def __init__(self, stored: LazyTensor, rows: int, new: Sequence[int], mean: Tensor) -> None:
        self._stored, self._rows, self._new, self._mean = stored, rows, new, mean

    def get_shape(self) -> list[int]:
        return [self._rows, *self._stored.get_shape()[1:]]

    def get_dtype(self) -> str:
        return self._stored.get_dtype()

    def __getitem__(self, index: Index) -> Tensor:
        first, rest = _rows_and_rest(index)
        start, stop, _ = first.indices(self._rows)
        stop, there = max(start, stop), self._stored.get_shape()[0]
        kept = self._stored[slice(min(start, there), min(stop, there))]
        out = kept.new_zeros((stop - start, *kept.shape[1:]))
        out[: len(kept)] = kept
        for row in self._new:
            if start <= row < stop:
                out[row - start] = self._mean.to(out.dtype)
        return out[(slice(None), *rest)].contiguous() if rest else out


class ShapeOnly:
    """A stand-in for a tensor, of which no byte is read: with it the converter shows whether names and shapes fit.

    `rows` is what a table of tokens grows to."""

    def __init__(self, slot: StoredTensor, rows: int | None = None) -> None:
        shape = slot.shape if rows is None else (rows, *slot.shape[1:])
        self._whole = torch.empty(shape, dtype=TORCH_DTYPES[slot.dtype], device="meta")

    def get_shape(self) -> list[int]:
        return list(self._whole.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self._whole[index]


def _rows_and_rest(index: Index) -> tuple[slice, tuple[slice, ...]]:
    if isinstance(index, EllipsisType):
        return slice(None), ()
    if isinstance(index, slice):
        return index, ()
    return (index[0], tuple(index[1:])) if index else (slice(None), ())


def checksums(ranges: Iterable[ReadRange]) -> dict[str, str]:
    """The CRC-32 of each file's tensors as hex, where the ranges (of all ranks together) cover them without a gap.

    CRCs of neighbouring ranges combine, so that whole files are vouched for though no rank has read one.
    """
    by_file: dict[str, str] = {}
    for file in sorted({entry.file for entry in ranges}):
        parts = sorted({(entry.start, entry.end, entry.crc32) for entry in ranges if entry.file == file})
        if all(before[1] == after[0] for before, after in pairwise(parts)):
            by_file[file] = combine([(f"{crc:08x}", end - start) for start, end, crc in parts])
    return by_file
