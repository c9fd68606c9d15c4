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

from muster.trainer.checkpoint.failures import CheckpointError

ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
_LENGTH = struct.Struct("<Q")
_HEADER_BYTES_MAX = 100_000_000  # the safetensors library's own limit


@dataclass(frozen=True)
class Slot:
    """Where one tensor's bytes lie in the file: [start, end), from the file's first byte."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class ShardLayout:
    header: bytes
    slots: dict[str, Slot]
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
    slots = {name: Slot(dtype, shape, base + a, base + b) for name, (dtype, shape, a, b) in entries.items()}
    return ShardLayout(_LENGTH.pack(len(text)) + text, slots, base + offset)


def header_bytes(first_eight: bytes, where: str) -> int:
    """Bytes before the first tensor. Raises CheckpointError where that can't be."""
    if len(first_eight) < _LENGTH.size:
        raise CheckpointError(f"{where}: is no safetensors file: it ends after {len(first_eight)} bytes")
    length: int = _LENGTH.unpack(first_eight)[0]
    if length > _HEADER_BYTES_MAX:
        raise CheckpointError(f"{where}: is no safetensors file: its header claims {length} bytes")
    return _LENGTH.size + length


def read_header(data: bytes | memoryview, where: str) -> dict[str, Slot]:
    """The slots of a file from its first `header_bytes`. Raises CheckpointError for anything malformed."""
    base = header_bytes(bytes(data[:8]), where)
    try:
        described = json.loads(bytes(data[_LENGTH.size : base]))
        return {
            name: Slot(e["dtype"], tuple(e["shape"]), base + e["data_offsets"][0], base + e["data_offsets"][1])
            for name, e in described.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{where}: its safetensors header is damaged: {error!r}") from error
