"""Bytes of a commit's files, verified before anybody looks at them: only the parts that are needed, and each of them
once per node."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from muster.storage.checksum import parts_of, whole_file
from muster.storage.commit_rules import HEADER_BYTES_MAX
from muster.storage.errors import NotFound, StoreError, TruncatedObject, UnfitObject
from muster.storage.store import Store
from muster.trainer.checkpoint.commits import READS_OF_THE_STORE
from muster.trainer.checkpoint.failures import CheckpointError, DamagedCommit
from muster.trainer.checkpoint.memory import take_pages
from muster.trainer.checkpoint.node_cache import NodeCache
from muster.trainer.checkpoint.shard_file import header_bytes, read_header
from muster.words.checkpoint import Commit, FileEntry, Slice

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class FilePart:
    """Part `index` of file `file` of a commit."""

    file: int
    index: int


@dataclass(frozen=True)
class FileSpan:
    """Bytes [start, end) of file `file`."""

    file: int
    start: int
    end: int


class CommitReader:
    """Reads parts of one commit's files. A file without checksums of its parts is a single part."""

    def __init__(self, store: Store, commit: Commit, cache: NodeCache | None = None) -> None:
        self._store, self._commit, self._cache = store, commit, cache
        self._files = [_ChecksummedParts(entry, store.uri) for entry in commit.files]

    def parts_of(self, spans: Iterable[FileSpan]) -> list[FilePart]:
        """The parts that hold these bytes, each once, in order."""
        parts = {FilePart(span.file, index) for span in spans for index in self._files[span.file].indices(span)}
        return sorted(parts)

    def all_parts(self) -> list[FilePart]:
        return [FilePart(f, index) for f, file in enumerate(self._files) for index in range(len(file.bounds))]

    def bounds(self, part: FilePart) -> tuple[int, int]:
        """(start, length) of the part in its file."""
        return self._files[part.file].bounds[part.index]

    def read(self, part: FilePart, into: memoryview) -> None:
        """Fill `into` with the verified bytes of a part. Raises DamagedCommit or CheckpointError, naming the file."""
        file = self._files[part.file]
        start, _ = file.bounds[part.index]
        if self._cache is not None and self._cache.read_into(file.entry, start, into) and self._matches(part, into):
            return

        def read() -> None:
            self._read_unverified(part.file, start, into)
            if not self._matches(part, into):
                raise DamagedCommit(
                    f"{file.where}: bytes {start} to {start + len(into)} do not have the checksum "
                    f"{file.checksums[part.index]} of the COMMIT; the file was damaged after it was committed"
                )

        _again(read)

    def expect_sizes(self) -> None:
        """Raises DamagedCommit for a file that is not there, or shorter than the COMMIT says.

        For who has nothing else to measure the COMMIT by before memory and disk are taken for what it names.
        """
        with ThreadPoolExecutor(self._store.streams) as threads:
            list(threads.map(self._read_last_byte, range(len(self._commit.files))))

    def header_span(self, file: int) -> FileSpan:
        """The bytes of a file that its header is in: all before its first slice. Asks the file where the COMMIT does
        not say where slices begin."""
        starts = [entry.start for _, entry in self._slices_in[file]]
        if starts and None not in starts:
            first = min(start for start in starts if start is not None)
            return FileSpan(file, 0, min(first, HEADER_BYTES_MAX))

        def ask() -> FileSpan:
            first_eight = bytearray(min(8, self._commit.files[file].bytes))
            self._read_unverified(file, 0, memoryview(first_eight))
            size = header_bytes(bytes(first_eight), self._files[file].where)
            return FileSpan(file, 0, min(size, self._commit.files[file].bytes))

        return _again(ask)

    def read_starts(self, span: FileSpan) -> dict[str, int]:
        """Read the byte at which each slice of a file begins, by name, from the file's own header, which is not
        verified yet."""
        header = memoryview(bytearray(span.end))

        def read() -> dict[str, int]:
            self._read_unverified(span.file, 0, header)
            return self.starts(span.file, header)

        return _again(read)

    def starts(self, file: int, header: memoryview) -> dict[str, int]:
        """Return the byte at which each of the commit's slices begins in a file, by name. `header` holds the bytes of
        the file's `header_span`.

        Raises DamagedCommit where the header is not valid, or contradicts the COMMIT.
        """
        where = self._files[file].where
        slots, by_name = read_header(header, self._commit.files[file].bytes, where), {}
        for dtype, entry in self._slices_in[file]:
            slot = slots.get(entry.name)
            if slot is None:
                raise DamagedCommit(f"{where}: does not hold {entry.name}, although the COMMIT says so")
            # Other programs write a scalar as one element of one dimension.
            shape = slot.shape if entry.extent or slot.shape != (1,) else ()
            if (slot.dtype, shape) != (dtype, entry.extent) or entry.start not in (None, slot.start):
                raise DamagedCommit(
                    f"{where}: holds {entry.name} as {slot.dtype} {list(slot.shape)} at byte {slot.start}, by the "
                    f"COMMIT it is {dtype} {list(entry.extent)} at {entry.start}"
                )
            by_name[entry.name] = slot.start
        return by_name

    @functools.cached_property
    def _slices_in(self) -> list[list[tuple[str, Slice]]]:
        """The commit's slices in each file, with their dtypes."""
        by_file: list[list[tuple[str, Slice]]] = [[] for _ in self._commit.files]
        for tensor in self._commit.tensors.values():
            for entry in tensor.slices:
                by_file[entry.file].append((tensor.dtype, entry))
        return by_file

    def _read_last_byte(self, file: int) -> None:
        if size := self._commit.files[file].bytes:
            _again(lambda: self._read_unverified(file, size - 1, memoryview(bytearray(1))))

    def _read_unverified(self, file: int, start: int, into: memoryview) -> None:
        """Raises DamagedCommit where the file is not what the COMMIT says, CheckpointError where the store fails."""
        about = self._files[file]
        try:
            self._store.read_into(about.entry.key, start, into)
        except NotFound as error:
            raise DamagedCommit(f"{about.where}: the COMMIT names this file, but it is not there") from error
        except (TruncatedObject, UnfitObject) as error:
            raise DamagedCommit(str(error)) from error
        except StoreError as error:
            raise CheckpointError(str(error)) from error

    def _matches(self, part: FilePart, data: memoryview) -> bool:
        try:
            return whole_file(data, self._commit.checksum_algorithm) == self._files[part.file].checksums[part.index]
        except ValueError as error:
            raise CheckpointError(f"{self._files[part.file].where}: {error}") from error


