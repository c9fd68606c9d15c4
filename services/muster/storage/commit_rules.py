"""Consistency rules of a COMMIT, checked on its document alone. Each rule raises InvalidCommit with the place."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import PurePosixPath
from typing import Final

from pydantic import ValidationError

from muster.words.base import problems
from muster.words.checkpoint import (
    BYTES_MAX,
    COMMITS,
    ITEM_BYTES,
    OF_TRAINER,
    PARTS,
    PINS,
    PROGRAM_VERSION,
    QUARANTINE,
    READERS,
    RESUME,
    Commit,
    FileEntry,
    RunState,
    Slice,
    TensorEntry,
    path_in_folder,
)

DIMENSIONS_MAX: Final = 32
# A file holds the slices that the COMMIT names, its header, which safetensors limits to so much, and nothing else.
HEADER_BYTES_MAX: Final = 100_000_000
_HEX_DIGITS: Final = {"crc32": 8, "sha256": 64, "blake2b": 128}
SCALES: Final = "_absmax"  # ends the name of the scales beside what is in eight bits
_OURS: Final = frozenset({COMMITS, PARTS, PINS, QUARANTINE, READERS, RESUME})
# Slices that no straight cut divides are compared in pairs. Shardings cut straight; three layers of them, tilted
# against each other, would still be fewer.
TANGLED_MAX: Final = 64


class InvalidCommit(ValueError):
    """This can't be a COMMIT as Muster writes it. The message says where and why."""


def check(commit: Commit) -> None:
    _check_files(commit)
    if commit.kind == "folder":
        return _check_folder(commit)
    needed = OF_TRAINER if commit.trainer == "muster" else {"tensors"}
    if missing := needed - commit.model_fields_set:
        raise InvalidCommit(f"{min(missing)}: is missing")
    if commit.trainer == "program" and commit.version < PROGRAM_VERSION:
        raise InvalidCommit(f"a program's is of version {PROGRAM_VERSION}, and it says {commit.version}")
    for name, tensor in commit.tensors.items():
        _check_tensor(name, tensor, commit.files)
    _check_places(commit)
    _check_optimizer(commit)
    _check_state(commit)


