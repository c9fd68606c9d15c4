"""A folder of objects: the few questions that Muster asks of storage.

Keys are relative to the folder and use `/`. Whatever returns has happened durably; whatever fails raises StoreError,
whose message names the place and the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from muster.contract.address import Address, AddressError, parse_address
from muster.contract.checkpoint import FileEntry
from muster.storage.errors import StoreError
from muster.storage.settings import S3Settings

SMALL_BYTES_MAX = 1 << 30  # of an object that is read whole: the COMMIT of a large model takes tens of MB


@dataclass(frozen=True)
class Object:
    """modified_at: seconds since the epoch, by the store's clock. tag: changes whenever the bytes do."""

    key: str
    bytes: int
    modified_at: float
    tag: str


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

    def read(self, key: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        """A small object whole. Raises NotFound, or TooLarge without reading it."""

    def read_into(self, key: str, start: int, into: memoryview, tag: str | None = None) -> None:
        """Bytes [start, start + len(into)) of an object, of this `tag` if one is given. Raises NotFound, NotAFile,
        Truncated, Replaced."""

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


def open_store(place: str | Address, settings: S3Settings | None = None) -> Store:
    """The store of a folder: a `file://` or `s3://` address, or a plain path. Raises AddressError for any other.

    settings: of S3; None: as the environment has them.
    """
    address = parse_address(place) if isinstance(place, str) else place
    if address.scheme == "file":
        from muster.storage.file_store import FileStore

        return FileStore(address.local.absolute())
    if address.scheme == "s3":
        from muster.storage.s3_store import S3Store

        return S3Store(address, settings)
    raise AddressError(f"{address}: is no folder; Muster keeps folders under file:///folder and s3://bucket/folder")
