"""Reading every byte of a commit, with little memory, to see that it is what was committed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from muster.contract.checkpoint import Commit
from muster.storage.store import Store
from muster.trainer.checkpoint.fetch import Part, Reader


def verify(store: Store, commit: Commit, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Returns when all files are as the COMMIT says. progress: is told (bytes read, bytes of all).

    Raises DamagedCommit naming the file, CheckpointError where the store fails.
    """
    reader = Reader(store, commit)
    reader.expect_sizes()
    for file in range(len(commit.files)):
        reader.read_starts(reader.header_span(file))
    total, done = sum(file.bytes for file in commit.files), 0

    def check(part: Part) -> int:
        _, length = reader.bounds(part)
        reader.read(part, memoryview(bytearray(length)))
        return length

    with ThreadPoolExecutor(store.streams) as threads:
        for length in threads.map(check, reader.all_parts()):
            done += length
            progress(done, total)
