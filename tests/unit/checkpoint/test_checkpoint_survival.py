"""10,000 random sequences of save, crash, collect, pin, damage and read: the newest verified commit always survives,
also where commits share the files of what is never trained.

The policy and the collector are the real ones, over a store in memory whose every write may be the last before a crash.
"""

import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from muster.storage.checksum import crc32
from muster.storage.errors import NotFound
from muster.storage.listing import steps_in
from muster.storage.pins import pin, pinned, unpin
from muster.storage.readers import being_read, reading
from muster.storage.store import StoredObject
from muster.trainer.checkpoint.collect import CollectionState, collect
from muster.trainer.checkpoint.commits import commit_in, publish
from muster.trainer.checkpoint.failures import CheckpointError
from muster.trainer.checkpoint.quarantine import quarantine
from muster.words.checkpoint import Commit, DataCursor, FileEntry, frozen_key, is_frozen_key, shard_key
from muster.words.job import Keep


class Crash(Exception):
    """The process is gone, in the middle of what it did."""


class ModelStore:
    """The promises of a store, and nothing more: an operation happened or it did not."""

    uri = "file:///model"
    streams = 1

    def __init__(self) -> None:
        self.objects_by_key: dict[str, bytes] = {}
        self.operations_left: int | None = None

    def write(self, key: str, data: memoryview) -> FileEntry:
        self._change()
        self.objects_by_key[key] = bytes(data)
        return FileEntry(key=key, bytes=len(data), checksum=crc32(data))

    def verify(self, entry: FileEntry) -> None:
        assert crc32(self.objects_by_key[entry.key]) == entry.checksum

    def see_all(self, entries: Iterable[FileEntry], prefix: str) -> None:
        assert all(entry.key in self.objects_by_key for entry in entries)

    def create(self, key: str, data: bytes) -> bool:
        self._change()
        return self.objects_by_key.setdefault(key, data) is data

    def replace(self, key: str, data: bytes) -> None:
        self._change()
        self.objects_by_key[key] = data

    def read(self, key: str, bytes_max: int) -> bytes:
        if key not in self.objects_by_key:
            raise NotFound(key)
        return self.objects_by_key[key]

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        into[:] = self.read(key, start + len(into))[start : start + len(into)]

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        yield from [
            StoredObject(k, len(v), 0.0, crc32(v))
            for k, v in sorted(self.objects_by_key.items())
            if k.startswith(prefix)
        ]

    def about(self, key: str) -> StoredObject:
        return StoredObject(key, len(self.read(key, 1)), 0.0, "")

    def delete(self, key: str) -> None:
        self._change()
        self.objects_by_key.pop(key, None)

    def drop_unfinished(self, is_over: Callable[[str], bool]) -> None:
        pass

    def warm_up(self) -> None:
        pass

    def _change(self) -> None:
        if self.operations_left is not None:
            if self.operations_left == 0:
                raise Crash
            self.operations_left -= 1


@dataclasses.dataclass
class Job:
    """One job's life. frozen: the files of what is never trained, which all commits name; None: all is trained."""

    store: ModelStore
    dice: random.Random
    keep: Keep
    frozen: list[FileEntry] | None
    attempt: int = 1
    step: int = 0
    seen: CollectionState = dataclasses.field(default_factory=CollectionState)

    def save(self) -> None:
        self.step += self.dice.randint(1, 5)
        shards = self.dice.randint(1, 3)
        files = [
            self.store.write(shard_key(self.step, self.attempt, shard, shards), memoryview(self.dice.randbytes(4)))
            for shard in range(shards)
        ]
        if self.frozen == []:
            written = [
                self.store.write(frozen_key(self.step, self.attempt, shard, shards), memoryview(self.dice.randbytes(4)))
                for shard in range(shards)
            ]
            self.frozen = written
        loss = self.dice.choice([None, self.dice.random()])
        files += self.frozen or []
        publish(self.store, commit(self.step, self.attempt, files, loss, best=self.dice.random() < 0.3))
        collect(self.store, self.attempt, self.step, self.keep, self.seen)

    def crash(self) -> None:
        self.store.operations_left = None
        self.attempt, self.seen = self.attempt + 1, CollectionState()
        # Usually from the newest; the operator may also go back further, and train the same steps again.
        steps = steps_in(self.store)
        self.step = self.dice.choice(steps) if steps and self.dice.random() < 0.3 else max(steps, default=0)
        if self.frozen is not None:
            files = commit_in(self.store, self.step).files if steps else ()
            self.frozen = [file for file in files if is_frozen_key(file.key)]

    def damage(self) -> None:
        """The newest commit turns out damaged at the next start, and is set aside."""
        if len(verified(self.store)) > 1:
            quarantine(self.store, max(verified(self.store)), "its bytes do not verify")
            self.crash()


