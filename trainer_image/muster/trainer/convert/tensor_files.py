"""Tensors of a commit into safetensors files, as they pass by: a few parts of 16 MiB are in memory at a time, and what
changes its layout on the way. What was written is read back and compared."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from muster.storage.checksum import crc32_value
from muster.storage.store import Store
from muster.trainer.checkpoint.shard_file import TensorSlot, lay_out
from muster.trainer.convert.merge import WeightDelta
from muster.trainer.convert.pieces import stream, whole
from muster.trainer.convert.transformers_names import TensorConversion
from muster.trainer.errors import StorageError
from muster.trainer.models.nf4_format import absmax_name, decode, packed_name
from muster.words.checkpoint import Commit

MODEL = "model/"
_TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


@dataclass(frozen=True)
class WriteTarget:
    """Destination of a tensor: an open file and its slot there, what is added to the tensor on the way, and whether
    fp32 becomes bf16."""

    file: int
    path: Path
    slot: TensorSlot
    narrow: bool
    delta: WeightDelta | None


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # in the file
    stored: str  # its dtype in the commit
    ours: str | None  # our name of it, where it is one of ours as it is; None where a conversion makes it


def write_files(
    store: Store,
    commit: Commit,
    directory: Path,
    files: dict[str, list[str]],
    outputs: dict[str, OutputTensor],
    conversions: Iterable[TensorConversion],
    added: dict[str, WeightDelta],
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Write the outputs into files, piece by piece.

    `files` holds the names of the outputs in each file. `added` is what is added to some of our tensors, by their full
    names.
    """
    targets: dict[str, WriteTarget] = {}
    with contextlib.ExitStack() as open_files:
        for file_name, group in files.items():
            path = directory / file_name
            layout = lay_out((name, outputs[name].dtype, outputs[name].shape) for name in group)
            file = open_files.enter_context(path.open("w+b", buffering=0)).fileno()
            os.truncate(file, layout.size)
            os.pwrite(file, layout.header, 0)
            for name in group:
                output = outputs[name]
                delta = added.get(f"{MODEL}{output.ours}")
                targets[name] = WriteTarget(file, path, layout.slots[name], output.dtype != output.stored, delta)
        direct = {f"{MODEL}{o.ours}": targets[o.name] for o in outputs.values() if o.ours is not None}
        written = stream(store, commit, direct, lambda name, at, data: _put(direct[name], at, data), progress)
        for conversion in conversions:
            written += _write_converted(store, commit, conversion, targets, added)
        for target in {target.file: target for target in targets.values()}.values():
            os.fsync(target.file)
        _compare(written)
    sizes = {name: target.slot.end - target.slot.start for name, target in targets.items()}
    dominant = targets[max(sizes, key=lambda n: sizes[n])].slot.dtype
    return {
        "files": sorted(files),
        "bytes": sum(sizes.values()),
        "tensors": len(sizes),
        "dtype": _TORCH_NAMES.get(dominant, dominant),
    }


def _write_converted(
    store: Store,
    commit: Commit,
    conversion: TensorConversion,
    targets: dict[str, WriteTarget],
    added: dict[str, WeightDelta],
) -> list[Written]:
    """Tensors that change their layout on the way out: these few are in memory together, and no others."""
    import torch

    values = {}
    for name in conversion.ours:
        full_name = MODEL + name
        value, dtype = _value(store, commit, full_name)
        if full_name in added:
            value = torch.from_numpy(added[full_name].merged(value.float().numpy()))
        values[name] = value.to(dtype)
    return [
        _put(targets[name], 0, memoryview(tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data))
        for name, tensor in conversion.revert(values).items()
    ]


def _value(store: Store, commit: Commit, name: str) -> tuple[Any, Any]:
    """A tensor of the commit, and the torch dtype that it is written in; in fp32 where it is held in four bits."""
    import torch

    from muster.trainer.models.lazy_tensors import TORCH_DTYPES

    if name in commit.tensors:
        entry = commit.tensors[name]
        dtype = TORCH_DTYPES[entry.dtype]
        return torch.frombuffer(whole(store, commit, [name])[name], dtype=dtype).view(tuple(entry.shape)), dtype
    part_names = packed_name(name), absmax_name(name)
    data = whole(store, commit, part_names)
    packed, absmax = (np.frombuffer(data[each], np.uint8).reshape(commit.tensors[each].shape) for each in part_names)
    return torch.from_numpy(decode(packed, absmax)), TORCH_DTYPES[commit.architecture["storedDtype"]]


Written = tuple[WriteTarget, int, int, int]  # (where, byte of the file, length, CRC-32)


def _put(target: WriteTarget, at: int, data: memoryview) -> Written:
    """Write bytes of a tensor, from its byte `at` on, to their place. What is added to them, is added in `data`."""
    content: memoryview | bytes = data
    if target.delta is not None:
        target.delta.add_to(data, at)
    if target.narrow:
        content, at = to_bf16(content), at // 2
    position = target.slot.start + at
    view = memoryview(content)
    while len(view):
        count = os.pwrite(target.file, view, position)
        view, position = view[count:], position + count
    return target, target.slot.start + at, len(content), crc32_value(content)


def to_bf16(data: memoryview | bytes) -> bytes:
    """fp32 to bf16, rounded to nearest even; NaN stays NaN. Little-endian, as safetensors is."""
    bits = np.frombuffer(data, "<u4")
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype("<u2")
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, np.uint16(0x7FC0), rounded).astype("<u2").tobytes()


def _compare(written: list[Written]) -> None:
    """Read all back. Raises StorageError where the disk has something else than what was verified at the source."""
    for target, position, length, checksum in written:
        if crc32_value(os.pread(target.file, length, position)) != checksum:
            raise StorageError(
                f"{target.path}: bytes {position} to {position + length} read back differently; check the disk"
            )
