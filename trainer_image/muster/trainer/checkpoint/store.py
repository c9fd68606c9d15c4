"""A folder of objects: the few questions that checkpoints ask of storage.

Keys are relative to the folder and use `/`. Whatever returns has happened durably; whatever fails raises StoreError,
whose message names the place and the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from muster.contract.checkpoint import FileEntry
from muster.trainer.errors import StorageError, UserError


class StoreError(StorageError):
    """Storage refused or failed, also after the store's own retries."""


class NotFound(StoreError):
    """There is no such object."""


class Truncated(StoreError):
    """An object ends before the bytes that were asked for."""


@dataclass(frozen=True)
class Object:
    key: str
    bytes: int
    modified_at: float  # seconds since the epoch, by the store's clock


def nobody(_: int) -> None:
    """For who does not want to hear of progress."""


class Store(Protocol):
    """uri: the folder. streams: how many requests at a time serve it best."""

    uri: str
    streams: int

    def write(self, key: str, data: memoryview, sent: Callable[[int], None] = nobody) -> FileEntry:
        """Store a large immutable object whole, replacing a remnant of the same key. The entry's checksum is of
        `data`. sent: is told the bytes of each part that has arrived, from any thread."""

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

    def read(self, key: str) -> bytes:
        """A small object whole. Raises NotFound."""

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        """Bytes [start, start + len(into)) of an object. Raises NotFound, Truncated."""

    def objects(self, prefix: str) -> Iterator[Object]:
        """Objects whose key starts with `prefix`, in order of their keys."""

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens where there is none."""

    def drop_unfinished(self, is_over: Callable[[str], bool]) -> None:
        """Remove what interrupted writes left behind, of keys whose writer is certainly gone."""

    def warm_up(self) -> None:
        """Do now what the first request would have to wait for."""


def expect_all(entries: Iterable[FileEntry], there: Mapping[str, int], uri: str) -> None:
    """Raises StoreError for the first file that is not `there` (bytes by key) in the size that its entry says."""
    for entry in entries:
        if there.get(entry.key) != entry.bytes:
            seen = "is not there" if entry.key not in there else f"holds {there[entry.key]} bytes, not {entry.bytes}"
            raise StoreError(
                f"{uri}/{entry.key}: {seen}, although its rank has written it; all ranks must see the same folder"
            )


def open_store(uri: str) -> Store:
    """The store of a `file://` or `s3://` address, or of a plain path. Raises UserError for any other address."""
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        from muster.trainer.checkpoint.file_store import FileStore

        if parts.netloc not in ("", "localhost"):
            raise UserError(f"checkpoint address {uri!r} names the host {parts.netloc!r}; write file:///absolute/path")
        return FileStore(Path(unquote(parts.path)).absolute())
    if parts.scheme == "s3":
        from muster.trainer.checkpoint.s3_store import S3Store

        return S3Store(uri)
    raise UserError(
        f"checkpoint address {uri!r} has an unknown scheme; Muster reads file:///folder and s3://bucket/folder"
    )
