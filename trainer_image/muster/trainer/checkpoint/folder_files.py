"""Files of a folder checkpoint, fetched and verified: for a resume, for an export, and as another program's input."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from muster.storage.store import Store
from muster.trainer.checkpoint.fetch import CommitReader, FilePart
from muster.words.checkpoint import Commit, path_in_folder


def paths_of(commit: Commit) -> tuple[PurePosixPath, ...]:
    """Return the path of each file of a folder checkpoint, relative to the folder, in the order of `commit.files`."""
    return tuple(PurePosixPath(path_in_folder(file.key) or file.key) for file in commit.files)


def write_folder(
    store: Store, commit: Commit, directory: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Write the files of a folder checkpoint below `directory`, each verified as it is read, and flush them.

    The sizes are compared first, so that nothing is written of a checkpoint whose files are gone or cut short. Only
    what verified is written, but a failure leaves the files before it: the caller writes to a folder that nobody
    reads yet and renames it. `progress` is called with (bytes written, bytes of all). Raises DamagedCommit naming the
    file, CheckpointError where the store fails, OSError where the disk does.
    """
    reader = CommitReader(store, commit)
    reader.expect_sizes()
    directory.mkdir(parents=True, exist_ok=True)
    places = [directory / path for path in paths_of(commit)]
    for place, entry in zip(places, commit.files, strict=True):
        place.parent.mkdir(parents=True, exist_ok=True)
        with open(place, "xb") as file:
            file.truncate(entry.bytes)
    done = 0

    def write(part: FilePart) -> int:
        start, length = reader.bounds(part)
        buffer = memoryview(bytearray(length))
        reader.read(part, buffer)
        file = os.open(places[part.file], os.O_WRONLY | os.O_NOFOLLOW)
        try:
            while buffer:
                count = os.pwrite(file, buffer, start)
                buffer, start = buffer[count:], start + count
        finally:
            os.close(file)
        return length

    with ThreadPoolExecutor(store.streams) as threads:
        for length in threads.map(write, reader.all_parts()):
            done += length
            progress(done, commit.bytes)
    _flush(places)


def _flush(places: Iterable[Path]) -> None:
    for place in places:
        with open(place, "rb") as file:
            os.fsync(file.fileno())
