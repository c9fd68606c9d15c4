"""python -m muster.trainer.programs.keeper [--parent PID]

Keeps the checkpoints that a program writes: watches its folder, copies what is complete, uploads the copy while the
program goes on, and publishes it. One runs beside each worker, from before the program starts until its ranks are gone.

The rule of what is complete is in `watch.py`.

`--parent` names the process whose end is also the program's; without it, SIGTERM is (a sidecar's pod ends).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from muster.storage.errors import StorageError, StoreError
from muster.storage.opening import open_store
from muster.storage.small_files import write_whole
from muster.storage.store import Store
from muster.trainer.arguments import ArgumentParser
from muster.trainer.errors import StaleAttempt, UserError
from muster.trainer.programs import KEEPING, WorkerOrders, read_surroundings
from muster.trainer.programs.listing import FileListing, UnfitFolder, look_at, metrics_of, step_of
from muster.trainer.programs.parts import AttemptParts, PartFailed, PublishOrder
from muster.trainer.programs.snapshot import ChangedMeanwhile, CheckpointSnapshot, take
from muster.trainer.programs.upload import SnapshotPublisher
from muster.trainer.programs.watch import FolderWatch, RankProgress
from muster.words.checkpoint import FileEntry
from muster.words.names import KEEPER_STATE, STOP, ExitCode
from muster.worker.fence import FenceUnreachable

LOOK_SECONDS: Final = 0.5  # between two looks at the folder; a rename is heard of at once
# Pauses between tries of a store that fails. The last is repeated: a checkpoint waits as long as the program runs.
RETRY_SECONDS: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
# After the ranks are gone, for what is complete. The worker's node is held meanwhile; a pod that is evicted has less.
END_SECONDS_MAX: Final = 300.0
# For the other workers' parts of a checkpoint: a slow disk's upload of 100 GB. A worker that is gone ends the attempt.
PARTS_SECONDS_MAX: Final = 1800.0
PARTS_AFTER_END_SECONDS: Final = 60.0  # the same, once this worker's ranks are gone
LOOKING_SHARE: Final = 0.05  # of a core, at most, for a folder with many files
COPIES_MAX: Final = 3  # tries to copy a checkpoint that changes meanwhile, before it is said


@dataclass
class KeeperState:
    """Contents of keeper.json."""

    state: Literal["idle", "uploading", "done"] = "idle"
    committed_step: int | None = None
    committed_at: float | None = None
    fault: str | None = None  # the newest; None once a checkpoint after it is published


@dataclass
class SnapshotUploads:
    """Snapshots on their way to the store: one under way, and one that waits."""

    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="upload"))
    waiting: CheckpointSnapshot | None = None
    current: CheckpointSnapshot | None = None
    result: Future[None] | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is under way or waits."""
        return self.result is None and self.waiting is None


