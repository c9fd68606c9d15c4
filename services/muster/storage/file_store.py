"""Objects as files: written to a temporary name and renamed, flushed with their folders, so that a power cut leaves
whole ones or none."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from muster.storage.checksum import PART_BYTES, combine, crc32, crc32_value, parts_of
from muster.storage.errors import (
    NotAFile,
    NotFound,
    ReplacedObject,
    StoreError,
    StoreRefusal,
    TooLarge,
    TruncatedObject,
)
from muster.storage.folders import make_folder, opened_folder
from muster.storage.store import SMALL_BYTES_MAX, StoredObject, expect_all, nobody
from muster.words.checkpoint import FileEntry

_TEMPORARY = ".tmp-"
_BUFFER_BYTES = 1 << 20
_WRITING = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
_READING = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class FileStore:
    """A folder of this machine. With `links` False nothing below it is read, written, listed or removed through a link,
    for where others write in it: a job must not have the platform reach what the job itself may not."""

    def __init__(self, root: Path, links: bool = True) -> None:
        self.root, self._links = root, links
        self.uri = root.as_uri()
        self.streams = min(8, 2 * (os.cpu_count() or 1))

    def write(self, key: str, data: memoryview, sent: Callable[[int], None] = nobody) -> FileEntry:
        path = self._path(key)
        parts: list[tuple[str, int]] = []
        with (
            _explained(path, "write"),
            self._folder(key, make=True) as folder,
            _beside(folder, path.name) as temporary,
        ):
            file = os.open(temporary, _WRITING, 0o644, dir_fd=folder)
            try:
                _reserve(file, len(data))
                for start, length in parts_of(len(data)):
                    part = data[start : start + length]
                    parts.append((crc32(part), length))
                    _write_all(file, part)
                    sent(length)
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        return FileEntry(
            key=key, bytes=len(data), checksum=combine(parts), part_bytes=PART_BYTES, parts=tuple(c for c, _ in parts)
        )

    def adopt(self, key: str, path: Path) -> None:
        """Make a flushed file of this machine the object of that key; it has its old name no more. On another disk it
        is copied."""
        target = self._path(key)
        with _explained(target, "write"), self._folder(key, make=True) as folder:
            try:
                os.replace(path, target.name, dst_dir_fd=folder)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                with _beside(folder, target.name) as temporary, open(path, "rb") as source:
                    with os.fdopen(os.open(temporary, _WRITING, 0o666, dir_fd=folder), "wb") as copy:
                        shutil.copyfileobj(source, copy, _BUFFER_BYTES)
                        copy.flush()
                        os.fsync(copy.fileno())
                    os.replace(temporary, target.name, src_dir_fd=folder, dst_dir_fd=folder)
                path.unlink()
            os.fsync(folder)

    def verify(self, entry: FileEntry) -> None:
        path = self._path(entry.key)
        with _explained(path, "read"), self._opened(path) as (file, about):
            size = about.st_size
            if size != entry.bytes:
                raise StoreError(f"{path}: holds {size} bytes, not {entry.bytes}; the disk lost what was written")
            actual, buffer = 0, memoryview(bytearray(min(_BUFFER_BYTES, max(size, 1))))
            for start, length in parts_of(size, _BUFFER_BYTES):
                _read_all(file, start, buffer[:length], path)
                actual = crc32_value(buffer[:length], actual)
        if f"{actual:08x}" != entry.checksum:
            raise StoreError(
                f"{path}: reads back as checksum {actual:08x}, not {entry.checksum}; the disk damaged what was written"
            )

    def see_all(self, entries: Iterable[FileEntry], prefix: str) -> None:
        expect_all(entries, {item.key: item.bytes for item in self.objects(prefix)}, self.uri)

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        with _explained(path, "write"), self._written(key, data) as (folder, temporary):
            try:  # unlike a rename, a link fails where the name is taken
                os.link(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            except FileExistsError:
                return False
        return True

    def replace(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with _explained(path, "write"), self._written(key, data) as (folder, temporary):
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)

    def about(self, key: str) -> StoredObject:
        path = self._path(key)
        with _explained(path, "look at"), self._opened(path) as (_, about):
            return StoredObject(key, about.st_size, about.st_mtime, _tag(about))

    def open(self, entry: StoredObject) -> io.BufferedReader:
        path = self._path(entry.key)
        with _explained(path, "read"), self._opened(path) as (file, about):
            if _tag(about) != entry.tag:
                raise ReplacedObject(f"{path}: was replaced since it was listed; start again when nobody writes to it")
            return io.BufferedReader(io.FileIO(os.dup(file)), _BUFFER_BYTES)

    def read(self, key: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        path = self._path(key)
        with _explained(path, "read"), self._opened(path) as (file, about):
            if about.st_size > bytes_max:
                raise TooLarge(f"{path}: holds {about.st_size} bytes, more than the {bytes_max} that are read of it")
            data = bytearray(about.st_size)
            _read_all(file, 0, memoryview(data), path)
            return bytes(data)

    def read_into(self, key: str, start: int, into: memoryview, tag: str | None = None) -> None:
        path = self._path(key)
        with _explained(path, "read"), self._opened(path) as (file, about):
            if tag is not None and _tag(about) != tag:
                raise ReplacedObject(
                    f"{path}: was replaced while it was being read; start again when nobody writes to it"
                )
            _read_all(file, start, into, path)

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        folder = prefix.rpartition("/")[0]
        with _explained(self.root / folder, "list"):
            yield from (entry for entry in self._walk(folder) if entry.key.startswith(prefix))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with _explained(path, "delete"), contextlib.suppress(FileNotFoundError):
            with self._folder(key) as folder:
                os.unlink(path.name, dir_fd=folder)
            while (key := key.rpartition("/")[0]) and self._removed(key):  # the folders that this leaves empty
                pass

    def drop_unfinished(self, is_over: Callable[[str], bool]) -> None:
        for path in self.root.glob(f"step-*/attempt-*/**/*{_TEMPORARY}*"):
            if is_over(path.relative_to(self.root).as_posix().partition(_TEMPORARY)[0]):
                path.unlink(missing_ok=True)

    def warm_up(self) -> None:
        with _explained(self.root, "make"):
            make_folder(self.root)

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[tuple[int, os.stat_result]]:
        """Descriptor and status of a regular file. Nothing else is opened for long: a FIFO waits for its writer."""
        file = os.open(path, _READING) if self._links else self._open_below(path)
        try:
            about = os.fstat(file)
            if not stat.S_ISREG(about.st_mode):
                raise NotAFile(f"{path}: is no regular file; remove it")
            yield file, about
        finally:
            os.close(file)

    def _path(self, key: str) -> Path:
        if not key or key.startswith("/") or ".." in key.split("/"):
            raise StoreError(f"{key!r} is no key inside the checkpoint folder {self.uri}")
        return self.root / key

    def _open_below(self, path: Path) -> int:
        with self._folder(path.relative_to(self.root).as_posix()) as folder:
            return os.open(path.name, _READING | os.O_NOFOLLOW, dir_fd=folder)

    def _folder(self, key: str, make: bool = False) -> contextlib.AbstractContextManager[int]:
        """The folder that the object lies in."""
        return opened_folder(self.root, key.rpartition("/")[0], self._links, make)

    def _removed(self, key: str) -> bool:
        """Remove the folder if it is empty, and return whether it is gone."""
        try:
            with self._folder(key) as above:
                os.rmdir(key.rpartition("/")[2], dir_fd=above)
        except OSError:  # not empty, or somebody else's
            return False
        return True

    @contextlib.contextmanager
    def _written(self, key: str, data: bytes) -> Iterator[tuple[int, str]]:
        """The object's folder and in it the name of a flushed file, to be given the object's, which is flushed too."""
        with self._folder(key, make=True) as folder, _beside(folder, key.rpartition("/")[2]) as temporary:
            file = os.open(temporary, _WRITING, 0o644, dir_fd=folder)
            try:
                _write_all(file, memoryview(data))
                os.fsync(file)
            finally:
                os.close(file)
            yield folder, temporary
            os.fsync(folder)

    def _walk(self, key: str) -> Iterator[StoredObject]:
        for name, about in self._entries(key):
            below = f"{key}/{name}" if key else name
            if stat.S_ISDIR(about.st_mode):
                with contextlib.suppress(NotAFile):  # it was one a moment ago
                    yield from self._walk(below)
            elif _TEMPORARY not in name:
                yield StoredObject(below, about.st_size, about.st_mtime, _tag(about))

    def _entries(self, key: str) -> list[tuple[str, os.stat_result]]:
        """Return the names in the folder in order, each with its stat; that of a link to a file, where links count, is
        the file's."""
        listed = []
        with (
            contextlib.suppress(FileNotFoundError),  # it was never made, or removed meanwhile
            opened_folder(self.root, key, self._links) as folder,
            os.scandir(folder) as entries,
        ):
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    listed.append((entry.name, self._about(entry)))
        return sorted(listed, key=lambda entry: entry[0])

    def _about(self, entry: os.DirEntry[str]) -> os.stat_result:
        own = entry.stat(follow_symlinks=False)
        if self._links and stat.S_ISLNK(own.st_mode):
            with contextlib.suppress(OSError):  # it leads nowhere, or to itself
                target = entry.stat()
                return own if stat.S_ISDIR(target.st_mode) else target  # into a linked folder nobody descends
        return own


