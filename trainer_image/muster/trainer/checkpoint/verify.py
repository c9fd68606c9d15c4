"""Reading every byte of a commit, with little memory, to see that it is what was committed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from muster.storage.store import Store
from muster.trainer.checkpoint.fetch import CommitReader, FilePart
from muster.words.checkpoint import Commit, FileEntry, is_frozen_key


def verify(
    store: Store,
    commit: Commit,
    progress: Callable[[int, int], None] = lambda done, total: None,
    read: set[str] | None = None,
) -> None:
    """Read all files of a commit, and return when they are as the COMMIT says.

    `progress` is called with (bytes read, bytes of all). `read` holds the frozen files that were read for an earlier
    commit, by key and checksum; they are not read again, and this commit's join them. Raises DamagedCommit naming the
    file, CheckpointError where the store fails.
    """
    reader = CommitReader(store, commit)
    reader.expect_sizes()
    for file in range(len(commit.files)) if commit.kind == "tensors" else ():
        reader.read_starts(reader.header_span(file))
    read = set() if read is None else read
    parts = [part for part in reader.all_parts() if _name(commit.files[part.file]) not in read]
    total, done = sum(reader.bounds(part)[1] for part in parts), 0

    def check(part: FilePart) -> int:
        _, length = reader.bounds(part)
        reader.read(part, memoryview(bytearray(length)))
        return length

    with ThreadPoolExecutor(store.streams) as threads:
        for length in threads.map(check, parts):
            done += length
            progress(done, total)
    read |= {_name(file) for file in commit.files if is_frozen_key(file.key)}


def _name(file: FileEntry) -> str:
    return f"{file.key} {file.checksum}"
