"""Upload and publication of a folder checkpoint: every file written and verified, the attempt confirmed, the COMMIT
last. The rules are those of the trainer's own checkpoints (`checkpoint/coordinator.py`)."""

from __future__ import annotations

import math
import mmap
import platform
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby

from pydantic import ValidationError

from muster.storage.checksum import PART_BYTES, crc32
from muster.storage.errors import StorageError
from muster.storage.listing import steps_in
from muster.storage.store import Store
from muster.trainer.checkpoint.collect import CollectionState, collect
from muster.trainer.checkpoint.commits import commit_in, publish
from muster.trainer.checkpoint.failures import CheckpointError
from muster.trainer.programs import WorkerOrders
from muster.trainer.programs.listing import FileFacts, UnfitFolder
from muster.trainer.programs.snapshot import CheckpointSnapshot
from muster.words.address import parse_address
from muster.words.checkpoint import PROGRAM_VERSION, Commit, FileEntry, folder_file_key, path_in_folder
from muster.worker.fence import FenceUnreachable, confirm

FENCE_RETRIES = 5
JUDGED_BY = "evaluation_loss"


class SnapshotPublisher:
    """Writes snapshots to the job's store. Used by one thread at a time."""

    def __init__(self, around: WorkerOrders, store: Store) -> None:
        self._around, self._store = around, store
        self._seen = CollectionState()
        self._published: dict[FileFacts, FileEntry] = {}  # by the newest COMMIT: not written again

    def newest_step(self) -> int:
        """Return the newest step that this attempt has published, by a keeper that was killed; 0 where none was, or the
        store does not say."""
        try:
            for step in reversed(steps_in(self._store)):
                if commit_in(self._store, step, own=True).attempt == self._around.attempt:
                    return step
                if step <= self._around.resume_step:
                    break
        except (StorageError, CheckpointError):
            pass
        return 0

    def upload(self, snapshot: CheckpointSnapshot, elsewhere: Iterable[FileFacts] = ()) -> tuple[FileEntry, ...]:
        """Write and verify the files of a snapshot, but for those that another worker has, for they share the folder.
        Raises StoreError, UnfitFolder."""
        shared = frozenset(elsewhere)
        files = [file for file in snapshot.listing.files if file not in shared]
        with ThreadPoolExecutor(self._store.streams) as threads:
            return tuple(threads.map(lambda file: self._write(snapshot, file), files))

    def publish(self, snapshot: CheckpointSnapshot, files: tuple[FileEntry, ...]) -> None:
        """Confirm the attempt and write the COMMIT, then remove what retention does not keep. Raises StaleAttempt,
        FenceUnreachable, StoreError, CheckpointError, UnfitFolder."""
        around, listing = self._around, snapshot.listing
        metrics = {name: value for name, value in snapshot.metrics.items() if math.isfinite(value)}
        try:
            commit = Commit(
                version=PROGRAM_VERSION, kind="folder", trainer="program", entry=listing.entry,
                job=around.job, job_uid=around.job_uid, folder=parse_address(around.store).name or None,
                attempt=around.attempt, step=snapshot.step, committed_at=time.time(),
                world_size=around.workers * around.ranks, files=merged(files), tokens=snapshot.tokens,
                metrics=metrics, best=self._is_best(metrics), versions=_versions(),
            )  # fmt: skip
        except ValidationError as error:
            raise UnfitFolder(f"{listing.entry}: can't be described: {error.errors()[0]['msg']}") from None
        for folder, group in groupby(sorted(commit.files, key=_folder), key=_folder):
            self._store.see_all(list(group), folder)
        self._confirm_attempt()
        publish(self._store, commit)
        by_path = {path_in_folder(entry.key): entry for entry in commit.files}
        self._published = {file: by_path[file.path] for file in listing.files}
        collect(self._store, around.attempt, snapshot.step, around.checkpoint.keep, self._seen)

    def _write(self, snapshot: CheckpointSnapshot, file: FileFacts) -> FileEntry:
        if (entry := self._published.get(file)) is not None:
            return entry
        key = folder_file_key(snapshot.step, self._around.attempt, file.path)
        if not file.path.isprintable() or len(key) > 1024 or ".tmp-" in file.path:
            raise UnfitFolder(f"{file.path[:200]!r}: no file of a checkpoint can have this name; rename it")
        path = snapshot.path(file)
        if not path.stat().st_size:
            self._store.replace(key, b"")
            empty = crc32(b"")
            return FileEntry(key=key, bytes=0, checksum=empty, part_bytes=PART_BYTES, parts=(empty,))
        with open(path, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            view = memoryview(mapped)
            try:
                entry = self._store.write(key, view)
                self._store.verify(entry)
            finally:
                view.release()
        return entry

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether no earlier checkpoint has a lower evaluation loss."""
        if (loss := metrics.get(JUDGED_BY)) is None:
            return False
        for step in steps_in(self._store):
            try:
                earlier = commit_in(self._store, step).metrics.get(JUDGED_BY)
            except CheckpointError:
                continue
            if earlier is not None and earlier <= loss:
                return False
        return True

    def _confirm_attempt(self) -> None:
        around = self._around
        if around.fence is None:
            return
        for retry in range(FENCE_RETRIES):
            try:
                return confirm(around.fence, around.job_uid, around.attempt, around.worker, around.incarnation)
            except FenceUnreachable:
                if retry == FENCE_RETRIES - 1:
                    raise
                time.sleep(0.2 * 2**retry)


def merged(files: Iterable[FileEntry]) -> tuple[FileEntry, ...]:
    """The files of all workers by their paths. Workers may have written the same file, but not two files of one path:
    raises UnfitFolder."""
    by_path: dict[str, FileEntry] = {}
    for entry in files:
        path = path_in_folder(entry.key) or entry.key
        first = by_path.setdefault(path, entry)
        if (first.bytes, first.checksum) != (entry.bytes, entry.checksum):
            raise UnfitFolder(
                f"two workers have written different files by the name {path}; give each rank's file its rank's "
                "number, or write to a folder that all workers share"
            )
    return tuple(by_path[path] for path in sorted(by_path))


def _folder(entry: FileEntry) -> str:
    return entry.key.rpartition("/")[0] + "/"


def _versions() -> dict[str, str]:
    try:
        own = version("muster-train")
    except PackageNotFoundError:
        own = "unknown"
    return {"muster": own, "python": platform.python_version()}