def _check_files(commit: Commit) -> None:
    seen: set[str] = set()
    digits = _HEX_DIGITS[commit.checksum_algorithm]
    checksum = re.compile(f"[0-9a-f]{{{digits}}}")
    for file in commit.files:
        segments = file.key.split("/")
        if segments[0] in _OURS or any(segment in ("", ".", "..") for segment in segments):
            raise InvalidCommit(f"{file.key!r} is no place for a file of a checkpoint")
        if file.key in seen:
            raise InvalidCommit(f"it names {file.key} twice")
        seen.add(file.key)
        if not all(checksum.fullmatch(each) for each in (file.checksum, *file.parts)):
            raise InvalidCommit(f"{file.key}: a {commit.checksum_algorithm} checksum has {digits} hex digits")
        # An empty file is one empty part.
        if file.parts and len(file.parts) != max(-(-file.bytes // (file.part_bytes or max(file.bytes, 1))), 1):
            raise InvalidCommit(f"{file.key}: {len(file.parts)} checksums are not those of its parts")


def _check_folder(commit: Commit) -> None:
    """Check that a program's files can be put back: each has a path of its own, and none lies inside another."""
    if commit.version < PROGRAM_VERSION:
        raise InvalidCommit(f"a folder is of version {PROGRAM_VERSION}, and it says {commit.version}")
    if commit.tensors or commit.rng:
        raise InvalidCommit("it is a folder, and names tensors")
    if commit.entry is not None and (commit.entry in (".", "..") or "/" in commit.entry):
        raise InvalidCommit(f"{commit.entry!r} is no name of a folder")
    if not commit.files:
        raise InvalidCommit("it is a folder without files")
    paths: set[str] = set()
    for file in commit.files:
        path = path_in_folder(file.key)
        if path is None:
            raise InvalidCommit(f"{file.key!r} is no place for a file of a folder")
        if path in paths:
            raise InvalidCommit(f"it names {path} twice")
        paths.add(path)
    for path in paths:
        if above := next((str(above) for above in PurePosixPath(path).parents if str(above) in paths), None):
            raise InvalidCommit(f"{path}: lies in {above}, which is a file")


def _check_tensor(name: str, tensor: TensorEntry, files: Sequence[FileEntry]) -> None:
    shape = tensor.shape
    if tensor.dtype not in ITEM_BYTES:
        raise InvalidCommit(f"{name}: dtype {tensor.dtype[:40]!r} is not known")
    if len(shape) > DIMENSIONS_MAX or prod(shape) * ITEM_BYTES[tensor.dtype] > BYTES_MAX:
        raise InvalidCommit(f"{name}: no tensor is as large as its shape says")
    covered, item = 0, ITEM_BYTES[tensor.dtype]
    for part in tensor.slices:
        if part.file >= len(files):
            raise InvalidCommit(f"{name}: lies in file {part.file} of {len(files)}")
        if not len(part.offset) == len(part.extent) == len(shape):
            raise InvalidCommit(f"{name}: a slice has not the {len(shape)} dimensions of its tensor")
        for offset, extent, size in zip(part.offset, part.extent, shape, strict=True):
            if not extent or offset + extent > size:
                raise InvalidCommit(f"{name}: a slice of {extent} at {offset} is not inside its {size}")
        elements = prod(part.extent)
        if part.start is not None and part.start + elements * item > files[part.file].bytes:
            raise InvalidCommit(f"{name}: a slice lies beyond the end of {files[part.file].key}")
        covered += elements
    if covered != prod(shape):
        raise InvalidCommit(f"{name}: its slices hold {covered} of its {prod(shape)} elements")
    if _overlap(tensor.slices, len(shape)):
        raise InvalidCommit(f"{name}: its slices overlap")


def _overlap(slices: Sequence[Slice], dimensions: int) -> bool:
    """Return whether two slices share an element. It divides them by straight cuts until each is alone.

    Takes n log n steps for each cut that only the next dimension can make. Raises InvalidCommit where slices are so
    tangled that it would take much longer.
    """
    groups = [list(slices)]
    work = 16 * len(slices) + 1_000
    while groups:
        group = groups.pop()
        work -= len(group)
        if work < 0:
            raise InvalidCommit("its slices are too tangled to be checked")
        if len(group) < 2:
            continue
        for dimension in range(dimensions):
            if len(parts := list(_cut(group, dimension))) > 1:
                groups += [part for part in parts if len(part) > 1]
                break
        else:
            if len(group) > TANGLED_MAX:
                raise InvalidCommit(f"{len(group)} of its slices overlap, or are too tangled to be checked")
            if any(_intersect(a, b) for number, a in enumerate(group) for b in group[:number]):
                return True
    return False


def _cut(group: list[Slice], dimension: int) -> Iterator[list[Slice]]:
    """The group, divided wherever no slice reaches across."""
    group.sort(key=lambda part: part.offset[dimension])
    part: list[Slice] = []
    reach = 0
    for each in group:
        if part and each.offset[dimension] >= reach:
            yield part
            part = []
        part.append(each)
        reach = max(reach, each.offset[dimension] + each.extent[dimension])
    yield part


def _intersect(a: Slice, b: Slice) -> bool:
    sides = zip(a.offset, a.extent, b.offset, b.extent, strict=True)
    return all(x < y + d and y < x + w for x, w, y, d in sides)


def _check_places(commit: Commit) -> None:
    """Check that no byte of a file belongs to two slices, that none has a name twice, and that files hold little
    else."""
    names: set[tuple[int, str]] = set()
    places: list[list[tuple[int, int]]] = [[] for _ in commit.files]
    sizes = [0] * len(commit.files)
    for name, tensor in commit.tensors.items():
        for part in tensor.slices:
            if (part.file, part.name) in names:
                raise InvalidCommit(f"{name}: {part.name} of {commit.files[part.file].key} is used twice")
            names.add((part.file, part.name))
            size = prod(part.extent) * ITEM_BYTES[tensor.dtype]
            sizes[part.file] += size
            if part.start is not None:
                places[part.file].append((part.start, part.start + size))
    for file, size, used in zip(commit.files, sizes, places, strict=True):
        if not size <= file.bytes <= size + HEADER_BYTES_MAX:
            raise InvalidCommit(f"{file.key}: has {file.bytes} bytes for slices of {size}")
        used.sort()
        if any(a[1] > b[0] for a, b in itertools.pairwise(used)):
            raise InvalidCommit(f"{file.key}: two slices share bytes")


def _check_optimizer(commit: Commit) -> None:
    """Optimizer state is of a weight that is there, and the same kinds of it for all that have any. Scales (`…_absmax`)
    go with what is in eight bits, and with nothing else."""
    scaled = any(name.endswith(SCALES) for name in commit.tensors)
    kinds: dict[str, set[str]] = {}
    for name, entry in commit.tensors.items():
        if not name.startswith("optimizer/"):
            continue
        parameter, _, kind = name.removeprefix("optimizer/").rpartition("/")
        weight = commit.tensors.get(f"model/{parameter}")
        if weight is None:
            raise InvalidCommit(f"{name}: there is no model/{parameter}")
        if kind.endswith(SCALES):
            _check_scales(commit, name)
            continue
        if entry.shape not in ((), weight.shape):
            raise InvalidCommit(f"{name}: is not of the shape of model/{parameter}")
        if scaled and entry.dtype == "U8" and f"{name}{SCALES}" not in commit.tensors:
            raise InvalidCommit(f"{name}{SCALES} is missing, the scales of what is in eight bits")
        kinds.setdefault(parameter, set()).add(kind)
    grouped = [parameter for group in commit.optimizer_groups for parameter in group.parameters]
    if len(set(grouped)) < len(grouped):
        raise InvalidCommit("optimizerGroups: two of them have the same parameter")
    all_kinds = set[str]().union(*kinds.values())
    for parameter, present in kinds.items():
        if missing := all_kinds - present:
            raise InvalidCommit(f"optimizer/{parameter}/{min(missing)} is missing, which other weights have")


def _check_scales(commit: Commit, name: str) -> None:
    """Check that there is one scale for each block of a row."""
    codes, scales = commit.tensors.get(name.removesuffix(SCALES)), commit.tensors[name].shape
    if codes is None or codes.dtype != "U8":
        raise InvalidCommit(f"{name}: there is nothing in eight bits that these are the scales of")
    if scales[:-1] != codes.shape[:-1] or not scales or not scales[-1] or codes.shape[-1] % scales[-1]:
        raise InvalidCommit(f"{name}: its shape does not divide the rows of what it belongs to into blocks")


def _check_state(commit: Commit) -> None:
    """Check that everything that a resume needs is there: each rank's generators and, for Muster's jobs, its state."""
    if len(commit.rng) not in (0, commit.world_size):
        raise InvalidCommit(f"rng: of {len(commit.rng)} ranks, and world size {commit.world_size}")
    if "optimizer" not in commit.config:  # a stranger's, or a library user's
        return
    try:
        RunState.model_validate(commit.state)
    except ValidationError as error:
        raise InvalidCommit(f"{problems(RunState, error, 'state')[0]}"[:300]) from None