def commit(step: int, attempt: int, files: list[FileEntry], loss: float | None, best: bool) -> Commit:
    return Commit(
        job="j", job_uid="u", attempt=attempt, step=step, committed_at=0.0, world_size=len(files), files=tuple(files),
        tensors={}, cursor=DataCursor(seed=0, epoch=0, sample=step), config={}, architecture={},
        metrics={} if loss is None else {"evaluation_loss": loss}, best=best,
    )  # fmt: skip


def verified(store: ModelStore) -> set[int]:
    """Commits whose every file is there and right."""
    found = set()
    for step in steps_in(store):
        try:
            files = commit_in(store, step).files
        except CheckpointError:
            continue
        if all(crc32(store.objects_by_key.get(file.key, b"?")) == file.checksum for file in files):
            found.add(step)
    return found


def live(seed: int) -> None:
    dice = random.Random(seed)
    store = ModelStore()
    keep = Keep(last=dice.randint(1, 3), best=dice.randint(0, 2), every=dice.choice([None, 4]))
    job, marks, before = Job(store, dice, keep, [] if seed % 2 else None), [], set[int]()
    for _ in range(dice.randint(3, 10)):
        spared = pinned(store) | being_read(store, time.time())
        if dice.random() < 0.4:
            store.operations_left = dice.randint(0, 12)
        action = dice.choice(["save"] * 5 + ["pin", "unpin", "read", "damage"])
        try:
            if action == "save":
                job.save()
            elif action == "pin" and before:
                pin(store, dice.choice(sorted(before)))
            elif action == "unpin" and (pins := pinned(store)):
                unpin(store, dice.choice(sorted(pins)))
            elif action == "read" and before:
                mark = reading(store, dice.choice(sorted(before)))
                mark.__enter__()
                marks.append(mark)  # never left: the reader may die with its mark
        except Crash:
            job.crash()
        store.operations_left = None
        after = verified(store)
        if before:
            assert after, f"seed {seed}: all checkpoints are gone after {action}"
            assert max(after) >= max(before), f"seed {seed}: the newest verified checkpoint {max(before)} is gone"
            assert before & spared <= after, f"seed {seed}: a pinned checkpoint, or one being read, is gone"
        assert set(steps_in(store)) == after, f"seed {seed}: a COMMIT names files that are not there"
        before = after
        if action == "damage":
            job.damage()
            before = verified(store)


@pytest.mark.parametrize("seeds", [range(1000), pytest.param(range(1000, 10_000), marks=pytest.mark.long)])
def test_the_newest_verified_commit_always_survives(seeds: range) -> None:
    for seed in seeds:
        live(seed)


def test_a_collector_that_forgets_the_newest_would_be_found(monkeypatch) -> None:
    """The property bites: with a policy that keeps the oldest instead, some sequence fails."""
    from muster.trainer.checkpoint import collect as collecting

    monkeypatch.setattr(collecting, "retained", lambda commits, *_: tuple(c.step for c in list(commits)[1:]))
    failed = 0
    for seed in range(200):
        try:
            live(seed)
        except AssertionError:
            failed += 1
    assert failed > 0
