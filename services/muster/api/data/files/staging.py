"""Files on their way: each a file of this machine's disk, as long as what has arrived of it for certain."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from muster.api.core.errors import ApiError
from muster.storage.checksum import crc32_value
from muster.words.text import size as text_size

BLOCK_BYTES = 4 << 20  # that are handed to a thread at a time: at 1 MiB the hand-over costs a tenth of the time
DIGESTS_KEPT = 1_000  # digests of uploads that are not whole; of any other the file is read once more at the end
FREE_BYTES_KEPT = 256 << 20  # of the disk, for the database and whatever else is on it
_FREE_SPACE = "what has arrived is kept, so free some space and send the rest."
_UNVERIFIED = ".from"
_PART = ".part_"


class RunningHash(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...


@dataclass(frozen=True)
class ExpectedChecksum:
    """Expected checksum of one request's bytes: an algorithm of CHECKSUMS, and its digest."""

    algorithm: str
    digest: bytes


class _RunningCrc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes, /) -> None:
        self._value = crc32_value(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


CHECKSUMS = ("sha256", "sha1", "md5", "crc32")


def new_hash(algorithm: str) -> RunningHash:
    return _RunningCrc32() if algorithm == "crc32" else hashlib.new(algorithm, usedforsecurity=False)


class UploadStaging:
    """The uploads in `folder`, by name. One request at a time writes to one; a later one takes its place.

    `bytes_max`, where it is given, bounds all of them together: Kubernetes evicts a pod whose volume has outgrown its
    sizeLimit, which the disk below knows nothing of.
    """

    def __init__(self, folder: Path, bytes_max: int | None = None) -> None:
        self.folder, self.bytes_max = folder, bytes_max
        self._writing: dict[str, asyncio.Task[int]] = {}
        self._digests: OrderedDict[str, tuple[int, RunningHash]] = OrderedDict()

    def path(self, name: str) -> Path:
        return self.folder / name

    def make(self, name: str) -> None:
        """Create an upload without a byte. Raises ApiError no_space, files_unavailable."""
        with _explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self.path(name), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    def size(self, name: str) -> int | None:
        """Return the number of bytes that have certainly arrived, or None if there is no such upload on this
        machine."""
        try:
            return int(self._mark(name).read_text())
        except (FileNotFoundError, ValueError):
            pass
        try:
            return self.path(name).stat().st_size
        except FileNotFoundError:
            return None

    def digest(self, name: str) -> str | None:
        """The SHA-256 of what has arrived, in hex; None if only reading it would give that."""
        entry = self._digests.get(name)
        return entry[1].digest().hex() if entry is not None and entry[0] == self.size(name) else None

    def read_digest(self, name: str) -> str:
        """The same, read from the file, in bounded memory."""
        with open(self.path(name), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def room(self) -> int:
        """Return the bytes that may be written to the folder. Raises ApiError files_unavailable."""
        with _explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            free = shutil.disk_usage(self.folder).free - FREE_BYTES_KEPT
        return max(0, free if self.bytes_max is None else min(free, self._left(self.bytes_max)))

    def missing(self, expected: dict[str, int]) -> int:
        """Return the bytes that are still to come of uploads, by name and their size; uploads on another replica's disk
        take nothing of this one."""
        there = ((size, self.size(name)) for name, size in expected.items())
        return sum(max(0, size - have) for size, have in there if have is not None)

    def need(self, count: int) -> None:
        """Raises ApiError no_space where so many bytes more would be too many, whatever the disk says."""
        if self.bytes_max is not None and count > self._left(self.bytes_max):
            most = text_size(self.bytes_max)
            raise ApiError("no_space", f"{self.folder} may hold {most} (MUSTER_API_UPLOADS_BYTES_MAX): {_FREE_SPACE}")

    def _left(self, bytes_max: int) -> int:
        """A 64th of all is kept for folders and for blocks that a file does not fill."""
        with os.scandir(self.folder) as entries:
            return bytes_max - bytes_max // 64 - sum(_blocks_of(entry) for entry in entries)

    async def write(
        self, name: str, offset: int, chunks: AsyncIterator[bytes], most: int, checksum: ExpectedChecksum | None = None
    ) -> int:
        """Add `chunks` to what has arrived, which must be `offset` bytes, and say how many bytes there are then.

        Whatever ends it, what has arrived stays and is flushed; with a `checksum` all of it or nothing. Raises ApiError
        upload_conflict, upload_busy, checksum_mismatch, no_space, file_too_large for more than `most` bytes in all.
        """
        before = self._writing.get(name)
        if before is not None:  # its client has come back on another connection, and will not hear of this one
            before.cancel()
            await asyncio.wait([before])
        task = asyncio.create_task(self._write(name, offset, chunks, most, checksum))
        self._writing[name] = task
        try:
            return await task
        except asyncio.CancelledError:
            if (this := asyncio.current_task()) is not None and this.cancelling():
                task.cancel()
                await asyncio.wait([task])
                raise
            raise ApiError("upload_conflict", "Another request has taken this upload over.") from None
        finally:
            if self._writing.get(name) is task:
                del self._writing[name]

    async def _write(
        self, name: str, offset: int, chunks: AsyncIterator[bytes], most: int, checksum: ExpectedChecksum | None
    ) -> int:
        with _explained(self.folder), self._opened(name, offset, checksum is not None) as file:
            writer = _StagedWriter(file, offset, self._hash_from(name, offset), checksum, self.need)
            try:
                try:
                    await _pass_on(writer, chunks, most)
                finally:
                    await asyncio.shield(asyncio.to_thread(writer.flush))
            except BaseException:
                if checksum is not None or writer.overflowed:
                    writer.take_back()
                raise
            finally:
                self._keep_digest(name, writer)
            if not writer.verified():
                writer.take_back()
                self._digests.pop(name, None)
                detail = f"The {checksum.algorithm if checksum else ''} of this request's bytes is another one."
                raise ApiError("checksum_mismatch", detail)
        if checksum is not None:
            self._mark(name).unlink(missing_ok=True)
        return writer.at

    def remove(self, name: str) -> None:
        """An upload, and the parts of it."""
        self._digests.pop(name, None)
        for path in (self.path(name), self._mark(name), *self.folder.glob(f"{name}{_PART}*")):
            path.unlink(missing_ok=True)

    def parts(self, name: str) -> dict[str, int]:
        """The parts of an upload that lie here, in whatever order they are to follow each other, and their bytes."""
        sizes = {}
        for path in self.folder.glob(f"{name}{_PART}*"):
            with contextlib.suppress(FileNotFoundError):
                sizes[path.name.rpartition(_PART)[2]] = path.stat().st_size
        return sizes

    def part(self, name: str, part: str) -> str:
        """The name under which a part of an upload lies here."""
        return f"{name}{_PART}{part}"

    def join(self, name: str, parts: Sequence[str], algorithm: str) -> str:
        """Write an upload anew from others, one after another, in bounded memory; they stay. Returns its digest in hex.
        Raises ApiError no_space, files_unavailable, and upload_conflict where one of them is gone."""
        whole, asked, at = new_hash("sha256"), new_hash(algorithm), 0
        with _explained(self.folder), open(self.path(name), "wb") as joined:
            for part in parts:
                for block in self._blocks(part):
                    self.need(len(block))
                    joined.write(block)
                    whole.update(block)
                    asked.update(block)
                    at += len(block)
            joined.flush()
            os.fsync(joined.fileno())
        self._digests[name] = (at, whole)
        return asked.digest().hex()

    def _blocks(self, name: str) -> Iterator[bytes]:
        try:
            file = open(self.path(name), "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            raise ApiError("upload_conflict", f"{name} is not on this machine any more.") from None
        with file:
            while block := file.read(BLOCK_BYTES):
                yield block

    def rename(self, name: str, to: str) -> None:
        """Replace another upload by a complete one, atomically."""
        os.replace(self.path(name), self.path(to))
        if (entry := self._digests.pop(name, None)) is not None:
            self._digests[to] = entry

    def older(self, before: float) -> Iterator[str]:
        """Uploads that nothing was written to since; a part counts as its upload."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if not entry.name.endswith(_UNVERIFIED) and entry.stat().st_mtime < before:
                        yield entry.name.partition(_PART)[0]

    def _mark(self, name: str) -> Path:
        """Holds the offset while bytes behind it are not yet compared with their checksum."""
        return self.folder / f"{name}{_UNVERIFIED}"

    def _hash_from(self, name: str, offset: int) -> RunningHash | None:
        entry = self._digests.pop(name, None)
        if entry is not None and entry[0] == offset:
            return entry[1]
        return new_hash("sha256") if offset == 0 else None

    def _keep_digest(self, name: str, writer: _StagedWriter) -> None:
        if writer.whole is not None and not writer.taken_back:
            self._digests[name] = (writer.at, writer.whole)
            while len(self._digests) > DIGESTS_KEPT:
                self._digests.popitem(last=False)

    @contextlib.contextmanager
    def _opened(self, name: str, offset: int, verifies: bool) -> Iterator[int]:
        try:
            file = os.open(self.path(name), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise ApiError("file_not_found", "This upload is not on this machine any more; begin a new one.") from None
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                detail = "Another process is writing to this upload; repeat the request in a moment."
                raise ApiError("upload_busy", detail, headers={"Retry-After": "1"}) from None
            there = self.size(name) or 0
            if there != offset:
                detail = f"{there} bytes of this upload have arrived, and the request begins at {offset}."
                raise ApiError("upload_conflict", detail, headers={"Upload-Offset": str(there)})
            os.ftruncate(file, offset)  # what an earlier process left without comparing it
            os.lseek(file, offset, os.SEEK_SET)
            if verifies:
                self._mark(name).write_text(str(offset))
            else:
                self._mark(name).unlink(missing_ok=True)
            yield file
        finally:
            os.close(file)


class _StagedWriter:
    """Writer of one request's bytes to a file from an offset on, which also hashes them. Called from one thread at a
    time."""

    def __init__(
        self,
        file: int,
        offset: int,
        whole: RunningHash | None,
        checksum: ExpectedChecksum | None,
        need: Callable[[int], None],
    ) -> None:
        self.at = offset
        self._need = need
        self.whole = whole  # the digest of all bytes until `at`
        self.overflowed = self.taken_back = False
        self._file, self._offset, self._checksum = file, offset, checksum
        self._own = new_hash(checksum.algorithm) if checksum else None

    def write(self, chunks: Sequence[bytes]) -> None:
        self._need(sum(map(len, chunks)))
        for chunk in chunks:
            view = memoryview(chunk)
            while view:
                count = os.write(self._file, view)
                for hashed in (self.whole, self._own):
                    if hashed is not None:
                        hashed.update(view[:count])  # type: ignore[arg-type]
                self.at += count
                view = view[count:]

    def flush(self) -> None:
        os.fsync(self._file)

    def verified(self) -> bool:
        return self._own is None or self._checksum is None or self._own.digest() == self._checksum.digest

    def take_back(self) -> None:
        self.taken_back = True
        os.ftruncate(self._file, self._offset)
        self.at = self._offset


async def _pass_on(writer: _StagedWriter, chunks: AsyncIterator[bytes], most: int) -> None:
    """While a thread writes one block the next one arrives; never more than two are in memory."""
    pending: list[bytes] = []
    waiting, arrived = 0, writer.at
    writing: asyncio.Task[None] | None = None
    try:
        async for chunk in chunks:
            arrived += len(chunk)
            if arrived > most:
                writer.overflowed = True
                raise ApiError("file_too_large", f"More bytes came than the {most} that may.")
            pending.append(chunk)
            waiting += len(chunk)
            if waiting >= BLOCK_BYTES:
                if writing is not None:
                    await asyncio.shield(writing)
                writing = asyncio.create_task(asyncio.to_thread(writer.write, pending))
                pending, waiting = [], 0
    finally:
        if writing is not None:
            await asyncio.wait([writing])
            writing.result()
        if pending and not writer.overflowed:
            await asyncio.shield(asyncio.to_thread(writer.write, pending))


def _blocks_of(entry: os.DirEntry[str]) -> int:
    """Return the bytes on the disk, as Kubernetes counts them; 0 if the file has just gone."""
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Say what the disk refuses as the API's refusal."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ApiError("no_space", f"The disk of {folder} is full: {_FREE_SPACE}") from error
        detail = f"Uploads can't be written to {folder}: {error.strerror or error}."
        raise ApiError("files_unavailable", detail, headers={"Retry-After": "5"}) from error
