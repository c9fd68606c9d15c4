"""A folder of objects: the few questions that Muster asks of storage.

Keys are relative to the folder and use `/`. Whatever returns has happened durably; whatever fails raises StoreError,
whose message names the place and the next step.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from muster.storage.errors import StoreError
from muster.words.checkpoint import FileEntry

SMALL_BYTES_MAX = 1 << 30  # of an object that is read whole: the COMMIT of a large model takes tens of MB


@dataclass(frozen=True)
class StoredObject:
    """One object of a folder. `modified_at` is in seconds since the epoch, by the store's clock; `tag` changes whenever
    the bytes do."""

    key: str
    bytes: int
    modified_at: float
    tag: str


class ReadableBody(Protocol):
    def read(self, count: int) -> bytes: ...


def nobody(_: int) -> None:
    """Take the news of progress for a caller who does not want it."""


class ReadOnlyStore(Protocol):
    """A folder that can be read. `uri` is its address; `streams` is how many requests at a time serve it best."""

    uri: str
    streams: int

    def about(self, key: str) -> StoredObject:
        """Return one object. Raises NotFound."""

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        """Objects whose key starts with `prefix`, in order of their keys."""

    def read(self, key: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        """A small object whole. Raises NotFound, or TooLarge without reading it."""

    def read_into(self, key: str, start: int, into: memoryview, tag: str | None = None) -> None:
        """Read the bytes [start, start + len(into)) of an object, of this `tag` if one is given. Raises NotFound,
        NotAFile, Truncated, Replaced."""

    def open(self, entry: StoredObject) -> io.BufferedReader:
        """Open an object for reading all its bytes in order; broken connections are re-established. Raises Replaced,
        also while reading."""


class Store(ReadOnlyStore, Protocol):
    """A folder that can be written as well."""

    def write(self, key: str, data: memoryview, sent: Callable[[int], None] = nobody) -> FileEntry:
        """Store a large immutable object whole, replacing a remnant of the same key. The entry's checksum is of `data`.
        `sent` is called with the bytes of each part that has arrived, from any thread."""

    def verify(self, entry: FileEntry) -> None:
        """Return if what is stored is what `entry` says, StoreError if not."""

    def see_all(self, entries: Iterable[FileEntry], prefix: str) -> None:
        """Return if files below `prefix` that others have written and verified are visible from here; StoreError if
        not.

        Ranks whose `file://` folder is a disk of their own are found out by this.
        """

    def create(self, key: str, data: bytes) -> bool:
        """Store a small object if there is none by that key; False if there is."""

    def replace(self, key: str, data: bytes) -> None:
        """Store a small object, in one go, whatever was there."""

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens where there is none."""

    def drop_unfinished(self, is_over: Callable[[str], bool]) -> None:
        """Remove what interrupted writes left behind, of keys whose writer is certainly gone."""

    def warm_up(self) -> None:
        """Do now what the first request would have to wait for."""


class ObjectStream(io.RawIOBase):
    """An object's bytes in order. `connect` opens its body from a byte on; `call` makes a request again where that
    helps."""

    def __init__(
        self, size: int, connect: Callable[[int], ReadableBody], call: Callable[[Callable[[], bytes]], bytes]
    ) -> None:
        self._size, self._connect, self._call = size, connect, call
        self._at = 0
        self._body: ReadableBody | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._call(lambda: self._read(len(buffer))) if self._at < self._size else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, count: int) -> bytes:
        try:
            if self._body is None:
                self._body = self._connect(self._at)
            if data := self._body.read(count):
                return data
            raise EOFError(f"the connection ended after {self._at} of {self._size} bytes")
        except Exception:
            self._body = None
            raise


def expect_all(entries: Iterable[FileEntry], there: Mapping[str, int], uri: str) -> None:
    """Raises StoreError for the first file that is not `there` (bytes by key) in the size that its entry says."""
    for entry in entries:
        if there.get(entry.key) != entry.bytes:
            seen = "is not there" if entry.key not in there else f"holds {there[entry.key]} bytes, not {entry.bytes}"
            raise StoreError(
                f"{uri}/{entry.key}: {seen}, although its rank has written it; all ranks must see the same folder"
            )
