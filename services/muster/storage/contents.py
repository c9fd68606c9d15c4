"""Files by what they hold: `<project>/<sha256><ending>` in one folder, so that equal ones are there once.

The ending is that of the name they came with (`.jsonl`, `.csv.gz`): readers derive the format from it.
"""

from __future__ import annotations

import functools
import mmap
import os
import re
from dataclasses import replace
from pathlib import Path

from muster.storage.errors import NotFound
from muster.storage.file_store import FileStore
from muster.storage.opening import open_store
from muster.storage.settings import S3Settings
from muster.storage.sources import COMPRESSED
from muster.storage.store import Store
from muster.words.address import StorageAddress

_ENDING = re.compile(r"\.[a-z0-9]{1,12}")


def ending_of(name: str) -> str:
    """The ending of a file's name that gives its format, with that of a compression; empty if it gives none.

    >>> ending_of("My data.JSONL.gz")
    '.jsonl.gz'
    """
    name = name.lower()
    compressed = next((each for each in COMPRESSED if name.endswith(each)), "")
    stem, dot, last = name.removesuffix(compressed).rpartition(".")
    kind = dot + last if stem and _ENDING.fullmatch(dot + last) else ""
    return kind + compressed


class UploadedContents:
    """Uploaded files, in a folder of this machine or of S3; each project has a folder of its own there, by
    which the workers of other projects are kept out."""

    def __init__(self, place: StorageAddress) -> None:
        self.place = place

    @functools.cached_property
    def store(self) -> Store:
        return open_store(self.place)

    def key(self, project: str, sha256: str, name: str) -> str:
        return f"{project}/{sha256}{ending_of(name)}"

    def address(self, key: str) -> str:
        """Return the address as a job's document names it."""
        return str(self.place.child(key))

    def has(self, key: str) -> bool:
        """Raises StoreError."""
        try:
            self.store.about(key)
        except NotFound:
            return False
        return True

    def put(self, key: str, path: Path, kms_key_id: str | None = None) -> None:
        """Keep the bytes of a file of this machine, which is gone afterwards; on S3 encrypted by that key, where one is
        given, in place of the platform's. Raises StoreError."""
        if isinstance(self.store, FileStore):
            self.store.adopt(key, path)
            return
        store = self._store_of(kms_key_id)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            view = memoryview(mapped)
            try:
                store.verify(store.write(key, view))
            finally:
                view.release()
        path.unlink()

    def _store_of(self, kms_key_id: str | None) -> Store:
        if kms_key_id is None:
            return self.store
        return open_store(self.place, replace(S3Settings.from_environment(os.environ), kms_key_id=kms_key_id))

    def delete(self, key: str) -> None:
        """Delete the bytes; a missing object is ignored. Raises StoreError."""
        self.store.delete(key)