def _again(read: Callable[[], T]) -> T:
    """Read again where the store's answer is wrong, and believe only an error that it repeats: one wrong answer (a
    flipped bit, a missing file, half the length) does not mean damage."""
    for _ in range(READS_OF_THE_STORE - 1):
        with contextlib.suppress(DamagedCommit):
            return read()
    return read()


class _ChecksummedParts:
    """Parts of a file that have a checksum each."""

    def __init__(self, entry: FileEntry, uri: str) -> None:
        self.entry, self.where = entry, f"{uri}/{entry.key}"
        self._part_bytes = entry.part_bytes if entry.parts and entry.part_bytes else max(entry.bytes, 1)
        self.bounds = parts_of(entry.bytes, self._part_bytes)  # (start, length) of each part, in bytes
        self.checksums = tuple(entry.parts) or (entry.checksum,)  # one for each part

    def indices(self, span: FileSpan) -> range:
        if not 0 <= span.start <= span.end <= self.entry.bytes:
            raise DamagedCommit(
                f"{self.where}: has {self.entry.bytes} bytes, the COMMIT puts a tensor at {span.start} to {span.end}"
            )
        return (
            range(span.start // self._part_bytes, -(-span.end // self._part_bytes))
            if span.end > span.start
            else range(0)
        )


def read_all(reader: CommitReader, jobs: Iterable[tuple[FilePart, memoryview]], streams: int) -> None:
    """Read many parts at a time, but one part of each file before its others. Raises the first failure.

    A server that has to do something before it answers for an object (a gateway fetches it, rclone hashes it) would do
    it once for every stream. Meanwhile the others' memory is made ready, by one thread: the server may need a core.
    """

    def read(job: tuple[FilePart, memoryview]) -> None:
        take_pages(job[1])
        reader.read(*job)

    first: dict[int, tuple[FilePart, memoryview]] = {}
    rest = [job for job in jobs if first.setdefault(job[0].file, job) is not job]
    threads = ThreadPoolExecutor(streams)
    try:
        begun = [threads.submit(read, job) for job in first.values()]
        for _, into in rest:
            if all(one.done() for one in begun):
                break
            take_pages(into)
        for one in begun:
            one.result()
        list(threads.map(read, rest))
    finally:
        threads.shutdown(cancel_futures=True)  # after a failure nothing new is begun