class FolderKeeper:
    def __init__(self, around: WorkerOrders, store: Store, retry_seconds: tuple[float, ...] = RETRY_SECONDS) -> None:
        self._around, self._store, self._retry_seconds = around, store, retry_seconds
        self._publisher, self._parts = SnapshotPublisher(around, store), AttemptParts(store, around.attempt)
        self._state = KeeperState()
        self._watch = FolderWatch(around, self._refuse)
        self._uploads = SnapshotUploads()
        self._last_step = around.resume_step  # the newest that is committed, or that this attempt resumed from
        self._ordered = -1  # by worker 0, and answered
        self._tries: Counter[str | None] = Counter()  # copies of checkpoints that changed meanwhile
        self._copies = 0
        self.ended_at: float | None = None  # when the ranks were seen to be gone

    @property
    def state(self) -> KeeperState:
        return self._state

    @property
    def is_idle(self) -> bool:
        return self._uploads.is_idle

    def begin(self) -> None:
        """Make the watched folder and watch it, before the program starts. Raises UserError where another job's
        program writes there too."""
        watched = self._around.watched
        watched.mkdir(parents=True, exist_ok=True)
        (self._around.worker_dir / KEEPING).mkdir(parents=True, exist_ok=True)
        if self._around.worker == 0:
            self._lock = os.open(watched, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{watched}: another job's program writes its checkpoints there; give each job a folder of its own"
                ) from None
        self._last_step = max(self._last_step, self._publisher.newest_step())
        try:
            self._watch.follow()
        except OSError as error:
            self._say(
                f"renames into {watched} can't be seen ({error.strerror}): only other marks of completeness count"
            )
        self._write_state()

    def run(self, parent: int | None = None) -> int:
        """Keep checkpoints until the ranks are gone and what is complete is published. Returns an exit code."""
        seconds = LOOK_SECONDS
        while True:
            if self.ended_at is None and (self._watch.ranks_ended() or (parent is not None and os.getppid() != parent)):
                self.ended_at = time.monotonic()
            was_ended = self.ended_at
            seconds = self._look_for_long(seconds)
            if self._state.state == "done":
                return int(ExitCode.STALE_ATTEMPT)
            if was_ended is None:
                continue
            late = time.monotonic() - was_ended > END_SECONDS_MAX
            if late or (self._uploads.is_idle and self._has_answered_last_order()):
                return self.end()

    def _look_for_long(self, seconds: float) -> float:
        """Look once, whatever the disk says, and return the pause before the next look."""
        began = time.thread_time()
        try:
            self.look(seconds)
        except OSError as error:
            self._fault(f"{error.filename or self._around.watched}: {error.strerror or error}")
            time.sleep(seconds)
        return max(LOOK_SECONDS, (time.thread_time() - began) / LOOKING_SHARE)

    def end(self) -> int:
        """Stop, whatever is under way, and say so."""
        if self._around.worker == 0 and self._around.workers > 1:
            with contextlib.suppress(StoreError):
                self._parts.end()
        if (left := self._uploads.current or self._uploads.waiting) is not None:
            self._say(
                f"step {left.step} was not published before the worker's end: {self._state.fault or 'no time left'}"
            )
        self._uploads.threads.shutdown(wait=False, cancel_futures=True)
        self._state.state = "done"
        self._write_state()
        return 0

    def look(self, seconds: float) -> None:
        """Look at the folder once, after a rename or at most so many seconds, and see to the upload."""
        self._watch.wait(seconds)
        self._take_result()
        progress = self._watch.progress()
        if self._around.worker == 0:
            for listing in self._watch.complete(progress):
                self._keep(listing, progress)
        else:
            self._answer_order(progress)
        if self._uploads.result is None and self._uploads.waiting is not None:
            self._uploads.current, self._uploads.waiting = self._uploads.waiting, None
            self._uploads.result = self._uploads.threads.submit(self._until_published, self._uploads.current)
            self._set(state="uploading")

    # --- copying ---

    def _keep(self, listing: FileListing, progress: RankProgress) -> None:
        """Copy a complete checkpoint, to be uploaded next in place of an older one that waits."""
        asked = self._watch.requests().get(listing.entry or "", {}).get("step")
        step = asked if isinstance(asked, int) else step_of(self._around.watched, listing)
        pending = (self._uploads.current, self._uploads.waiting)
        newest = max([self._last_step, *(each.step for each in pending if each is not None)])
        if step is None:
            step = max(progress.step or 0, newest + 1)
        elif step <= newest:
            if step < self._around.resume_step:
                self._fault(
                    f"{listing.entry} is of step {step}, although the job was to resume from step "
                    f"{self._around.resume_step}: the program does not resume; have it load $MUSTER_RESUME_DIR"
                )
            return self._watch.handle(listing)
        values = {**progress.values, **metrics_of(self._around.watched, listing)}
        if (snapshot := self._copied(listing, step, values, progress.tokens)) is None:
            return
        self._watch.handle(listing)
        if (newer := self._watch.superseded_by(listing, step)) is not None:
            self._say(f"step {step} is passed over: the program had {newer} by then, and may be deleting this one")
            return snapshot.drop()
        if self._uploads.waiting is not None:
            self._say(f"step {self._uploads.waiting.step} is passed over for step {step}: its upload had not begun")
            self._uploads.waiting.drop()
        self._uploads.waiting = snapshot

    def _copied(
        self, listing: FileListing, step: int, values: dict[str, float], tokens: int
    ) -> CheckpointSnapshot | None:
        self._copies += 1
        into = self._around.worker_dir / KEEPING / f"copy-{self._copies}"
        try:
            take(self._around.watched, listing, into)
        except ChangedMeanwhile as changed:
            self._tries[listing.entry] += 1
            if self._tries[listing.entry] % COPIES_MAX == 0:
                self._fault(f"{changed}; it is not published: leave a checkpoint as it is once it is complete")
            return None
        except UnfitFolder as unfit:
            self._refuse(listing.entry, str(unfit))
            self._watch.handle(listing)
            return None
        self._tries.pop(listing.entry, None)
        return CheckpointSnapshot(listing, step, into, values, tokens)

    # --- upload, in the thread ---

    def _until_published(self, snapshot: CheckpointSnapshot) -> None:
        """Upload and publish, again until it succeeds. Raises UnfitFolder, PartFailed, StaleAttempt."""
        tries = 0
        while True:
            try:
                return self._publish(snapshot)
            except (StorageError, FenceUnreachable, OSError) as error:
                if isinstance(error, StaleAttempt):
                    raise
                if (newer := self._uploads.waiting) is not None:
                    raise PartFailed(f"{error}; step {newer.step} takes its place") from error
                pause = self._retry_seconds[min(tries, len(self._retry_seconds) - 1)]
                tries += 1
                self._fault(f"step {snapshot.step} is not published yet, try {tries} failed: {error}")
                time.sleep(pause)

    def _publish(self, snapshot: CheckpointSnapshot) -> None:
        around = self._around
        if around.workers > 1:
            self._parts.order(snapshot.step, snapshot.listing)
        files = self._publisher.upload(snapshot)
        for worker in range(1, around.workers):
            files += self._part_of(worker, snapshot.step)
        self._publisher.publish(snapshot, files)
        if around.workers > 1:
            with contextlib.suppress(StoreError):
                self._parts.sweep()

    def _part_of(self, worker: int, step: int) -> tuple[FileEntry, ...]:
        deadline = time.monotonic() + PARTS_SECONDS_MAX
        while (files := self._parts.of(step, worker)) is None:
            is_over = self.ended_at is not None and time.monotonic() - self.ended_at > PARTS_AFTER_END_SECONDS
            if is_over or time.monotonic() > deadline:
                raise PartFailed(f"worker {worker} has not uploaded its part of step {step}; is its node gone?")
            time.sleep(LOOK_SECONDS)
        return files

    def _take_result(self) -> None:
        if self._uploads.result is None or not self._uploads.result.done():
            return
        upload, snapshot = self._uploads.result, self._uploads.current
        self._uploads.result = self._uploads.current = None
        assert snapshot is not None
        snapshot.drop()
        try:
            upload.result()
        except StaleAttempt as stale:
            self._say(f"step {snapshot.step} is not published: {stale}")
            return self._set(state="done", fault=str(stale))
        except (UnfitFolder, PartFailed) as unfit:
            self._set(state="idle")
            return self._fault(f"step {snapshot.step} is not published: {unfit}")
        self._last_step = max(self._last_step, snapshot.step)
        self._say(f"step {snapshot.step} is published: {len(snapshot.listing.files)} files")
        self._set(state="idle", committed_step=snapshot.step, committed_at=time.time(), fault=None)

    # --- workers other than the first ---

    def _answer_order(self, progress: RankProgress) -> None:
        """Upload this node's part of the checkpoint that worker 0 publishes, once it is complete here too."""
        try:
            order = self._parts.newest_order()
        except StoreError as error:
            return self._fault(f"worker 0's order can't be read: {error}")
        if order is None or order.step <= self._ordered:
            return
        try:
            listing = look_at(self._around.watched, order.entry)
            if listing is None or not set(listing.files) - set(order.files):
                files: tuple[FileEntry, ...] | None = () if self._has_nothing(listing, order, progress) else None
            else:
                files = self._upload_part(order, listing, progress)
            if files is None:
                return
            self._parts.report(order.step, self._around.worker, files)
        except UnfitFolder as unfit:
            with contextlib.suppress(StoreError):
                self._parts.report(order.step, self._around.worker, (), str(unfit))
            self._fault(str(unfit))
        except StoreError as error:
            return self._fault(f"this worker's part of step {order.step} is not uploaded yet: {error}")
        self._ordered = order.step

    def _has_nothing(self, listing: FileListing | None, order: PublishOrder, progress: RankProgress) -> bool:
        """Return whether this node has no part of the checkpoint, and will have none: its ranks are past that step, or
        it sees in the folder the very files that worker 0 sees."""
        if listing is not None and listing.files:
            return True
        if self.ended_at is None and (self._around.watched / f".{order.entry}.partial").exists():
            return False  # muster.run's; it is about to be renamed
        is_past = progress.step is None or progress.step >= order.step
        return self.ended_at is not None or is_past

    def _upload_part(
        self, order: PublishOrder, listing: FileListing, progress: RankProgress
    ) -> tuple[FileEntry, ...] | None:
        """None while the part is not complete here, or changes. Raises UnfitFolder where it will never be."""
        is_past = progress.step is None and self.ended_at is None and not self._watch.requests()
        if not (self._watch.is_complete(listing, progress) or is_past):
            if self.ended_at is not None:  # no step comes any more that would show that it is whole
                raise UnfitFolder(f"{order.entry}: the ranks were gone before they took a step after it")
            return None
        if (snapshot := self._copied(listing, order.step, {}, 0)) is None:
            return None
        try:
            if (newer := self._watch.superseded_by(listing, order.step)) is not None:
                raise UnfitFolder(f"{order.entry}: the program had {newer} by then, and may be deleting this one")
            return self._publisher.upload(snapshot, order.files)
        finally:
            snapshot.drop()

    def _has_answered_last_order(self) -> bool:
        """Worker 0 may still publish what is complete on all workers, as long as they end as they should: it orders
        its last checkpoint when its own ranks are gone. Where the ranks of this worker failed, those of worker 0 may
        run on, and end only once the operator hears of this failure; nothing more is waited for than what is ordered,
        and for a minute what muster.run has made whole on this node and worker 0 has not ordered yet.
        """
        if self._around.worker == 0:
            return True
        try:
            order = self._parts.newest_order()
        except StoreError:
            return False
        more = self._watch.has_ended_well() or (self._around.worker_dir / STOP).exists()
        newest = max((request["step"] for request in self._watch.requests().values()), default=-1)
        is_late = self.ended_at is None or time.monotonic() - self.ended_at > PARTS_AFTER_END_SECONDS
        if newest > self._ordered and not is_late and not (order is not None and order.is_last):
            return False
        return order is None or ((order.is_last or not more) and order.step <= self._ordered)

    # --- what is said ---

    def _refuse(self, entry: str | None, why: str) -> None:
        self._fault(f"{entry or 'the checkpoint'} is not published: {why}")

    def _fault(self, words: str) -> None:
        if words != self._state.fault:
            self._say(words)
            self._set(fault=words)

    def _say(self, words: str) -> None:
        print(f"checkpoints: {words}", file=sys.stderr, flush=True)

    def _set(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self._state, name, value)
        self._write_state()

    def _write_state(self) -> None:
        names = {"committed_step": "committedStep", "committed_at": "committedAt"}
        document = {names.get(name, name): value for name, value in asdict(self._state).items()}
        with contextlib.suppress(OSError):  # a full disk; the launcher does without
            write_whole(self._around.worker_dir / KEEPER_STATE, json.dumps(document))


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="python -m muster.trainer.programs.keeper", description=__doc__)
    parser.add_argument("--parent", type=int, help="end when this process, which has started this one, is gone")
    try:
        chosen: argparse.Namespace = parser.parse_args(arguments)
        around = read_surroundings()
        keeper = FolderKeeper(around, open_store(around.store))
        keeper.begin()
    except (UserError, StorageError) as error:
        print(f"checkpoints: {error}", file=sys.stderr, flush=True)
        return int(ExitCode.USER_ERROR if isinstance(error, UserError) else ExitCode.STORAGE)

    def ended(*_: object) -> None:
        if chosen.parent is None and keeper.ended_at is None:
            keeper.ended_at = time.monotonic()

    signal.signal(signal.SIGTERM, ended)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = keeper.run(chosen.parent)
    sys.stderr.flush()
    os._exit(code)  # an upload that was given up has a thread that can't be stopped


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
