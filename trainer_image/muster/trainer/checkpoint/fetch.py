"""Bytes of a commit's files, verified before anybody looks at them: only the parts that are needed, and each of them
once per node."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from muster.contract.checkpoint import Commit, FileEntry
from muster.storage.checksum import parts_of, whole_file
from muster.storage.errors import NotFound, StoreError, Truncated
from muster.storage.store import Store
from muster.trainer.checkpoint.failures import CheckpointError, DamagedCommit
from muster.trainer.checkpoint.memory import take_pages
from muster.trainer.checkpoint.node_cache import NodeCache
from muster.trainer.checkpoint.shard_file import header_bytes, read_header

READS_OF_THE_STORE = 2  # a part that is wrong once may have been damaged on its way; wrong twice, it is damaged


@dataclass(frozen=True, order=True)
class Part:
    """Part `index` of file `file` of a commit."""

    file: int
    index: int


@dataclass(frozen=True)
class Span:
    """Bytes [start, end) of file `file`."""

    file: int
    start: int
    end: int


class Reader:
    """Reads parts of one commit's files. A file without checksums of its parts is a single part."""

    def __init__(self, store: Store, commit: Commit, cache: NodeCache | None = None) -> None:
        self._store, self._commit, self._cache = store, commit, cache
        self._files = [_Parts(entry, store.uri) for entry in commit.files]

    def parts_of(self, spans: Iterable[Span]) -> list[Part]:
        """The parts that hold these bytes, each once, in order."""
        parts = {Part(span.file, index) for span in spans for index in self._files[span.file].indices(span)}
        return sorted(parts)

    def all_parts(self) -> list[Part]:
        return [Part(f, index) for f, file in enumerate(self._files) for index in range(len(file.bounds))]

    def bounds(self, part: Part) -> tuple[int, int]:
        """(start, length) of the part in its file."""
        return self._files[part.file].bounds[part.index]

    def read(self, part: Part, into: memoryview) -> None:
        """Fill `into` with the verified bytes of a part. Raises DamagedCommit or CheckpointError, naming the file."""
        file = self._files[part.file]
        start, _ = file.bounds[part.index]
        if self._cache is not None and self._cache.read_into(file.entry, start, into) and self._matches(part, into):
            return
        for reads_left in reversed(range(READS_OF_THE_STORE)):
            try:
                self._store.read_into(file.entry.key, start, into)
            except NotFound as error:
                raise DamagedCommit(f"{file.where}: the COMMIT names this file, but it is not there") from error
            except Truncated as error:
                raise DamagedCommit(str(error)) from error
            except StoreError as error:
                raise CheckpointError(str(error)) from error
            if self._matches(part, into):
                return
            if not reads_left:
                raise DamagedCommit(
                    f"{file.where}: bytes {start} to {start + len(into)} do not have the checksum "
                    f"{file.checksums[part.index]} of the COMMIT; the file was damaged after it was committed"
                )

    def starts(self, file: int, names: Iterable[str]) -> tuple[dict[str, int], Span]:
        """Where tensors begin in a file whose COMMIT does not say, and the span of the header that says it."""
        where = self._files[file].where
        first_eight = bytearray(8)
        try:
            self._store.read_into(self._commit.files[file].key, 0, memoryview(first_eight))
            header = bytearray(min(header_bytes(bytes(first_eight), where), self._commit.files[file].bytes))
            self._store.read_into(self._commit.files[file].key, 0, memoryview(header))
        except (NotFound, Truncated) as error:
            raise DamagedCommit(str(error)) from error
        slots = read_header(memoryview(header), where)
        try:
            return {name: slots[name].start for name in names}, Span(file, 0, len(header))
        except KeyError as missing:
            raise DamagedCommit(f"{where}: does not hold {missing}, although the COMMIT says so") from None

    def _matches(self, part: Part, data: memoryview) -> bool:
        try:
            return whole_file(data, self._commit.checksum_algorithm) == self._files[part.file].checksums[part.index]
        except ValueError as error:
            raise CheckpointError(f"{self._files[part.file].where}: {error}") from error


class _Parts:
    """How a file is cut. bounds: (start, length) of each part; checksums: as many."""

    def __init__(self, entry: FileEntry, uri: str) -> None:
        self.entry, self.where = entry, f"{uri}/{entry.key}"
        self._part_bytes = entry.part_bytes if entry.parts and entry.part_bytes else max(entry.bytes, 1)
        self.bounds = parts_of(entry.bytes, self._part_bytes)
        self.checksums = tuple(entry.parts) or (entry.checksum,)
        if len(self.bounds) != len(self.checksums):
            raise DamagedCommit(
                f"{self.where}: the COMMIT has {len(self.checksums)} checksums for {len(self.bounds)} parts"
            )

    def indices(self, span: Span) -> range:
        if not 0 <= span.start <= span.end <= self.entry.bytes:
            raise DamagedCommit(
                f"{self.where}: has {self.entry.bytes} bytes, the COMMIT puts a tensor at {span.start} to {span.end}"
            )
        return (
            range(span.start // self._part_bytes, -(-span.end // self._part_bytes))
            if span.end > span.start
            else range(0)
        )


def read_all(reader: Reader, jobs: Iterable[tuple[Part, memoryview]], streams: int) -> None:
    """Read many parts at a time, but one part of each file before its others. Raises the first failure.

    A server that has to do something before it answers for an object (a gateway fetches it, rclone hashes it) would do
    it once for every stream. Meanwhile the others' memory is made ready, by one thread: the server may need a core.
    """

    def read(job: tuple[Part, memoryview]) -> None:
        take_pages(job[1])
        reader.read(*job)

    first: dict[int, tuple[Part, memoryview]] = {}
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
