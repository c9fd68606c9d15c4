"""A commit whose bytes did not verify is set aside, with the reason, so that nobody tries it again. Where they verify
later after all (the store was wrong, or somebody has restored its files), it is put back."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from muster.storage.commits import COMMIT_BYTES_MAX
from muster.storage.errors import NotAFile, NotFound, StoreError
from muster.storage.listing import steps_in
from muster.storage.opening import open_store
from muster.storage.store import Store
from muster.trainer.checkpoint.commits import commit_in, parse, read_and_parse
from muster.trainer.checkpoint.failures import (
    CheckpointError,
    DamagedCommit,
    GoneCommit,
    UnknownFormat,
    UnusableCommit,
)
from muster.trainer.checkpoint.fetch import CommitReader
from muster.trainer.checkpoint.verify import verify
from muster.trainer.errors import StorageError, UserError
from muster.words.checkpoint import QUARANTINE, Commit, commit_key, step_name

T = TypeVar("T")

# All ranks wait meanwhile. Half of it would leave a commit of 20 GB on a usual store aside; twice as much is lost at
# the start of each attempt where the files of a larger one are damaged at their end.
PUT_BACK_SECONDS_MAX = 30.0
# Where there is nothing else to resume from, so that all that was trained would be lost.
ONLY_HOPE_SECONDS_MAX = 600.0


def quarantine(store: Store, step: int, reason: str, damaged: bool = True) -> None:
    """Move the COMMIT of `step` to quarantine/. Its files stay until a newer commit outlives them.

    `damaged` says that its bytes did not verify, and may do so later; if not, training can't go on from them. Raises
    StoreError, also where it is too large to be kept there; then it stays where it is.
    """
    try:
        commit = _text(store, step)
    except NotFound:
        return
    except NotAFile:  # nothing can be read from it, so nothing of it is to be kept
        commit = None
    record = {"step": step, "at": time.time(), "reason": reason, "damaged": damaged, "commit": commit}
    store.replace(_key(step), json.dumps(record).encode())
    store.delete(commit_key(step))


def _text(store: Store, step: int) -> str:
    """A COMMIT as it is stored, if need be at the third asking: it is what a commit that is put back is made of."""
    with contextlib.suppress(CheckpointError):
        return read_and_parse(store, step)[1].decode()
    return store.read(commit_key(step), COMMIT_BYTES_MAX).decode(errors="replace")


def put_back(store: Store, step: int, progress: Callable[[int, int], None] = lambda done, total: None) -> Commit | None:
    """Read all files of a quarantined commit, and make it a commit again where they verify. None where it was set aside
    for another reason than its bytes, or the step has another commit by now.

    Raises DamagedCommit where they still do not, CheckpointError or StoreError where the store fails.
    """
    record = _record(store, step)
    if not record.get("damaged", True) or step in steps_in(store):
        return None
    data = str(record.get("commit") or "").encode()
    commit = parse(data, store, step, own=True)
    verify(store, commit, progress)
    if not store.create(commit_key(step), data):
        return None
    try:
        CommitReader(
            store, commit
        ).expect_sizes()  # a save of a running attempt may have swept them before it saw the COMMIT
    except DamagedCommit:
        if store.read(commit_key(step), COMMIT_BYTES_MAX) == data:
            store.delete(commit_key(step))
        raise
    store.delete(_key(step))
    return commit


def put_back_newest(
    store: Store, report: Callable[[str], None], seconds_max: float = PUT_BACK_SECONDS_MAX
) -> tuple[int, ...]:
    """Put back what was set aside of the newest steps, where it verifies after all within that time, and return these
    steps. Each is tried once in an attempt; older ones than the newest commit are nobody's loss."""
    back = list[int]()
    deadline = time.monotonic() + seconds_max

    def in_time(done: int, total: int) -> None:
        if time.monotonic() > deadline:
            raise CheckpointError("it takes too long to be read again now")

    try:
        newest = max(steps_in(store), default=-1)
        for step in sorted(quarantined(store), reverse=True):
            if step > newest and _put_back(store, step, in_time):
                report(f"commit {step} was set aside, and verifies now: it is put back")
                back.append(step)
    except StoreError as error:
        report(f"what was set aside can't be looked at: {error}")
    return tuple(back)


