"""Marks of who reads a commit, `readers/step-00001200/<random>.json`: retention spares it.

A mark of who reads just now lasts an hour at most, so that readers who died hold nothing for long. A mark of a job that
will read it, `readers/step-00001200/job-<uid>.json`, is renewed as long as the job lives.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator

from muster.storage.errors import NotFound, StoreError, UnfitObject
from muster.storage.store import Store, StoredObject
from muster.words.checkpoint import READERS, step_name

READ_SECONDS_MAX = 3_600.0


@contextlib.contextmanager
def reading(store: Store, step: int) -> Iterator[None]:
    """Mark the commit as being read. A folder that can't be written is read without a mark."""
    key = f"{READERS}/{step_name(step)}/{uuid.uuid4().hex}.json"
    try:
        store.create(key, _lasting(READ_SECONDS_MAX))
    except StoreError:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(StoreError):
            store.delete(key)


def reserve(store: Store, step: int, job: str, seconds: float) -> None:
    """Mark the commit as an input of the job for so long, anew where it was marked. Raises StoreError."""
    store.replace(_of_job(step, job), _lasting(seconds))


def release(store: Store, step: int, job: str) -> None:
    """Take the job's mark back; repeating it is harmless. Raises StoreError."""
    store.delete(_of_job(step, job))


def _of_job(step: int, job: str) -> str:
    return f"{READERS}/{step_name(step)}/job-{job}.json"


def _lasting(seconds: float) -> bytes:
    return json.dumps({"until": time.time() + seconds}).encode()


def being_read(store: Store, now: float) -> frozenset[int]:
    """Steps that somebody reads. Marks whose hour is over are removed."""
    steps = set()
    for entry in store.objects(f"{READERS}/"):
        step = entry.key.removeprefix(f"{READERS}/").partition("/")[0].rpartition("-")[2]
        if _until(store, entry) < now:
            store.delete(entry.key)
        elif step.isdigit():
            steps.add(int(step))
    return frozenset(steps)


def _until(store: Store, entry: StoredObject) -> float:
    """A mark that the store does not give right holds as long as any mark made at its time: the next answer may be
    another."""
    with contextlib.suppress(NotFound, UnfitObject, ValueError, KeyError, TypeError):
        return float(json.loads(store.read(entry.key))["until"])
    return entry.modified_at + READ_SECONDS_MAX
