"""Verification of a checkpoint: its files are read again and compared with what was committed."""

from __future__ import annotations

import time
from collections.abc import Iterator

from muster.api.core.access import find_job
from muster.api.core.callers import Principal
from muster.api.core.checkpoints.routes import commit_folder, explained
from muster.api.core.database.tables import JobRow
from muster.api.core.errors import ApiError
from muster.api.core.services import Services
from muster.storage.checksum import parts_of, running_checksum
from muster.storage.errors import StoreError
from muster.storage.listing import CommitListing, read_commit
from muster.storage.store import ReadOnlyStore
from muster.words.checkpoint import FileEntry
from muster.words.text import size

# Of one request: ten seconds of a disk. Half of it would refuse a commit of a 1B model with its optimizer's state; a
# request that reads twice as much outlasts the time that proxies give it.
VERIFY_BYTES_MAX = 16 << 30
VERIFY_SECONDS_MAX = 300.0  # at a slow disk's 60 MB/s
BLOCK_BYTES = 16 << 20
READS = 3  # of a block of a file: one wrong answer of a store is no damage


async def verify_commit(services: Services, caller: Principal, job_id: str, step: int) -> tuple[int, float]:
    """Verify a checkpoint, and return the bytes and seconds of what was read. Raises ApiError checkpoint_unusable,
    naming the file that has changed."""
    row = await find_job(services, caller, job_id, act=True)
    began = time.monotonic()
    folder = commit_folder(row)
    with explained(folder):
        whole = await services.folders.run(folder, _verify, services.commits, row, step, seconds=VERIFY_SECONDS_MAX)
    return whole, time.monotonic() - began


def _verify(commits: CommitListing, row: JobRow, step: int) -> int:
    folder = commit_folder(row)
    store = commits.store(folder)
    with explained(folder):
        commit = read_commit(store, step)
        whole = sum(file.bytes for file in commit.files)
        if whole > VERIFY_BYTES_MAX:
            detail = (
                f"The checkpoint of step {step} has {size(whole)}, more than the {size(VERIFY_BYTES_MAX)} that are "
                f"read here: `muster checkpoints verify {row.name} {step}` reads it where the checkpoints lie."
            )
            raise ApiError("checkpoint_unusable", detail)
        for file in commit.files:
            try:
                _expect_committed_bytes(store, file, commit.checksum_algorithm)
            except StoreError as error:
                raise ApiError("checkpoint_unusable", f"The checkpoint of step {step} is damaged: {error}") from error
    return whole


def _expect_committed_bytes(store: ReadOnlyStore, file: FileEntry, algorithm: str) -> None:
    """Read a file, whatever the store itself says of it, and raise StoreError where it is not what was committed."""
    # What is wrong comes before the folder's address, which may be long: a page shows the beginning of a message.
    if (there := store.about(file.key).bytes) != file.bytes:
        raise StoreError(f"{file.key} holds {there} bytes, not {file.bytes} ({store.uri})")
    part_bytes = file.part_bytes if file.parts and file.part_bytes else max(file.bytes, 1)
    for (start, length), checksum in zip(parts_of(file.bytes, part_bytes), file.parts or (file.checksum,), strict=True):
        for reads_left in reversed(range(READS)):
            actual = running_checksum(_blocks(store, file.key, start, length), algorithm)
            if actual == checksum:
                break
            if not reads_left:
                span = f"bytes {start} to {start + length}"
                raise StoreError(f"{file.key}: {span} have checksum {actual}, not {checksum} ({store.uri})")


def _blocks(store: ReadOnlyStore, key: str, start: int, length: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(BLOCK_BYTES, length)))
    for offset, count in parts_of(length, BLOCK_BYTES):
        store.read_into(key, start + offset, buffer[:count])
        yield buffer[:count]
