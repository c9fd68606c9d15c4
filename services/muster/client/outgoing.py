"""A file of this machine on its way to a server: read once, hashed at the same time, and identified by its version."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from muster.client.errors import InvalidRequest

BLOCK_BYTES = 1 << 20

Progress = Callable[[int, int], None]  # bytes that have arrived, of all


def nobody(_: int, __: int) -> None:
    """Take the news of progress for a caller who does not want it."""


class UploadSource:
    """A file that is sent: its bytes from any place on, and the digest of all that was read of it in order."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - closed by the context manager
        self._about = os.fstat(self._file.fileno())
        self.size = self._about.st_size
        self._hash = hashlib.sha256()
        self._hashed = 0
        self._worker = ThreadPoolExecutor(1, "digest")
        self._under_way: Future[None] | None = None

    def __enter__(self) -> UploadSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.shutdown()
        self._file.close()

    @property
    def stamp(self) -> str:
        """Return a stamp that differs for every version of the file, as far as the file system reports it."""
        return f"{self._about.st_size}-{self._about.st_mtime_ns}-{self._about.st_ino}"

    def changed(self) -> bool:
        now = os.fstat(self._file.fileno())
        return (now.st_size, now.st_mtime_ns) != (self._about.st_size, self._about.st_mtime_ns)

    def blocks(self, offset: int, count: int, progress: Progress) -> Iterator[bytes]:
        """Yield the bytes [offset, offset + count), hashed by another thread at the same time. Missing bytes are not
        made up."""
        self._hash_until(offset)
        self._file.seek(offset)
        at, end = offset, offset + count
        while at < end and (block := self._file.read(min(BLOCK_BYTES, end - at))):
            if at == self._hashed:
                self._hash_beside(block)
            yield block
            at += len(block)
            progress(at, self.size)

    def digest(self) -> str:
        self._hash_until(self.size)
        self._wait()
        return self._hash.hexdigest()

    def _hash_beside(self, block: bytes) -> None:
        self._wait()
        self._under_way = self._worker.submit(self._hash.update, block)
        self._hashed += len(block)

    def _hash_until(self, offset: int) -> None:
        """Hash the bytes that another process, or an earlier request, has sent."""
        self._file.seek(self._hashed)
        while self._hashed < offset and (block := self._file.read(min(BLOCK_BYTES, offset - self._hashed))):
            self._hash_beside(block)

    def _wait(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None


def opened(path: Path) -> UploadSource:
    """Raises InvalidRequest for what is no file with anything in it."""
    try:
        if not path.is_file():
            kind = "is a folder; name its files" if path.is_dir() else "is not there"
            raise InvalidRequest(f"{path} {kind}", "no-file")
        source = UploadSource(path)
    except OSError as error:
        raise InvalidRequest(f"{path} can't be read: {error.strerror or error}", "no-file") from None
    if not source.size:
        source.__exit__()
        raise InvalidRequest(f"{path} is empty; there is nothing to keep", "empty-file")
    return source
