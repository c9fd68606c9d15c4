"""A commit whose bytes did not verify is set aside, with the reason, so that nobody tries it again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from muster.contract.checkpoint import QUARANTINE, Commit, commit_key, step_name
from muster.storage.commits import COMMIT_BYTES_MAX
from muster.storage.errors import NotAFile, NotFound, StoreError
from muster.storage.listing import steps_in
from muster.storage.store import Store, open_store
from muster.trainer.checkpoint.commits import commit_in
from muster.trainer.checkpoint.failures import CheckpointError, DamagedCommit, GoneCommit, UnknownFormat
from muster.trainer.errors import UserError

T = TypeVar("T")


def quarantine(store: Store, step: int, reason: str) -> None:
    """Move the COMMIT of `step` to quarantine/. Its files stay until a newer commit outlives them.

    Raises StoreError, also where it is too large to be kept there; then it stays where it is.
    """
    try:
        commit: Any = store.read(commit_key(step), COMMIT_BYTES_MAX).decode(errors="replace")
    except NotFound:
        return
    except NotAFile:  # nothing can be read from it, so nothing of it is to be kept
        commit = None
    record = {"step": step, "at": time.time(), "reason": reason, "commit": commit}
    key = f"{QUARANTINE}/{step_name(step)}.json"
    store.delete(key)
    store.create(key, json.dumps(record).encode())
    store.delete(commit_key(step))


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
                set_aside(store, step, str(damaged), report)
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
        f"{store.uri}: no commit up to step {at_most} can be read; start again without it, or restore its files"
    )


def set_aside(store: Store, step: int, reason: str, report: Callable[[str], None]) -> None:
    """Quarantine a commit, or at least say so where the folder can't be written."""
    report(f"commit {step} is damaged and set aside, the one before it is tried: {reason}")
    try:
        quarantine(store, step, reason)
    except StoreError as error:
        report(f"commit {step} could not be moved to {QUARANTINE}/: {error}")
