"""Listing of the checkpoints in a job's folder.

A COMMIT never changes once it is written, so each is read once; one that was replaced has another tag.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from muster.storage.commits import COMMIT_BYTES_MAX, InvalidCommit, NewerCommit, parse_commit
from muster.storage.errors import NotFound, UnfitObject
from muster.storage.opening import open_store
from muster.storage.settings import S3Settings, share_client
from muster.storage.store import Store, StoredObject
from muster.words.address import StorageAddress, parse_address
from muster.words.checkpoint import COMMITS, Commit, commit_key, step_of_commit_key


@dataclass(frozen=True)
class CommitSummary:
    """Entry of the listing. `committed_at` is in seconds since the epoch, by the committer's clock; `tokens`
    were trained until then; `best`: it is the one that `--step best` takes; `bytes` are those of all its files, and
    `added_bytes` those that were written for it. Of a newer Muster's commit only the first three are known."""

    step: int
    attempt: int
    committed_at: float
    world_size: int = 0
    tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best: bool = False
    bytes: int = 0
    added_bytes: int = 0
    files: int = 0
    kind: Literal["tensors", "folder"] = "tensors"

    @staticmethod
    def of(commit: Commit) -> CommitSummary:
        return CommitSummary(
            step=commit.step,
            attempt=commit.attempt,
            committed_at=commit.committed_at,
            world_size=commit.world_size,
            tokens=commit.tokens,
            metrics={name: value for name, value in commit.metrics.items() if math.isfinite(value)},
            best=commit.best,
            bytes=commit.bytes,
            added_bytes=commit.added_bytes,
            files=len(commit.files),
            kind=commit.kind,
        )


def steps_in(store: Store) -> tuple[int, ...]:
    """Steps of the commits, ascending. Raises StoreError."""
    return tuple(sorted(step for step, _ in _commit_objects(store)))


def best_of(commits: Iterable[tuple[int, bool]]) -> int | None:
    """The best of a folder's commits, from the step of each and whether it was the best when it was made. Each that was
    best outdid all before it, so the newest of them is. None where no commit was judged."""
    return max((step for step, best in commits if best), default=None)


class CommitListing:
    """Lists the commits of any number of folders; safe to use from several threads."""

    def __init__(self) -> None:
        self._summaries: dict[str, dict[str, CommitSummary | None]] = {}  # folder → tag → what was read
        self._stores: dict[str, Store] = {}
        self._opening = threading.Lock()

    def read(self, folder: StorageAddress) -> tuple[CommitSummary, ...]:
        """Ascending by step. What can't be read as a COMMIT is not one. Raises StoreError, AddressError."""
        store, cached = self.store(folder), self._summaries.get(str(folder), {})
        summaries: dict[str, CommitSummary | None] = {}
        for step, entry in _commit_objects(store):
            tag = f"{entry.key}:{entry.tag}"
            summaries[tag] = cached[tag] if tag in cached else _summary(store, step)
        self._summaries[str(folder)] = summaries
        return _with_one_best(sorted((seen for seen in summaries.values() if seen), key=lambda seen: seen.step))

    def read_at(self, folder: str) -> tuple[CommitSummary, ...]:
        """Do as `read`, for an address as it was written."""
        return self.read(parse_address(folder))

    def store(self, folder: StorageAddress) -> Store:
        """The folder's store; all of S3 share one client, for each takes megabytes."""
        with self._opening:
            if (store := self._stores.get(str(folder))) is None:
                store = self._stores[str(folder)] = _opened(folder)
            return store

    def forget(self, folder: StorageAddress) -> None:
        """The job is gone."""
        self._summaries.pop(str(folder), None)
        self._stores.pop(str(folder), None)


def _with_one_best(commits: list[CommitSummary]) -> tuple[CommitSummary, ...]:
    best = best_of((commit.step, commit.best) for commit in commits)
    return tuple(replace(commit, best=False) if commit.best and commit.step != best else commit for commit in commits)


def _opened(folder: StorageAddress) -> Store:
    settings = None
    if folder.scheme == "s3":
        settings = S3Settings.for_a_look(os.environ)
        share_client(settings)
    return open_store(folder, settings, links=False)  # a job writes there, and may not say by links what is read for it


def _commit_objects(store: Store) -> list[tuple[int, StoredObject]]:
    numbered = ((step_of_commit_key(entry.key), entry) for entry in store.objects(f"{COMMITS}/"))
    return [(step, entry) for step, entry in numbered if step is not None]


def read_commit(store: Store, step: int) -> Commit:
    """The COMMIT of a step in the folder of its own job. Raises NotFound, UnfitObject, InvalidCommit, StoreError."""
    data = store.read(commit_key(step), COMMIT_BYTES_MAX)
    return parse_commit(data, step=step, folder=parse_address(store.uri).name)


def _summary(store: Store, step: int) -> CommitSummary | None:
    try:
        return CommitSummary.of(read_commit(store, step))
    except NewerCommit as newer:  # for its trainer to judge: not to believe it would mean to begin again at step 0
        return CommitSummary(step, newer.attempt, newer.committed_at)
    except (NotFound, UnfitObject, InvalidCommit):  # removed meanwhile, or none of ours
        return None