@contextlib.contextmanager
def _beside(folder: int, name: str) -> Iterator[str]:
    """A name in the folder that nobody has, which is no more afterwards."""
    temporary = f"{name}{_TEMPORARY}{uuid.uuid4().hex}"
    try:
        yield temporary
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)


def _reserve(file: int, size: int) -> None:
    """Detect a full disk before a byte is written, if the file system can report it."""
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


def _write_all(file: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(file, data) :]


def _read_all(file: int, start: int, into: memoryview, path: Path) -> None:
    while len(into):
        count = os.preadv(file, [into], start)
        if not count:
            raise TruncatedObject(f"{path}: ends at byte {start}, {len(into)} bytes too early; it was truncated")
        into, start = into[count:], start + count


def _tag(about: os.stat_result) -> str:
    return f"{about.st_ino}:{about.st_mtime_ns}:{about.st_size}"


_ADVICE = {
    errno.ENOSPC: "the disk is full; free space or choose another checkpoint.uri",
    errno.EDQUOT: "the quota is used up; free space or choose another checkpoint.uri",
    errno.EACCES: "permission denied; give the worker's user access to the folder",
    errno.EPERM: "not permitted; give the worker's user access to the folder",
    errno.EROFS: "the file system is read-only; mount it writable or choose another checkpoint.uri",
    errno.ENOTDIR: "a part of the path is a file; choose another checkpoint.uri",
    errno.EIO: "the disk reports an error; check its health",
    errno.ESTALE: "the network file system lost the folder; check its server",
}
_REFUSALS = (errno.EACCES, errno.EPERM, errno.ENOTDIR)


@contextlib.contextmanager
def _explained(path: Path, doing: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{path}: there is no such file") from error
    except IsADirectoryError as error:
        raise NotAFile(f"{path}: is a folder; remove it") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link to itself, a socket
            raise NotAFile(f"{path}: is no regular file; remove it") from error
        advice = _ADVICE.get(error.errno or 0, os.strerror(error.errno) if error.errno else str(error))
        error_type = StoreRefusal if error.errno in _REFUSALS else StoreError
        raise error_type(f"{path}: can't {doing} it: {advice}") from error
