"""The bytes of a commit's tensors for who does not load them: each needed part is read once, and verified."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from muster.storage.store import Store
from muster.trainer.checkpoint.fetch import CommitReader, FilePart, FileSpan
from muster.words.checkpoint import ITEM_BYTES, Commit, Slice

T = TypeVar("T")


@dataclass(frozen=True)
class ByteRun:
    """Bytes of a file of the commit that follow each other in the tensor too."""

    start: int  # byte of the file
    length: int  # in bytes
    at: int  # byte of the tensor


def stream(
    store: Store,
    commit: Commit,
    names: Iterable[str],
    put: Callable[[str, int, memoryview], T],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[T]:
    """Hand all bytes of these tensors to put(name, byte of the tensor, bytes), in no order and from several threads.

    `put` may change the bytes; what it returns is collected. `progress` is called with (bytes read, bytes of all).
    Raises CheckpointError, also where bytes do not verify.
    """
    reader = CommitReader(store, commit)
    reader.expect_sizes()
    runs, headers = _runs_by_file(commit, reader, names)
    spans = [
        FileSpan(file, run.start, run.start + run.length) for file, file_runs in runs.items() for _, run in file_runs
    ]
    parts = reader.parts_of([*headers, *spans])
    total, done = sum(reader.bounds(part)[1] for part in parts), 0

    def move(part: FilePart) -> tuple[int, list[T]]:
        start, length = reader.bounds(part)
        data = memoryview(bytearray(length))
        reader.read(part, data)
        cut = ((name, _cut(run, start, start + length)) for name, run in runs[part.file])
        return length, [
            put(name, run.at, data[run.start - start : run.start - start + run.length])
            for name, run in cut
            if run is not None
        ]

    results: list[T] = []
    with ThreadPoolExecutor(store.streams) as threads:
        # As many parts at a time as there are threads: the rest would only wait in memory.
        for begin in range(0, len(parts), store.streams):
            for length, file_runs in threads.map(move, parts[begin : begin + store.streams]):
                results += file_runs
                done += length
                progress(done, total)
    return results


def whole(store: Store, commit: Commit, names: Iterable[str]) -> dict[str, bytearray]:
    """Read these tensors, each in memory as a whole."""
    entries = {name: commit.tensors[name] for name in names}
    contents = {name: bytearray(prod(entry.shape) * ITEM_BYTES[entry.dtype]) for name, entry in entries.items()}

    def put(name: str, at: int, data: memoryview) -> None:
        contents[name][at : at + len(data)] = data

    stream(store, commit, contents, put)
    return contents


def _runs_by_file(
    commit: Commit, reader: CommitReader, names: Iterable[str]
) -> tuple[dict[int, list[tuple[str, ByteRun]]], list[FileSpan]]:
    """The runs of these tensors in each file that holds some, and the spans of those files' headers, which were
    compared with the COMMIT."""
    slices = [(name, slice_) for name in names for slice_ in commit.tensors[name].slices]
    headers = {file: reader.header_span(file) for file in sorted({slice_.file for _, slice_ in slices})}
    starts = {file: reader.read_starts(header) for file, header in headers.items()}
    runs: dict[int, list[tuple[str, ByteRun]]] = {file: [] for file in headers}
    for name, slice_ in slices:
        shape, item = commit.tensors[name].shape, ITEM_BYTES[commit.tensors[name].dtype]
        start = starts[slice_.file][slice_.name]
        runs[slice_.file] += [(name, run) for run in runs_of(slice_, shape, item, start)]
    return runs, list(headers.values())


def runs_of(slice_: Slice, shape: tuple[int, ...], item_bytes: int, start: int) -> Iterator[ByteRun]:
    """The runs of a slice that are contiguous both in its file (which begins at `start`) and in the whole tensor."""
    offset, extent = tuple(slice_.offset), tuple(slice_.extent)
    # Trailing dimensions that the chunk has whole are contiguous, and so are rows of the one before them.
    inner = len(shape)
    while inner > 0 and extent[inner - 1] == shape[inner - 1]:
        inner -= 1
    split = max(inner - 1, 0)
    length = prod(extent[split:]) * item_bytes
    strides = [prod(shape[d + 1 :]) * item_bytes for d in range(len(shape))]
    for number, outer in enumerate(itertools.product(*(range(e) for e in extent[:split]))):
        place = [o + i for o, i in zip(offset, outer, strict=False)] + list(offset[split:])
        if length:
            yield ByteRun(start + number * length, length, sum(p * s for p, s in zip(place, strides, strict=True)))


def _cut(run: ByteRun, start: int, end: int) -> ByteRun | None:
    """The part of a run that lies in bytes [start, end) of its file."""
    first, last = max(run.start, start), min(run.start + run.length, end)
    return ByteRun(first, last - first, run.at + first - run.start) if last > first else None
