"""Files of a data source: a file, a folder, a glob, file://, s3://, https://, or this Python's own library."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import hashlib
import io
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from muster.storage.errors import NotFound, StorageError, final_errors_are_the_users
from muster.storage.opening import open_source
from muster.storage.settings import S3Settings
from muster.storage.store import ReadOnlyStore, StoredObject
from muster.words.address import data_address
from muster.words.base import UserError
from muster.words.redaction import redact, without_query

STDLIB = "builtin://python-stdlib"
# Tests are more than half of the library and mostly data; the packages beside it are not part of it. What is left:
# about 730 files and 12 MB in Python 3.11.
STDLIB_WITHOUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

COMPRESSED = (".gz", ".zst")
RECORD_ENDINGS = (".jsonl", ".jsonlines", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
BLOCK_BYTES = 1 << 20
# What a part of a data set is called by the name of its file or folder, as they are published and kept.
_SPLIT = re.compile(
    r"(?P<split>train|training|test|testing|valid|validation|val|dev|eval|evaluation)(-\d{1,5}(-of-\d{1,5})?(-\w+)?)?"
)
_SPLITS = {"training": "train", "train": "train", "testing": "test", "test": "test"}  # the others are of validation
_MAGIC = re.compile(r"[*?\[]")

Report = Callable[[str], None]


class SourceFile(Protocol):
    """One input file, on this machine or in a store. `address` names it in messages and gives its kind by its ending; a
    query, which may be a signature, is no part of it."""

    @property
    def address(self) -> str: ...
    @property
    def size(self) -> int: ...  # bytes, as stored
    @property
    def stamp(self) -> str: ...  # changes whenever the content does, as far as one can see without reading it
    def open(self) -> BinaryIO:
        """All bytes in order."""

    def open_anywhere(self) -> BinaryIO:
        """A file that can be sought in, for formats whose table of contents is at the end."""


def ending(file: SourceFile) -> str:
    """The ending of a file's name that gives its kind, in small letters, without that of a compression."""
    name = file.address.lower()
    for compressed in COMPRESSED:
        name = name.removesuffix(compressed)
    return os.path.splitext(name)[1]


@dataclass(frozen=True)
class LocalFile:
    path: Path
    size: int
    stamp: str

    @property
    def address(self) -> str:
        return str(self.path)

    def open(self) -> BinaryIO:
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise _unreadable(self.path, error) from None

    def open_anywhere(self) -> BinaryIO:
        return self.open()


@dataclass(frozen=True)
class StoredFile:
    """An object of a store, whose tag is the digest: nothing is read twice."""

    store: ReadOnlyStore
    entry: StoredObject

    @property
    def address(self) -> str:
        where = f"{self.store.uri}/{self.entry.key}"
        return without_query(where) if where.startswith("https://") else where

    @property
    def size(self) -> int:
        return self.entry.bytes

    @property
    def stamp(self) -> str:
        return self.entry.tag

    def open(self) -> BinaryIO:
        return cast(BinaryIO, self.store.open(self.entry))

    def open_anywhere(self) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_RangeReader(self.store, self.entry), BLOCK_BYTES))


class _RangeReader(io.RawIOBase):
    """An object that can be sought in: each read is a request for that range."""

    def __init__(self, store: ReadOnlyStore, entry: StoredObject) -> None:
        self._store, self._entry, self._at = store, entry, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._entry.bytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(0, min(len(buffer), self._entry.bytes - self._at))
        if count:
            self._store.read_into(self._entry.key, self._at, memoryview(buffer)[:count], self._entry.tag)
        self._at += count
        return count


@final_errors_are_the_users()
def find(
    address: str,
    format: str,
    report: Report = lambda line: None,
    files_max: int | None = None,
    settings: S3Settings | None = None,
) -> tuple[SourceFile, ...]:
    """The files of a source, sorted by path, each once.

    In a folder, hidden files are passed over, and for the formats of records all but RECORD_ENDINGS. `report` is called
    with a line of text where several paths lead to one file. S3 is reached by `settings`, or by the environment's.
    Raises UserError when there are no files or the address can't be read, StorageError when a disk or store fails,
    ValueError for more than `files_max` files.
    """
    files = tuple(islice(_files(address, format, report, settings), None if files_max is None else files_max + 1))
    if files_max is not None and len(files) > files_max:
        raise ValueError(f"data source {address}: more than {files_max} files")
    if not files:
        raise UserError(f"data source {redact(address)}: no files for format {format} there{_hint(format)}")
    return files


def _files(address: str, format: str, report: Report, settings: S3Settings | None) -> Iterator[SourceFile]:
    place = data_address(address)
    if place.scheme == "builtin":
        yield from map(_local, _stdlib())
    elif place.scheme == "file":
        yield from map(_local, _paths(place.local, format, report))
    elif place.scheme == "https":
        # Nothing of the web can be listed, and `?` begins a query there.
        store = open_source(replace(place, path=""))
        yield StoredFile(store, store.about(place.path))
    else:
        store = open_source(replace(place, path=""), settings)
        named, objects = _objects(store, place.path)
        yield from (
            StoredFile(store, one) for one in objects if named or _is_source_file(one.key.rpartition("/")[2], format)
        )


