"""A commit whose bytes did not verify is set aside, with the reason, so that nobody tries it again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from muster.contract.checkpoint import QUARANTINE, Commit, commit_key, step_name
from muster.trainer.checkpoint.commits import commit_in, steps_in
from muster.trainer.checkpoint.failures import CheckpointError, DamagedCommit
from muster.trainer.checkpoint.store import NotFound, Store, StoreError, open_store


def quarantine(store: Store, step: int, reason: str) -> None:
    """Move the COMMIT of `step` to quarantine/. Its files stay until a newer commit outlives them."""
    try:
        commit: Any = store.read(commit_key(step)).decode(errors="replace")
    except NotFound:
        return
    record = {"step": step, "at": time.time(), "reason": reason, "commit": commit}
    key = f"{QUARANTINE}/{step_name(step)}.json"
    store.delete(key)
    store.create(key, json.dumps(record).encode())
    store.delete(commit_key(step))


def quarantined(store: Store) -> frozenset[int]:
    names = (entry.key.rpartition("-")[2].removesuffix(".json") for entry in store.objects(f"{QUARANTINE}/"))
    return frozenset(int(name) for name in names if name.isdigit())


def newest_readable(folder: str, at_most: int, report: Callable[[str], None]) -> Commit:
    """The newest COMMIT up to step `at_most` that can be read; damaged ones are set aside, and `report` is told.

    Says nothing about the files that it names: `resume` verifies those. Raises CheckpointError where there is none.
    """
    store = open_store(folder)
    for step in reversed([step for step in steps_in(store) if step <= at_most]):
        try:
            return commit_in(store, step)
        except DamagedCommit as damaged:
            set_aside(store, step, str(damaged), report)
        except CheckpointError:  # another rank has just set it aside
            continue
    raise CheckpointError(f"{store.uri}: no commit up to step {at_most} can be read; start again, or restore its files")


def set_aside(store: Store, step: int, reason: str, report: Callable[[str], None]) -> None:
    """Quarantine a commit, or at least say so where the folder can't be written."""
    report(f"commit {step} is damaged and set aside, the one before it is tried: {reason}")
    try:
        quarantine(store, step, reason)
    except StoreError as error:
        report(f"commit {step} could not be moved to {QUARANTINE}/: {error}")
