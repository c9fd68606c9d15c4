"""Marks of who reads a commit or wants it kept: retention spares what is marked.

pins/step-00001200                     a person's wish; lasts until it is taken back
readers/step-00001200/<random>.json    somebody loads it just now; lasts an hour at most, so the dead hold nothing for
long
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator

from muster.contract.checkpoint import PINS, step_name
from muster.storage.errors import StoreError
from muster.storage.store import Store

READERS = "readers"
READ_SECONDS_MAX = 3_600.0


def pin(store: Store, step: int) -> bool:
    """Keep this commit whatever the policy says; False where it was pinned already."""
    return store.create(f"{PINS}/{step_name(step)}", b"{}")


def unpin(store: Store, step: int) -> None:
    store.delete(f"{PINS}/{step_name(step)}")


def pinned(store: Store) -> frozenset[int]:
    names = (entry.key.rpartition("-")[2] for entry in store.objects(f"{PINS}/"))
    return frozenset(int(name) for name in names if name.isdigit())


@contextlib.contextmanager
def reading(store: Store, step: int) -> Iterator[None]:
    """Mark the commit as being read. A folder that can't be written is read without a mark."""
    key = f"{READERS}/{step_name(step)}/{uuid.uuid4().hex}.json"
    try:
        store.create(key, json.dumps({"until": time.time() + READ_SECONDS_MAX}).encode())
    except StoreError:
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(StoreError):
            store.delete(key)


def being_read(store: Store, now: float) -> frozenset[int]:
    """Steps that somebody reads. Marks whose hour is over are removed."""
    steps = set()
    for entry in store.objects(f"{READERS}/"):
        step = entry.key.removeprefix(f"{READERS}/").partition("/")[0].rpartition("-")[2]
        if _until(store, entry.key) < now:
            store.delete(entry.key)
        elif step.isdigit():
            steps.add(int(step))
    return frozenset(steps)


def _until(store: Store, key: str) -> float:
    try:
        return float(json.loads(store.read(key))["until"])
    except (StoreError, ValueError, KeyError, TypeError):  # gone meanwhile, or not one of ours
        return 0.0