def _objects(store: ReadOnlyStore, key: str) -> tuple[bool, Iterator[StoredObject]]:
    """Return whether the key names the objects, and the objects: the one of that key, those that match it as a
    glob, or all under it as a folder; sorted by key."""
    if magic := _MAGIC.search(key):
        matching = (each for each in store.objects(key[: magic.start()]) if fnmatch.fnmatchcase(each.key, key))
        return True, (each for each in matching if not each.key.rpartition("/")[2].startswith("."))
    if key and not key.endswith("/"):
        with contextlib.suppress(NotFound):
            return True, iter([store.about(key)])
        key += "/"
    # The empty object that some tools make for a folder is none.
    return False, (each for each in store.objects(key) if not each.key.endswith("/"))


def _hint(format: str) -> str:
    if format in ("text", "auto"):
        return ""
    return f" (looked for *{', *'.join(RECORD_ENDINGS)}, and their {' and '.join(COMPRESSED)})"


def _paths(path: Path, format: str, report: Report) -> Iterator[Path]:
    try:
        if path.is_dir():
            yield from sorted(_inside(path, format))
        elif path.is_file():
            yield path
        elif path.exists():
            raise UserError(f"data source {path}: is neither a file nor a folder")
        elif glob.has_magic(str(path)):
            yield from _once_each(sorted(each for each in _matches(path) if each.is_file()), report)
        else:
            where = "" if path.is_absolute() else f" (relative to {Path.cwd()})"
            raise UserError(f"data source {path}: does not exist{where}; check the path, and that every node sees it")
    except OSError as error:
        raise _unreadable(path, error) from None


def _inside(folder: Path, format: str) -> Iterator[Path]:
    """Yield the files below the folder; links are followed, but no folder is entered twice."""
    for here, names in _folders_below(folder):
        for name in names:
            path = Path(here, name)
            if _is_source_file(name, format) and path.is_file():
                yield path


def _folders_below(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (a folder, the names of its files) for it and all folders below it except hidden ones. Links are followed,
    and no folder is entered twice, so that a loop of links ends."""
    entered: set[tuple[int, int]] = set()

    def refuse(error: OSError) -> None:
        raise error

    for here, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield here, names


def _matches(pattern: Path) -> Iterator[Path]:
    """The paths that a glob means. `**` stands for any folders below the place where it is, each entered once; Python's
    own would follow a loop of links as deep as the system lets it."""
    parts = pattern.parts
    if "**" not in parts:
        yield from map(Path, glob.iglob(str(pattern)))
        return
    at = parts.index("**")
    rest = [part for part in parts[at + 1 :] if part != "**"] or ["*"]
    for start in glob.iglob(str(Path(*parts[:at]))) if at else (".",):
        if os.path.isdir(start):
            for here, _ in _folders_below(Path(start)):
                yield from map(Path, glob.iglob(str(Path(glob.escape(here), *rest))))


def _once_each(paths: Iterable[Path], report: Report) -> Iterator[Path]:
    """The first path to each file; links to a file that is there already are reported and left out."""
    first: dict[tuple[int, int], Path] = {}
    again: list[Path] = []
    for path in paths:
        status = path.stat()
        if first.setdefault((status.st_dev, status.st_ino), path) == path:
            yield path
        else:
            again.append(path)
    if again:
        report(
            f"data: warning: {len(again):,} of the paths lead to files that are read already (links), and are left "
            f"out: {again[0]}{' and others' if len(again) > 1 else ''}"
        )


def _is_source_file(name: str, format: str) -> bool:
    return not name.startswith(".") and (format in ("text", "auto") or is_of_records(name))


def split_of(file: SourceFile) -> tuple[str, str] | None:
    """The part of a data set that the file is of (train, test or validation) by its name, or else by its folder's; and
    the glob or folder that means all files of it there."""
    folder, _, name = file.address.rpartition("/")
    if match := _SPLIT.fullmatch(name.partition(".")[0].lower()):
        return _SPLITS.get(match["split"], "validation"), f"{folder}/{name[: match.end('split')]}*"
    if match := _SPLIT.fullmatch(folder.rpartition("/")[2].lower()):
        return _SPLITS.get(match["split"], "validation"), folder
    return None


def is_glob(address: str) -> bool:
    return _MAGIC.search(address) is not None


def is_of_records(name: str) -> bool:
    """Return whether a file of this name holds records."""
    name = name.lower()
    return name.endswith(RECORD_ENDINGS) or any(
        name.endswith(kind + compressed) for kind in RECORD_ENDINGS for compressed in COMPRESSED
    )


def _stdlib() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for here, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in STDLIB_WITHOUT)
        yield from (Path(here, name) for name in sorted(names) if name.endswith(".py"))


def _local(path: Path) -> LocalFile:
    try:
        status = path.stat()
        stamp = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"
    except OSError as error:
        raise _unreadable(path, error) from None
    return LocalFile(path, status.st_size, stamp)


def _unreadable(path: Path, error: OSError) -> UserError | StorageError:
    place = error.filename or path
    if isinstance(error, PermissionError):
        return UserError(f"data source {place}: permission denied; let the job's user (uid {os.geteuid()}) read it")
    if isinstance(error, FileNotFoundError):
        return UserError(f"data source {place}: was removed while it was being read")
    return StorageError(f"data source {place}: can't be read: {error}")


def digest(file: SourceFile) -> str:
    """BLAKE2b of the file's bytes, hex; an object's tag stands for it. Reads the whole file, block by block."""
    if isinstance(file, StoredFile):
        return f"etag:{file.stamp}:{file.size}"
    state = hashlib.blake2b(digest_size=20)
    try:
        with file.open() as stream:
            while block := stream.read(BLOCK_BYTES):
                state.update(block)
    except OSError as error:
        raise _unreadable(Path(file.address), error) from None
    return state.hexdigest()
