"""The layout of one safetensors file, known before a byte of it is copied (https://github.com/huggingface/safetensors).

Eight bytes of header length, the header (JSON, padded with spaces to a multiple of eight), then the tensors without
gaps. Tensors go by descending element size, so that each starts aligned.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from muster.storage.commit_rules import HEADER_BYTES_MAX
from muster.trainer.checkpoint.failures import DamagedCommit
from muster.words.checkpoint import ITEM_BYTES, Size

_LENGTH = struct.Struct("<Q")


class _Entry(BaseModel):
    """A tensor in a safetensors header; data_offsets count from the end of the header."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


_HEADER = TypeAdapter(dict[str, _Entry | dict[str, str]])  # `__metadata__` is of text alone


@dataclass(frozen=True)
class TensorSlot:
    """Place of one tensor in the file: its bytes are [start, end), counted from the file's first byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class ShardLayout:
    header: bytes
    slots: dict[str, TensorSlot]
    size: int


def lay_out(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> ShardLayout:
    """The file that holds these (name, dtype, shape)."""
    ordered = sorted(tensors, key=lambda entry: -ITEM_BYTES[entry[1]])
    offset, entries = 0, {}
    for name, dtype, shape in ordered:
        end = offset + prod(shape) * ITEM_BYTES[dtype]
        entries[name] = (dtype, shape, offset, end)
        offset = end
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    described |= {n: {"dtype": d, "shape": list(s), "data_offsets": [a, b]} for n, (d, s, a, b) in entries.items()}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = _LENGTH.size + len(text)
    slots = {name: TensorSlot(dtype, shape, base + a, base + b) for name, (dtype, shape, a, b) in entries.items()}
    return ShardLayout(_LENGTH.pack(len(text)) + text, slots, base + offset)


def header_bytes(first_eight: bytes, where: str) -> int:
    """Bytes before the first tensor. Raises DamagedCommit where that can't be."""
    if len(first_eight) < _LENGTH.size:
        raise DamagedCommit(f"{where}: is no safetensors file: it ends after {len(first_eight)} bytes")
    length: int = _LENGTH.unpack(first_eight)[0]
    if length > HEADER_BYTES_MAX - _LENGTH.size:
        raise DamagedCommit(f"{where}: is no safetensors file: its header claims {length} bytes")
    return _LENGTH.size + length


def read_header(data: bytes | memoryview, size: int, where: str) -> dict[str, TensorSlot]:
    """The slots of a file of `size` bytes from its first `header_bytes`: known dtypes, tensors of the size of their
    shapes, one behind the other to the end of the file. Raises DamagedCommit for anything else."""
    base = header_bytes(bytes(data[:8]), where)
    if base > len(data):
        raise DamagedCommit(f"{where}: its header claims {base} bytes, and its first tensor begins before their end")
    try:
        described = _HEADER.validate_json(bytes(data[_LENGTH.size : base]))
    except ValidationError as error:
        raise DamagedCommit(f"{where}: its safetensors header is damaged: {error.errors()[0]['msg']}") from None
    described.pop("__metadata__", None)
    slots, end = {}, base
    for name, about in sorted(described.items(), key=lambda entry: _place(entry[1])):
        if not isinstance(about, _Entry) or about.dtype not in ITEM_BYTES:
            raise DamagedCommit(f"{where}: its safetensors header gives no known dtype for {name}")
        begin, end = end, end + prod(about.shape) * ITEM_BYTES[about.dtype]
        if (base + about.data_offsets[0], base + about.data_offsets[1]) != (begin, end):
            raise DamagedCommit(f"{where}: its safetensors header puts {name} where it can't be")
        slots[name] = TensorSlot(about.dtype, about.shape, begin, end)
    if end != size:
        raise DamagedCommit(f"{where}: has {size} bytes, and by its safetensors header {end}")
    return slots


def _place(about: _Entry | dict[str, str]) -> tuple[int, int]:
    return about.data_offsets if isinstance(about, _Entry) else (0, 0)