def must_not_lose_all(folder: str, report: Callable[[str], None]) -> None:
    """Put back what verifies after all, where a later attempt was ordered to begin anew because all commits were set
    aside. Raises StorageError where there is any: what to resume from is chosen when an attempt is made."""
    if back := put_back_newest(open_store(folder), report, ONLY_HOPE_SECONDS_MAX):
        raise StorageError(
            f"commit {max(back)} was set aside, and verifies now: it is put back, and the next attempt resumes from it "
            "in the place of this one, which was to begin anew"
        )


def _put_back(store: Store, step: int, progress: Callable[[int, int], None]) -> bool:
    try:
        return put_back(store, step, progress) is not None
    except CheckpointError:
        return False


def _record(store: Store, step: int) -> dict[str, Any]:
    try:
        record = json.loads(store.read(_key(step), 2 * COMMIT_BYTES_MAX))
    except NotFound as error:
        raise GoneCommit(f"{store.uri}/{_key(step)}: step {step} is not set aside") from error
    except ValueError as error:
        raise DamagedCommit(f"{store.uri}/{_key(step)}: is no JSON: {error}") from error
    return record if isinstance(record, dict) else {}


def _key(step: int) -> str:
    return f"{QUARANTINE}/{step_name(step)}.json"


def quarantined(store: Store) -> frozenset[int]:
    names = (entry.key.rpartition("-")[2].removesuffix(".json") for entry in store.objects(f"{QUARANTINE}/"))
    return frozenset(int(name) for name in names if name.isdigit())


def newest_readable(
    folder: str, at_most: int, report: Callable[[str], None], check: Callable[[Commit], None] = lambda commit: None
) -> Commit:
    """The newest COMMIT up to step `at_most` that can be read and passes `check`, which raises DamagedCommit for one
    that is of no use; such are set aside, and `report` is told.

    Says nothing about the files that it names: `resume` verifies those. Raises CheckpointError where there is none.
    """
    store = open_store(folder)
    steps = [step for step in reversed(steps_in(store)) if step <= at_most]

    def read(step: int) -> Commit:
        commit = commit_in(store, step, own=True)
        check(commit)
        return commit

    return first_good(store, steps, at_most, read, report)


def first_good(
    store: Store, steps: Iterable[int], at_most: int, read: Callable[[int], T], report: Callable[[str], None] | None
) -> T:
    """`read(step)` of the first of `steps`, newest first, for which it succeeds; `report` is told of the others.

    What is damaged is set aside. What has just been removed, what is a newer Muster's and what does not fit the model
    is passed over and stays. So is one commit that the store fails to give after all its retries: where it gives the
    one before, it is not the store that is down; where it gives neither, a fall-back would throw work away. report:
    None on ranks that leave it to another to speak and to set aside. Raises the first refusal, or CheckpointError,
    where none is left.
    """
    refused: Exception | None = None
    store_failed = False
    say = report or (lambda words: None)
    for step in steps:
        try:
            return read(step)
        except DamagedCommit as damaged:
            if report is not None:
                set_aside(store, step, damaged, report)
        except GoneCommit:
            say(f"commit {step} was removed meanwhile, the one before it is tried")
        except (UnknownFormat, UserError) as unfit:
            refused = refused or unfit
            say(f"commit {step} is of no use here and stays where it is, the one before it is tried: {unfit}")
        except (CheckpointError, StoreError) as failed:
            if store_failed:
                raise refused or failed from failed
            refused, store_failed = refused or failed, True
            say(f"the store does not give commit {step}, the one before it is tried: {failed}")
    raise refused or CheckpointError(
        f"{store.uri}: no checkpoint up to step {at_most} can be read; start again without it, or restore its files"
    )


def set_aside(store: Store, step: int, why: DamagedCommit, report: Callable[[str], None]) -> None:
    """Quarantine a commit, or at least say so where the folder can't be written."""
    report(f"commit {step} is damaged and set aside, the one before it is tried: {why}")
    try:
        quarantine(store, step, str(why), damaged=not isinstance(why, UnusableCommit))
    except StoreError as error:
        report(f"commit {step} could not be moved to {QUARANTINE}/: {error}")
