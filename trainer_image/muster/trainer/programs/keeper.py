"""python -m muster.trainer.programs.keeper [--parent PID]

Keeps the checkpoints that a program writes: watches its folder, copies what is complete, uploads the copy while the
program goes on, and publishes it. One runs beside each worker, from before the program starts until its ranks are gone.

A checkpoint is a folder in the watched folder, or all files there that end in .pt, .pth, .ckpt or .safetensors. It is
complete when the program says so, by a rename into place or by `muster.run`; or when the library that writes it leaves
its mark and every rank of this worker has taken a later step since the last write. Anything else is not published: what
is written in place looks the same half way.

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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from muster.contract.checkpoint import FileEntry
from muster.contract.names import KEEPER_STATE, PREPARED, PROGRESS, RANKS_ENDED, SAVE_REQUEST, ExitCode
from muster.storage.errors import StorageError, StoreError
from muster.storage.opening import open_store
from muster.storage.small_files import write_whole
from muster.storage.store import Store
from muster.trainer.arguments import Arguments
from muster.trainer.errors import StaleAttempt, UserError
from muster.trainer.fence import FenceUnreachable
from muster.trainer.programs.listing import (
    FileFacts,
    Listing,
    UnfitFolder,
    entries_of,
    has_marker,
    is_checkpoint_file,
    look_at,
    metrics_of,
    step_of,
)
from muster.trainer.programs.parts import Order, PartFailed, Parts
from muster.trainer.programs.renames import Renames
from muster.trainer.programs.snapshot import ChangedMeanwhile, Snapshot, take
from muster.trainer.programs.surroundings import (
    KEEPING,
    Surroundings,
    read_document,
    read_surroundings,
)
from muster.trainer.programs.upload import Publisher

LOOK_SECONDS: Final = 0.5  # between two looks at the folder; a rename is heard of at once
# Pauses between tries of a store that fails. The last is repeated: a checkpoint waits as long as the program runs.
RETRY_SECONDS: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
# After the ranks are gone, for what is complete. The worker's node is held meanwhile; a pod that is evicted has less.
END_SECONDS_MAX: Final = 300.0
# For the other workers' parts of a checkpoint: a slow disk's upload of 100 GB. A worker that is gone ends the attempt.
PARTS_SECONDS_MAX: Final = 1800.0
COPIES_MAX: Final = 3  # tries to copy a checkpoint that changes meanwhile, before it is said


@dataclass
class KeeperState:
    """Contents of keeper.json."""

    state: Literal["idle", "uploading", "done"] = "idle"
    committed_step: int | None = None
    committed_at: float | None = None
    fault: str | None = None  # the newest; None once a checkpoint after it is published


@dataclass(frozen=True)
class Progress:
    """Steps of this worker's ranks. `everyone_since` is when the slowest rank finished its newest step; None while a
    rank has told of none."""

    step: int | None = None
    everyone_since: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    tokens: int = 0


class Keeper:
    def __init__(self, around: Surroundings, store: Store, retry_seconds: tuple[float, ...] = RETRY_SECONDS) -> None:
        self._around, self._store, self._retry_seconds = around, store, retry_seconds
        self._folder = around.worker_dir / KEEPING
        self._publisher, self._parts = Publisher(around, store), Parts(store, around.attempt)
        self._state = KeeperState()
        self._renames: Renames | None = None
        self._renamed: set[str] = set()  # names that came by a rename, and are not handled yet
        self._sound: set[FileFacts] = set()  # files in the watched folder itself that are complete
        self._handled: dict[str | None, Listing] = {}  # as it was when it was published, refused or passed over
        self._tries: dict[str | None, int] = {}
        self._has_folders = False
        self._last_step = around.resume_step  # the newest that is committed, or that this attempt resumed from
        self._next: Snapshot | None = None  # complete, and not uploading yet
        self._uploading: Snapshot | None = None
        self._upload: Future[None] | None = None
        self._ordered = -1  # by worker 0, and answered
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._copies = 0
        self.ended_at: float | None = None  # when the ranks were seen to be gone

    @property
    def state(self) -> KeeperState:
        return self._state

    def begin(self) -> None:
        """Make the watched folder and watch it, before the program starts. Raises UserError where another job's
        program writes there too."""
        watched = self._around.watched
        watched.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._around.worker == 0:
            self._lock = os.open(watched, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{watched}: another job's program writes its checkpoints there; give each job a folder of its own"
                ) from None
        prepared = read_document(self._around.worker_dir / PREPARED) or {}
        if "entry" in prepared:
            self._has_folders = prepared["entry"] is not None
            with contextlib.suppress(UnfitFolder):
                if (listing := look_at(watched, prepared["entry"])) is not None:
                    self._handled[prepared["entry"]] = listing
        try:
            self._renames = Renames(watched)
        except OSError as error:
            self._say(
                f"renames into {watched} can't be seen ({error.strerror}): only other marks of completeness count"
            )
        self._write_state()

    def run(self, parent: int | None = None) -> int:
        """Keep checkpoints until the ranks are gone and what is complete is published. Returns an exit code."""
        while True:
            if self.ended_at is None and (self._ranks_ended() or (parent is not None and os.getppid() != parent)):
                self.ended_at = time.monotonic()
            was_ended = self.ended_at
            self.look(LOOK_SECONDS)
            if self._state.state == "done":
                return int(ExitCode.STALE_ATTEMPT)
            if was_ended is None:
                continue
            late = time.monotonic() - was_ended > END_SECONDS_MAX
            if late or (self.is_idle and self._has_answered_last_order()):
                return self.end()

    def end(self) -> int:
        """Stop, whatever is under way, and say so."""
        if self._around.worker == 0 and self._around.workers > 1:
            with contextlib.suppress(StoreError):
                self._parts.end()
        if (left := self._uploading or self._next) is not None:
            self._say(
                f"step {left.step} was not published before the worker's end: {self._state.fault or 'no time left'}"
            )
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._state.state = "done"
        self._write_state()
        return 0

    def look(self, seconds: float) -> None:
        """Look at the folder once, after a rename or at most so many seconds, and see to the upload."""
        self._hear_renames(seconds)
        self._take_result()
        progress = self._progress()
        if self._around.worker == 0:
            for listing in self._complete(progress):
                self._keep(listing, progress)
        else:
            self._answer_order(progress)
        if self._upload is None and self._next is not None:
            self._uploading, self._next = self._next, None
            self._upload = self._threads.submit(self._until_published, self._uploading)
            self._set(state="uploading")

    # --- which are complete ---

    def _complete(self, progress: Progress) -> list[Listing]:
        """Checkpoints that are complete and not handled, oldest first."""
        watched, requests = self._around.watched, self._requests()
        try:
            names: list[str | None] = [*entries_of(watched)]
        except FileNotFoundError:
            return []
        found = []
        for name in [*names, None]:
            try:
                listing = look_at(watched, name)
            except UnfitFolder as unfit:
                if name in self._renamed or name in requests:
                    self._refuse(name, str(unfit))
                continue
            if listing is None or not listing.files or self._handled.get(name) == listing:
                continue
            if self._is_complete(listing, progress, requests):
                self._has_folders |= name is not None
                found.append(listing)
        if self._has_folders:
            found = [listing for listing in found if listing.entry is not None]
        return sorted(found, key=lambda listing: listing.changed_at)

    def _is_complete(self, listing: Listing, progress: Progress, requests: dict[str, dict[str, Any]]) -> bool:
        """The rule. Of a worker other than the first: of what worker 0 has found complete."""
        later = self._is_later(listing.changed_at, progress)
        if listing.entry is not None:
            if listing.entry in self._renamed or listing.entry in requests:
                return True
            return later and (self._around.worker > 0 or has_marker(self._around.watched, listing))
        self._sound |= {file for file in listing.files if file.path in self._renamed}
        rest = tuple(file for file in listing.files if file not in self._sound)
        if rest and later and has_marker(self._around.watched, replace(listing, files=rest)):
            self._sound |= set(rest)
        return self._sound.issuperset(listing.files)

    def _is_later(self, changed_at: float, progress: Progress) -> bool:
        """Return whether every rank has finished a step since then, or all have ended well."""
        if self.ended_at is not None and self._ended_well():
            return True
        return progress.everyone_since is not None and progress.everyone_since > changed_at

    # --- copying ---

    def _keep(self, listing: Listing, progress: Progress) -> None:
        """Copy a complete checkpoint, to be uploaded next in place of an older one that waits."""
        named = self._requests().get(listing.entry or "", {}).get("step")
        step = named if isinstance(named, int) else step_of(self._around.watched, listing)
        newest = max(self._last_step, self._uploading.step if self._uploading else 0)
        if step is None:
            step = max(progress.step or 0, newest + 1)
        elif step <= newest:
            if step < self._around.resume_step:
                self._fault(
                    f"{listing.entry} is of step {step}, although the job was to resume from step "
                    f"{self._around.resume_step}: the program does not resume; have it load $MUSTER_RESUME_DIR"
                )
            return self._handle(listing)
        values = {**progress.values, **metrics_of(self._around.watched, listing)}
        if (snapshot := self._copied(listing, step, values, progress.tokens)) is None:
            return
        self._handle(listing)
        if self._next is not None:
            self._say(f"step {self._next.step} is passed over for step {step}: its upload had not begun")
            self._next.drop()
        self._next = snapshot

    def _copied(self, listing: Listing, step: int, values: dict[str, float], tokens: int) -> Snapshot | None:
        self._copies += 1
        into = self._folder / f"copy-{self._copies}"
        try:
            take(self._around.watched, listing, into)
        except ChangedMeanwhile as changed:
            tries = self._tries[listing.entry] = self._tries.get(listing.entry, 0) + 1
            if tries % COPIES_MAX == 0:
                self._fault(f"{changed}; it is not published: leave a checkpoint as it is once it is complete")
            return None
        except UnfitFolder as unfit:
            self._refuse(listing.entry, str(unfit))
            self._handle(listing)
            return None
        self._tries.pop(listing.entry, None)
        return Snapshot(listing, step, into, values, tokens)

    def _handle(self, listing: Listing) -> None:
        self._handled[listing.entry] = listing
        if listing.entry is not None:
            self._renamed.discard(listing.entry)
        else:
            self._renamed -= {file.path for file in listing.files}

    # --- upload, in the thread ---

    def _until_published(self, snapshot: Snapshot) -> None:
        """Upload and publish, again until it succeeds. Raises UnfitFolder, PartFailed, StaleAttempt."""
        tries = 0
        while True:
            try:
                return self._publish(snapshot)
            except (StorageError, FenceUnreachable, OSError) as error:
                if isinstance(error, StaleAttempt):
                    raise
                pause = self._retry_seconds[min(tries, len(self._retry_seconds) - 1)]
                tries += 1
                self._fault(f"step {snapshot.step} is not published yet, try {tries} failed: {error}")
                time.sleep(pause)

    def _publish(self, snapshot: Snapshot) -> None:
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
            if time.monotonic() > deadline:
                raise PartFailed(f"worker {worker} has not uploaded its part of step {step}; is its node gone?")
            time.sleep(LOOK_SECONDS)
        return files

    def _take_result(self) -> None:
        if self._upload is None or not self._upload.done():
            return
        upload, snapshot = self._upload, self._uploading
        self._upload = self._uploading = None
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

    def _answer_order(self, progress: Progress) -> None:
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

    def _has_nothing(self, listing: Listing | None, order: Order, progress: Progress) -> bool:
        """Return whether this node has no part of the checkpoint, and will have none: its ranks are past that step, or
        it sees in the folder the very files that worker 0 sees."""
        if listing is not None and listing.files:
            return True
        is_past = progress.step is None or progress.step >= order.step
        return self.ended_at is not None or is_past

    def _upload_part(self, order: Order, listing: Listing, progress: Progress) -> tuple[FileEntry, ...] | None:
        """None while the part is not complete here, or changes."""
        is_past = progress.step is None and self.ended_at is None and not self._requests()
        if not (self._is_complete(listing, progress, self._requests()) or is_past):
            return None
        if (snapshot := self._copied(listing, order.step, {}, 0)) is None:
            return None
        try:
            return self._publisher.upload(snapshot, order.files)
        finally:
            snapshot.drop()

    def _has_answered_last_order(self) -> bool:
        """Worker 0 may still publish what is complete on all workers."""
        if self._around.worker == 0:
            return True
        try:
            order = self._parts.newest_order()
        except StoreError:
            return False
        return order is None or (order.is_last and order.step <= self._ordered)

    # --- what others say ---

    def _hear_renames(self, seconds: float) -> None:
        if self._renames is None:
            return time.sleep(seconds)
        names = self._renames.wait(seconds)
        with contextlib.suppress(OSError):
            self._renames.follow()
        self._renamed |= {name for name in names if is_checkpoint_file(name) or (self._around.watched / name).is_dir()}

    def _progress(self) -> Progress:
        """Steps of this worker's ranks, as their own files tell; a rank that has not reported leaves all unknown."""
        found = [read_document(path) for path in sorted(self._around.worker_dir.glob(PROGRESS.format(rank="*")))]
        told = [one for one in found if one is not None and isinstance(one.get("step"), int)]
        if not told:
            return Progress()
        numbers = {**(told[0].get("values") or {}), "loss": told[0].get("loss")}
        values = {str(name): float(v) for name, v in numbers.items() if isinstance(v, int | float)}
        tokens = told[0].get("tokens")
        since = [float(one["progressedAt"]) for one in told if isinstance(one.get("progressedAt"), int | float)]
        everyone = len(told) >= self._around.ranks and len(since) == len(told)
        return Progress(
            step=min(int(one["step"]) for one in told),
            everyone_since=min(since) if everyone else None,
            values=values,
            tokens=tokens if isinstance(tokens, int) and tokens >= 0 else 0,
        )

    def _requests(self) -> dict[str, dict[str, Any]]:
        """The newest request of muster.run for each folder, by the folder's name."""
        found: dict[str, dict[str, Any]] = {}
        for path in self._around.worker_dir.glob(SAVE_REQUEST.format(step="*")):
            if (request := read_document(path)) is not None and isinstance(request.get("folder"), str):
                name = Path(request["folder"]).name
                if request.get("step", -1) >= found.get(name, {}).get("step", -1):
                    found[name] = request
        return found

    def _ranks_ended(self) -> bool:
        return (self._around.worker_dir / RANKS_ENDED).exists()

    def _ended_well(self) -> bool:
        ranks = (read_document(self._around.worker_dir / RANKS_ENDED) or {}).get("ranks")
        if not isinstance(ranks, list) or not ranks:
            return False
        return all(isinstance(rank, dict) and rank.get("exitCode") == 0 for rank in ranks)

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is under way or waits."""
        return self._upload is None and self._next is None

    # --- what is said ---

    def _refuse(self, entry: str | None, why: str) -> None:
        if entry is not None:
            self._renamed.discard(entry)
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
    parser = Arguments(prog="python -m muster.trainer.programs.keeper", description=__doc__)
    parser.add_argument("--parent", type=int, help="end when this process, which has started this one, is gone")
    try:
        chosen: argparse.Namespace = parser.parse_args(arguments)
        around = read_surroundings()
        keeper = Keeper(around, open_store(around.store))
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
